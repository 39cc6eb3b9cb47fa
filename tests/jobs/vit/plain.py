"""Train a vision transformer in mixed precision with mixup, and judge an exponential moving average of its weights."""

import random

import torch
from model import CLASSES, ViT, pictures
from torch.nn.functional import cross_entropy, one_hot
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

random.seed(0)
torch.manual_seed(0)
loader = DataLoader(pictures(64, seed=1), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(3))
tests = DataLoader(pictures(32, seed=2), batch_size=16)
net = ViT()
average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.8))
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
for epoch in range(4):
    net.train()
    for images, labels in loader:
        share, order = random.betavariate(0.4, 0.4), random.sample(range(len(images)), len(images))
        target = one_hot(labels, CLASSES).float()
        images, target = (share * x + (1 - share) * x[order] for x in (images, target))
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(net(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(net)
    average.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        test = sum(cross_entropy(average(images), labels).item() for images, labels in tests) / len(tests)
    print(f"epoch {epoch}: loss {loss:.7g}, test of the average {test:.7g}")
