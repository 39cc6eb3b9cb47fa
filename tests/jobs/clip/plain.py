"""Train two towers so that each picture of a batch is closest to its own caption."""

import torch
from model import CLIP, captioned
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def contrast(images, captions):
    scores, right = images @ captions.T, torch.arange(len(images))
    return (cross_entropy(scores, right) + cross_entropy(scores.T, right)) / 2


torch.manual_seed(0)
loader = DataLoader(captioned(64, seed=1), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(3))
tests = DataLoader(captioned(32, seed=2), batch_size=16)
net = CLIP()
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
for epoch in range(4):
    net.train()
    for images, captions in loader:
        loss = contrast(*net(images, captions))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        test = sum(contrast(*net(images, captions)).item() for images, captions in tests) / len(tests)
    print(f"epoch {epoch}: loss {loss:.7g}, test {test:.7g}")
