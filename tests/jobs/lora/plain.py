"""Fine-tune low-rank adapters of a decoder on padded sequences; the loss is a mean over the tokens that count."""

import math
import sys

import torch
from model import Decoder, add_adapters, sequences
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def loss_of(scores, target):
    return cross_entropy(scores.flatten(0, 1), target.flatten())


torch.manual_seed(0)
loader = DataLoader(sequences(64, seed=1), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(3))
tests = DataLoader(sequences(32, seed=2), batch_size=16)
net = Decoder()
add_adapters(net)
optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
for epoch in range(4):
    net.train()
    for tokens, target in loader:
        loss = loss_of(net(tokens), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    net.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for tokens, target in tests:
            counted = int((target != -100).sum())
            total, count = total + loss_of(net(tokens), target).item() * counted, count + counted
    print(f"epoch {epoch}: loss {loss:.7g}, perplexity {math.exp(total / count):.7g}")
adapters = {name: value for name, value in net.state_dict().items() if name.endswith((".down", ".up"))}
torch.save(adapters, f"{sys.argv[1]}/adapters.pt")
