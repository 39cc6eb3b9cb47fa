"""What every script begins with that tests execute on ranks: its imports, some data, and a small Engine."""

PRELUDE = '''
import contextlib, copy, io, itertools, json, math, os, re, signal, sys, threading, time, warnings
from pathlib import Path
import mpirun, numpy as np, torch
from mpi4py import MPI
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import IterableDataset, TensorDataset
SGD = torch.optim.SGD
rank = MPI.COMM_WORLD.rank
folder = Path(sys.argv[1] if sys.argv[1:] else ".")
x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
rows = [(row, row) for row in x]  # a dataset

def layers(count):
    torch.manual_seed(0)
    return [nn.Linear(4, 4) for _ in range(count)]

def engine(model=1, scheme="gpipe", **options):
    """Of a model, or of so many linear layers, which have the same weights every time."""
    if isinstance(model, int):
        model, options = layers(model), {"example": (x[:4], x[:4]), **options}
    return mpirun.Engine(scheme, model, **{"loss": mse_loss, "microbatches": 2, "timeout": 0, **options})

def steps(name):
    """The steps of the checkpoints in a folder."""
    return [int(path.name[5:]) for path in sorted((folder / name).glob("step-*"))]

def refused(call, *arguments, **options):
    """The exit code of a call that ends the run, else None."""
    try:
        call(*arguments, **options)
    except SystemExit as end:
        return end.code
'''
