"""Fine-tune low-rank adapters of a decoder on padded sequences; the loss is a mean over the tokens that count."""

import math
import sys

import torch
from model import LENGTH, Decoder, add_adapters, sequences
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import mpirun


def loss_of(scores, target):
    return cross_entropy(scores.flatten(0, 1), target.flatten())


torch.manual_seed(0)
loader = DataLoader(sequences(64, seed=1), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(3))
tests = DataLoader(sequences(32, seed=2), batch_size=16)
net = Decoder()
add_adapters(net)
cut = mpirun.split(net, torch.zeros(4, LENGTH, dtype=torch.long), stages=2)
run = mpirun.Engine(
    "1f1b", cut, microbatches=4, loss=loss_of, loss_weight=lambda target: (target != -100).sum(),
    optimizer=torch.optim.AdamW, lr=1e-2,
)  # fmt: skip
for epoch in range(4):
    for tokens, target in loader:
        loss = run.step((tokens, target)).loss
    test = run.evaluate(tests).loss
    if run.rank == 0:
        print(f"epoch {epoch}: loss {loss:.7g}, perplexity {math.exp(test):.7g}")
adapters = {name: value for name, value in run.state_dict().items() if name.endswith((".down", ".up"))}
if run.rank == 0:
    torch.save(adapters, f"{sys.argv[1]}/adapters.pt")
