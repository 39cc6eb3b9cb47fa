"""Train an LSTM on streams of text: each batch begins with the state in which the one before has ended."""

import torch
from model import STREAMS, WIDTH, Letters, pieces
from torch import nn
from torch.nn.functional import cross_entropy

import mpirun


class Stateful(nn.Module):
    """Keeps the state of all streams in a buffer. A microbatch is of some streams: it reads and writes their rows."""

    def __init__(self):
        super().__init__()
        self.letters = Letters()
        self.register_buffer("state", torch.zeros(2, 1, STREAMS, WIDTH))

    def forward(self, letters, rows):
        scores, state = self.letters(letters, tuple(self.state[:, :, rows]))
        self.state[:, :, rows] = torch.stack(state).detach()
        return scores


def loss_of(scores, target):
    return cross_entropy(scores.flatten(0, 1), target.flatten())


torch.manual_seed(0)
net, rows = Stateful(), torch.arange(STREAMS)
run = mpirun.Engine("ddp", net, microbatches=4, loss=loss_of, optimizer=torch.optim.Adam, lr=1e-2)
for epoch in range(4):
    net.state.zero_()
    for letters, target in pieces(6, seed=1):
        loss = run.step(((letters, rows), target)).loss
    net.state.zero_()
    test = run.evaluate([((letters, rows), target) for letters, target in pieces(3, seed=2)]).loss
    if run.rank == 0:
        print(f"epoch {epoch}: loss {loss:.7g}, test {test:.7g}")
