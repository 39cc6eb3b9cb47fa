"""Train a module of one's own in four stages, one a rank: mpiexec -n 4 python -m mpirun.examples.first_script"""

import torch
from torch import nn

import mpirun


class Sorter(nn.Module):
    """Learns to sort eight numbers."""

    def __init__(self) -> None:
        """Eight residual layers of width 64."""
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (samples, 8)."""
        for layer in self.layers:
            x = x + layer(x)
        return x


torch.manual_seed(0)  # the same weights and data on every rank
numbers = torch.rand(2560, 8)
data = torch.utils.data.TensorDataset(numbers, numbers.sort(dim=1).values)
train, test = torch.utils.data.random_split(data, [2048, 512])
cut = mpirun.split(Sorter(), numbers[:16], stages=4)
run = mpirun.Engine(
    "1f1b", cut, stages=4, microbatches=8, loss=nn.functional.mse_loss, optimizer=torch.optim.Adam, lr=1e-3
)
loader, tests = run.loader(train, microbatch_size=16, shuffle=True), run.loader(test, microbatch_size=16)
for epoch in range(5):
    for batch in loader:
        result = run.step(batch)
    found = run.evaluate(tests)
    if run.rank == 0:
        print(f"epoch {epoch}: loss {result.loss:.4f}, test {found.loss:.4f}")
