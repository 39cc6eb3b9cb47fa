"""The template of a user's own scheme: a file with w and n that compiles as it is."""

from __future__ import annotations

import re
from pathlib import Path

from schedgen.util.errors import RefusedFile, UsageError, clip
from schedgen.util.files import open_output

TEMPLATE = '''\
"""NAME: stages go round the workers, one forward, one backward. Say here what yours does."""

# schedgen compile NAME.py --stages 4 --microbatches 8 -o NAME.json
# schedgen stats NAME.json
# mpiexec -n 4 python -m mpirun NAME.json --model mpirun.examples.mlp:tiny --steps 5 --verify

import numpy as np

from schedgen import F

# s, b and d are NumPy arrays of all stages, microbatches and directions; d is F (forward) or B (backward). Arguments
# behind the * are the sizes that compile was given, any of stages, microbatches, workers, groups, chunks, group,
# replicas, slices; None or a default stands for one that was not.

# What n means. "strict": every worker runs its jobs exactly in increasing n, which must differ within a worker.
# "greedy": a free worker takes the job that can start earliest, and n settles ties.
mode = "strict"


def w(s, b, d, *, stages, workers=None):
    """(the worker that stores the weights, the worker that computes) of every job."""
    worker = s % (workers or stages)
    return worker, worker


def n(s, b, d, *, stages):
    """Which job goes first: the smaller the sooner."""
    way = np.where(d == F, s, 2 * stages - 1 - s)  # how far along a microbatch is, to the loss and back
    return (way + 2 * b) * stages + s


# More that a scheme may say:
#
# split = True                      d is F, I (gradient of the input) or W (gradient of the weights)
# edges = [(0, 2), (1, 2)]          producer and consumer stages, where they are no chain
# per_consumer = [0]                       stages that give each of several consumers an output of its own
# updates = "stash"                 when weights change: "flush", "stash", "vertical" or "2bw"
# accumulated = 8                   2bw: microbatches of an update; else as many as stages
#
# def cap(s, *, stages):            greedy: so many microbatches in flight on a stage and worker, until I or B ends
#     return stages - s
# def unsplit_backward(s, b):       split: whether a backward is one job after all
#     return s == 0
# def delayed_send(s, b):           strict: whether a forward's output leaves only after the worker's next job
#     return b > 2
'''


def new(name: str) -> Path:
    """Write NAME.py and return its path; RefusedFile if such a file exists already, which is left alone."""
    path = Path(name if name.endswith(".py") else f"{name}.py")
    if not re.fullmatch(r"\w[\w.-]*", path.stem):
        raise UsageError(f"'{clip(name)}': the name should be letters, digits and any of _ . -")
    if path.exists():
        raise RefusedFile(f"{path} is there already, and new overwrites nothing")
    with open_output(str(path)) as out:
        out.write(TEMPLATE.replace("NAME", path.stem).encode())
    return path
