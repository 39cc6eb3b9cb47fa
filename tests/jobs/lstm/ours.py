"""Train an LSTM on streams of text: each batch begins with the state in which the one before has ended."""

import torch
from model import STREAMS, WIDTH, Letters, pieces
from torch import nn
from torch.nn.functional import cross_entropy

import mpirun


class Stateful(nn.Module):
    """Keeps the state in buffers. Each rank computes one microbatch, so it has the state of its own streams."""

    def __init__(self, net, streams):
        super().__init__()
        self.net = net
        self.register_buffer("h", torch.zeros(1, streams, WIDTH), persistent=False)
        self.register_buffer("c", torch.zeros(1, streams, WIDTH), persistent=False)

    def forward(self, letters):
        scores, (h, c) = self.net(letters, (self.h.clone(), self.c.clone()))
        self.h.copy_(h.detach())
        self.c.copy_(c.detach())
        return scores


def loss_of(scores, target):
    return cross_entropy(scores.flatten(0, 1), target.flatten())


torch.manual_seed(0)
net = Stateful(Letters(), STREAMS // 2)
run = mpirun.Engine("ddp", net, microbatches=2, loss=loss_of, optimizer=torch.optim.Adam, lr=1e-2)
for epoch in range(4):
    net.h.zero_(), net.c.zero_()
    for letters, target in pieces(6, seed=1):
        loss = run.step((letters, target)).loss
    if run.rank == 0:
        print(f"epoch {epoch}: loss {loss:.7g}")
