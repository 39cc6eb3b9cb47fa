"""Train a CNN until its test loss no longer falls, and keep the best weights."""

import copy
import sys

import torch
from model import CNN, pictures
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

torch.manual_seed(0)
loader = DataLoader(pictures(64, seed=1), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(3))
tests = DataLoader(pictures(32, seed=2), batch_size=16)
net = CNN()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
best, best_weights, worse = float("inf"), {}, 0
for epoch in range(20):
    net.train()
    for images, labels in loader:
        loss = cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        test = sum(cross_entropy(net(images), labels).item() for images, labels in tests) / len(tests)
    print(f"epoch {epoch}: loss {loss:.7g}, test {test:.7g}")
    if test < best:
        best, best_weights, worse = test, copy.deepcopy(net.state_dict()), 0
    else:
        worse += 1
    if worse == 2:
        break
net.load_state_dict(best_weights)
torch.save(net.state_dict(), f"{sys.argv[1]}/best.pt")
