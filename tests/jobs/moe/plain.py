"""Train a mixture of experts; experts are kept busy by a loss for each sequence, as in DeepSeek-V3."""

import torch
from model import EXPERTS, Model, sequences
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def loss_of(output, target):
    scores, shares, probabilities = output
    balance = EXPERTS * (shares * probabilities).sum(-1).mean()
    return cross_entropy(scores.flatten(0, 1), target.flatten()) + 0.01 * balance, balance


torch.manual_seed(0)
loader = DataLoader(sequences(64, seed=1), batch_size=16)
net = Model()
optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
for _ in range(4):
    for tokens, target in loader:
        loss, balance = loss_of(net(tokens), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"loss {loss:.7g}, balance {balance:.7g}")
