"""From an nn.Module to the stages of a model and what each of them reads."""

from torch.distributed.pipelining import pipe_split

from mpirun.split.coupled import batch_coupled
from mpirun.split.cut import Cut
from mpirun.split.errors import MpirunWarning
from mpirun.split.sequential import split_sequential
from mpirun.split.traced import split

__all__ = ["Cut", "MpirunWarning", "batch_coupled", "pipe_split", "split", "split_sequential"]
