"""Train a mixture of experts; experts are kept busy by a loss for each sequence, as in DeepSeek-V3."""

import torch
from model import EXPERTS, Model, sequences
from torch.nn.functional import cross_entropy

import mpirun


def loss_of(output, target):
    scores, shares, probabilities = output
    balance = EXPERTS * (shares * probabilities).sum(-1).mean()
    return cross_entropy(scores.flatten(0, 1), target.flatten()) + 0.01 * balance, {"balance": balance}


torch.manual_seed(0)
net = Model()
run = mpirun.Engine("ddp", net, microbatches=2, loss=loss_of, optimizer=torch.optim.SGD, lr=0.5)
loader = run.loader(sequences(64, seed=1), microbatch_size=8)
for _ in range(4):
    for batch in loader:
        result = run.step(batch)
        if run.rank == 0:
            print(f"loss {result.loss:.7g}, balance {result.metrics['balance']:.7g}")
