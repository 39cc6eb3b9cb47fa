"""Train an encoder and decoder on batches of sequences of one length each."""

import torch
from model import Reversed, Seq2Seq, buckets
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def loss_of(scores, target):
    return cross_entropy(scores.flatten(0, 1), target.flatten())


torch.manual_seed(0)
train, test = Reversed(64, seed=1), Reversed(32, seed=2)
loader, tests = (DataLoader(data, batch_sampler=buckets(data)) for data in (train, test))
net = Seq2Seq()
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
for epoch in range(3):
    net.train()
    for source, target in loader:
        loss = loss_of(net(source, target[:, :-1]), target[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    net.eval()
    total = 0.0
    with torch.no_grad():
        for source, target in tests:
            total += loss_of(net(source, target[:, :-1]), target[:, 1:]).item()
    print(f"epoch {epoch}: loss {loss:.7g}, test {total / len(tests):.7g}")
