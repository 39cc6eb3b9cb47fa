"""plain.py on the ranks of a pipeline, by mpirun: `mpiexec -n 4 python by_mpirun.py 3`."""

import math
import sys
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import mpirun

LENGTH, WIDTH, BATCH, STEPS = 64, 128, 32, int(sys.argv[1])


class Pieces(Dataset):
    def __init__(self, text):
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self):
        return len(self.bytes) // LENGTH - 1

    def __getitem__(self, index):
        piece = self.bytes[index * LENGTH : (index + 1) * LENGTH + 1]
        return piece[:-1], piece[1:]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, x):
        return self.head(self.layers(self.embedding(x), mask=self.mask, is_causal=True))


def loss_of(scores, target):
    return cross_entropy(scores.flatten(0, 1), target.flatten())


def rate(step):
    return 1e-3 * (1 + math.cos(math.pi * step / STEPS)) / 2


text = Path(sysconfig.get_paths()["stdlib"], "typing.py").read_bytes()
train, test = Pieces(text[:-20000]), Pieces(text[-20000:])
torch.manual_seed(0)
model = mpirun.split(Model(), torch.zeros(BATCH // 8, LENGTH, dtype=torch.long), stages=4)
run = mpirun.Engine(
    "1f1b", model, stages=4, microbatches=8, loss=loss_of, lr=rate, clip=1.0,
    optimizer=lambda named: torch.optim.AdamW([p.parameter for p in named], weight_decay=0.1),
)  # fmt: skip
loader = run.loader(train, BATCH // 8, shuffle=True, last="drop")
tests = run.loader(test, BATCH // 8)
while run.steps < STEPS:
    for batch in loader:
        loss = run.step(batch).loss
        if run.rank == 0:
            print(f"step {run.steps}: loss {loss:.4f}", flush=True)
        if run.steps == STEPS:
            break
loss = run.evaluate(tests).loss
if run.rank == 0:
    print(f"test loss {loss:.4f}")
run.export("model")
