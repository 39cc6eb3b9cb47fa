"""plain.py on data-parallel ranks, by torch's DDP: `torchrun --nproc-per-node 4 by_ddp.py 3`."""

import math
import sys
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

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
torch.set_num_threads(1)
torch.manual_seed(0)
model = DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
sampler = DistributedSampler(train, ranks, rank, shuffle=True, drop_last=True)
loader = DataLoader(train, BATCH // ranks, sampler=sampler, drop_last=True)
tests = DataLoader(torch.utils.data.Subset(test, range(rank, len(test), ranks)), BATCH // ranks)
step = epoch = 0
while step < STEPS:
    sampler.set_epoch(epoch)
    epoch += 1
    for x, y in loader:
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        loss = loss_of(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step}: loss {mean.item():.4f}", flush=True)
        if step == STEPS:
            break
model.eval()
with torch.no_grad():
    losses = [(loss_of(model.module(x), y).item(), len(x)) for x, y in tests]
total = torch.tensor(sum(loss * count for loss, count in losses))
dist.all_reduce(total)
if rank == 0:
    print(f"test loss {total.item() / len(test):.4f}")
    torch.save(model.module.state_dict(), "model.pt")
dist.destroy_process_group()
