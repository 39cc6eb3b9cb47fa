"""A language model of bytes, trained in plain PyTorch. The other scripts here are this one, moved to several ranks."""

import math
import sys
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

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
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
loader = DataLoader(train, BATCH, shuffle=True, drop_last=True)
tests = DataLoader(test, BATCH)
step = 0
while step < STEPS:
    for x, y in loader:
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        loss = loss_of(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
        if step == STEPS:
            break
model.eval()
with torch.no_grad():
    losses = [(loss_of(model(x), y).item(), len(x)) for x, y in tests]
print(f"test loss {sum(loss * count for loss, count in losses) / len(test):.4f}")
torch.save(model.state_dict(), "model.pt")
