"""Fine-tune a language model of transformers, with clipping and a warm-up."""

import torch
from model import gpt2, sequences
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import mpirun

torch.manual_seed(0)
loader = DataLoader(sequences(64, seed=1), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(3))
tests = DataLoader(sequences(32, seed=2), batch_size=16)
net = gpt2()
run = mpirun.Engine(
    "ddp", net, microbatches=2, clip=1.0,
    loss=lambda output, batch: output.loss,
    loss_weight=lambda batch: (batch["labels"][:, 1:] != -100).sum(),
    optimizer=lambda named: torch.optim.AdamW([p.parameter for p in named], lr=1e-2),
    scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / len(loader))),
)  # fmt: skip
for epoch in range(3):
    for batch in loader:
        loss = run.step(batch).loss
    test = run.evaluate(tests).loss
    if run.rank == 0:
        print(f"epoch {epoch}: loss {loss:.7g}, test {test:.7g}")
