"""Train a generator against a discriminator, one step of each in turn."""

import torch
from model import NOISE, circle, discriminator, generator
from torch.nn.functional import binary_cross_entropy_with_logits as judge

BATCH = 16
torch.manual_seed(0)
g, d = generator(), discriminator()
optimizer_g = torch.optim.Adam(g.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizer_d = torch.optim.Adam(d.parameters(), lr=2e-3, betas=(0.5, 0.999))
real, fake = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)
for step in range(20):
    with torch.no_grad():
        points = torch.cat([circle(BATCH), g(torch.randn(BATCH, NOISE))])
    loss_d = judge(d(points), torch.cat([real, fake]))
    optimizer_d.zero_grad()
    loss_d.backward()
    optimizer_d.step()

    loss_g = judge(d(g(torch.randn(BATCH, NOISE))), real)
    optimizer_g.zero_grad()
    loss_g.backward()
    optimizer_g.step()
    print(f"step {step}: discriminator {loss_d:.7g}, generator {loss_g:.7g}")
