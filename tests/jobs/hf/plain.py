"""Fine-tune a language model of transformers, with clipping and a warm-up."""

import torch
from model import gpt2, sequences
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

torch.manual_seed(0)
loader = DataLoader(sequences(64, seed=1), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(3))
tests = DataLoader(sequences(32, seed=2), batch_size=16)
net = gpt2()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / len(loader)))
for epoch in range(3):
    net.train()
    for batch in loader:
        loss = net(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    net.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in tests:
            counted = int((batch["labels"][:, 1:] != -100).sum())
            total, count = total + net(**batch).loss.item() * counted, count + counted
    print(f"epoch {epoch}: loss {loss:.7g}, test {total / count:.7g}")
