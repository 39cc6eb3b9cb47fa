"""Train a CNN until its test loss no longer falls, and keep the best weights."""

import copy
import sys

import torch
from model import CNN, pictures
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import mpirun

torch.manual_seed(0)
loader = DataLoader(pictures(64, seed=1), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(3))
tests = DataLoader(pictures(32, seed=2), batch_size=16)
net = CNN()
run = mpirun.Engine("ddp", net, microbatches=2, loss=cross_entropy, optimizer=torch.optim.AdamW, lr=1e-2)
best, best_weights, worse = float("inf"), {}, 0
for epoch in range(20):
    for images, labels in loader:
        loss = run.step((images, labels)).loss
    test = run.evaluate(tests).loss
    if run.rank == 0:
        print(f"epoch {epoch}: loss {loss:.7g}, test {test:.7g}")
    if test < best:
        best, best_weights, worse = test, copy.deepcopy(net.state_dict()), 0
    else:
        worse += 1
    if worse == 2:
        break
net.load_state_dict(best_weights)
if run.rank == 0:
    torch.save(net.state_dict(), f"{sys.argv[1]}/best.pt")
