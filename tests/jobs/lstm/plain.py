"""Train an LSTM on streams of text: each batch begins with the state in which the one before has ended."""

import torch
from model import STREAMS, WIDTH, Letters, pieces
from torch.nn.functional import cross_entropy


def loss_of(scores, target):
    return cross_entropy(scores.flatten(0, 1), target.flatten())


torch.manual_seed(0)
net = Letters()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for epoch in range(4):
    h, c = torch.zeros(2, 1, STREAMS, WIDTH)
    for letters, target in pieces(6, seed=1):
        scores, (h, c) = net(letters, (h.detach(), c.detach()))
        loss = loss_of(scores, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    h, c, test = *torch.zeros(2, 1, STREAMS, WIDTH), 0.0
    with torch.no_grad():
        for letters, target in pieces(3, seed=2):
            scores, (h, c) = net(letters, (h, c))
            test += loss_of(scores, target).item() / 3
    print(f"epoch {epoch}: loss {loss:.7g}, test {test:.7g}")
