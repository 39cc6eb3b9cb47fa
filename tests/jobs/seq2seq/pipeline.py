"""Train an encoder and decoder on batches of sequences of one length each."""

import torch
from model import LENGTHS, Reversed, Seq2Seq, buckets
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import mpirun


def loss_of(scores, target):
    return cross_entropy(scores.flatten(0, 1), target.flatten())


torch.manual_seed(0)
train, test = Reversed(64, seed=1), Reversed(32, seed=2)
loader, tests = (DataLoader(data, batch_sampler=buckets(data)) for data in (train, test))
net = Seq2Seq()
tokens = torch.zeros(4, LENGTHS[0], dtype=torch.long)
cut = mpirun.split(net, (tokens, tokens), stages=2, shared="replicate", buckets=LENGTHS)
run = mpirun.Engine("1f1b", cut, microbatches=2, loss=loss_of, optimizer=torch.optim.Adam, lr=3e-3)
for epoch in range(3):
    for source, target in loader:
        loss = run.step(((source, target[:, :-1]), target[:, 1:])).loss
    test = run.evaluate([((source, target[:, :-1]), target[:, 1:]) for source, target in tests])
    if run.rank == 0:
        print(f"epoch {epoch}: loss {loss:.7g}, test {test.loss:.7g}")
