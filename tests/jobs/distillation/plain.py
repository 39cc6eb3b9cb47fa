"""Train a small student on labels and on what a large teacher says of the same points."""

import torch
from model import perceptron, points
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from torch.utils.data import DataLoader


def distil(scores, points, labels):
    with torch.no_grad():
        taught = teacher(points)
    soft = kl_div(log_softmax(scores / 2, -1), log_softmax(taught / 2, -1), log_target=True, reduction="batchmean")
    return cross_entropy(scores, labels) + 4 * soft


torch.manual_seed(0)
loader = DataLoader(points(64, seed=1), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(3))
tests = DataLoader(points(32, seed=2), batch_size=16)
teacher, student = perceptron(64).eval(), perceptron(16)
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
for epoch in range(4):
    student.train()
    for batch, labels in loader:
        loss = distil(student(batch), batch, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    student.eval()
    with torch.no_grad():
        right = sum((student(batch).argmax(-1) == labels).sum().item() for batch, labels in tests)
    print(f"epoch {epoch}: loss {loss:.7g}, accuracy {right / len(tests.dataset):.7g}")
