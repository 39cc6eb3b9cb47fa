"""Train two towers so that each picture of a batch is closest to its own caption."""

import torch
from model import CLIP, captioned
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import mpirun


def contrast(outputs, _):
    images, captions = outputs
    scores, right = images @ captions.T, torch.arange(len(images))
    return (cross_entropy(scores, right) + cross_entropy(scores.T, right)) / 2


torch.manual_seed(0)
loader = DataLoader(captioned(64, seed=1), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(3))
tests = DataLoader(captioned(32, seed=2), batch_size=16)
net = CLIP()
cut = mpirun.split(net, (torch.zeros(4, 24), torch.zeros(4, 4, dtype=torch.long)), stages=2)
run = mpirun.Engine(
    "gpipe", cut, microbatches=4, loss=contrast, loss_of="minibatch", optimizer=torch.optim.AdamW, lr=3e-3
)
for epoch in range(4):
    for images, captions in loader:
        loss = run.step(((images, captions), None)).loss
    test = run.evaluate([((images, captions), None) for images, captions in tests]).loss
    if run.rank == 0:
        print(f"epoch {epoch}: loss {loss:.7g}, test {test:.7g}")
