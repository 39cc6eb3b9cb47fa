"""Train a generator against a discriminator, one step of each in turn."""

import sys
from functools import partial

import torch
from model import NOISE, circle, discriminator, generator
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as judge

import mpirun

BATCH = 16
torch.manual_seed(0)
g, d = generator(), discriminator()
adam = partial(torch.optim.Adam, lr=2e-3, betas=(0.5, 0.999))
real, fake = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)


def of_generator(named: list[mpirun.NamedParameter]) -> torch.optim.Optimizer:
    return adam([x.parameter for x in named if x.name.startswith("0.")])


run_d = mpirun.Engine("ddp", d, microbatches=2, loss=judge, optimizer=adam)
run_g = mpirun.Engine("ddp", nn.Sequential(g, d), microbatches=2, loss=judge, optimizer=of_generator)
for step in range(20):
    with torch.no_grad():
        points = torch.cat([circle(BATCH), g(torch.randn(BATCH, NOISE))])
    loss_d = run_d.step((points, torch.cat([real, fake])), leave=False).loss
    of_g = run_g.step((torch.randn(BATCH, NOISE), real), leave=False)
    if of_g.leave:
        run_d.save(f"{sys.argv[1]}/d")
        run_g.save(f"{sys.argv[1]}/g")
        sys.exit(143)
    if run_d.rank == 0:
        print(f"step {step}: discriminator {loss_d:.7g}, generator {of_g.loss:.7g}")
