"""plain.py on the ranks of a pipeline, by torch's pipelining: `torchrun --nproc-per-node 4 by_pipelining.py 3`."""

import math
import sys
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline
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
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
first, last = rank == 0, rank == ranks - 1
torch.set_num_threads(1)
torch.manual_seed(0)
example = torch.zeros(BATCH // 8, LENGTH, dtype=torch.long)
points = {f"layers.layers.{4 * k // ranks}": SplitPoint.BEGINNING for k in range(1, ranks)}
pipe = pipeline(Model(), mb_args=(example,), split_spec=points)
stage = pipe.build_stage(rank, torch.device("cpu"), dist.group.WORLD)
model = stage.submod
schedule = Schedule1F1B(stage, 8, loss_fn=loss_of)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
generator = torch.Generator().manual_seed(0)  # all ranks shuffle alike
loader = DataLoader(train, BATCH, shuffle=True, drop_last=True, generator=generator)
tests = DataLoader(test, BATCH, drop_last=True)  # a schedule takes whole batches only
step = 0
while step < STEPS:
    for x, y in loader:
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        losses = []
        schedule.step(*([x] if first else []), **({"target": y, "losses": losses} if last else {}))
        square = sum(p.grad.square().sum() for p in model.parameters())  # each rank has its stage's gradients only
        dist.all_reduce(square)
        factor = min(1.0, 1.0 / (square.sqrt().item() + 1e-6))
        for p in model.parameters():
            p.grad.mul_(factor)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if last:
            print(f"step {step}: loss {torch.stack(losses).mean().item():.4f}", flush=True)
        if step == STEPS:
            break
model.eval()
total = count = 0
with torch.no_grad():
    for x, y in tests:
        losses = []
        schedule.eval(*([x] if first else []), **({"target": y, "losses": losses} if last else {}))
        total, count = total + sum(loss.item() for loss in losses), count + len(losses)
if last:
    print(f"test loss {total / count:.4f}")
parts = [None] * ranks
dist.gather_object(model.state_dict(), parts if first else None)
if first:
    torch.save({name: value for part in parts for name, value in part.items()}, "model.pt")
dist.destroy_process_group()
