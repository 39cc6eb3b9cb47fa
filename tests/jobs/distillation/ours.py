"""Train a small student on labels and on what a large teacher says of the same points."""

import torch
from model import perceptron, points
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from torch.utils.data import DataLoader

import mpirun


def distil(scores, batch):
    points, labels = batch
    with torch.no_grad():
        taught = teacher(points)
    soft = kl_div(log_softmax(scores / 2, -1), log_softmax(taught / 2, -1), log_target=True, reduction="batchmean")
    return cross_entropy(scores, labels) + 4 * soft, {"accuracy": (scores.argmax(-1) == labels).float().mean()}


torch.manual_seed(0)
loader = DataLoader(points(64, seed=1), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(3))
tests = DataLoader(points(32, seed=2), batch_size=16)
teacher, student = perceptron(64).eval(), perceptron(16)
cut = mpirun.split(student, torch.zeros(4, 16), stages=2)
run = mpirun.Engine("1f1b", cut, microbatches=4, loss=distil, optimizer=torch.optim.AdamW, lr=1e-2)
for epoch in range(4):
    for batch, labels in loader:
        loss = run.step((batch, (batch, labels))).loss
    test = run.evaluate([(batch, (batch, labels)) for batch, labels in tests])
    if run.rank == 0:
        print(f"epoch {epoch}: loss {loss:.7g}, accuracy {test.metrics['accuracy']:.7g}")
