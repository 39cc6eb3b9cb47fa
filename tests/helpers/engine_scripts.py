"""The beginning of scripts that drive Engines, which the tests of several subjects have in common."""

SAVING = """
import sys, torch, mpirun
from pathlib import Path
from torch.nn.functional import mse_loss
folder = Path(sys.argv[1])
x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
def engine(stages=1, **options):
    torch.manual_seed(0)
    return mpirun.Engine("gpipe", [torch.nn.Linear(4, 4) for _ in range(stages)], stages=stages, microbatches=2,
                         **{"loss": mse_loss, "timeout": 0, "example": (x[:4], x[:4]), **options})
def steps(name):
    return [int(path.name[5:]) for path in sorted((folder / name).glob("step-*"))]
def refused(call):
    try:
        call()
    except SystemExit as end:
        return end.code
"""
