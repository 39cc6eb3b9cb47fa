"""Train a CNN until its test loss no longer falls, and keep the best weights."""

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
cut = mpirun.split(net, torch.zeros(4, 1, 8, 8), stages=2)
run = mpirun.Engine("1f1b", cut, microbatches=4, loss=cross_entropy, optimizer=torch.optim.AdamW, lr=1e-2)
best, best_weights, worse = float("inf"), {}, 0
for epoch in range(20):
    for images, labels in loader:
        loss = run.step((images, labels)).loss
    test = run.evaluate(tests).loss
    if run.rank == 0:
        print(f"epoch {epoch}: loss {loss:.7g}, test {test:.7g}")
    if test < best:
        best, best_weights, worse = test, run.state_dict(), 0
    else:
        worse += 1
    if worse == 2:
        break
run.load_state_dict(best_weights)
if run.rank == 0:
    torch.save(best_weights, f"{sys.argv[1]}/best.pt")
