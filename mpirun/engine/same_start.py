"""Checks that ranks start from the same values: a script may draw different ones on each rank."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import NamedTuple

from mpi4py import MPI
from torch import Tensor, nn

from mpirun.comm.fail_together import Stop, first_difference
from mpirun.data.values import digest_of, raw_bytes
from mpirun.model.contract import Model
from mpirun.model.module_tensors import own_tensors


class Values(NamedTuple):
    """What must be the same on all ranks with a stage: a tied parameter (under the tie's first name), all trained
    parameters, or all else.
    """

    stage: int  # of the model's
    slice: int
    what: str


def value_digests(model: Model, index: int, module: nn.Module, owned: bool) -> dict[Values, str]:
    """Digests of a stage's values. Only a rank that owns some part of its weights has trained parameters."""

    def values(stage: int, what: str) -> Values:
        return Values(model.model_stage(stage), model.slice_of(stage).index, what)

    tensors = own_tensors(module)
    others = {name: tensor for name, tensor in tensors.items() if not tensor.requires_grad}
    digests = {values(index, "frozen parameters or buffers"): _digest(others)}
    if owned:
        trained = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
        digests[values(index, "parameters")] = _digest(trained)
        for first, *more in model.tied:
            for _, name in (place for place in (first, *more) if place[0] == index):
                digests[values(*first)] = _digest({first[1]: module.get_parameter(name)})
    return digests


def check_same_start(comm: MPI.Intracomm, own: Mapping[Values, str]) -> None:
    """Stop if ranks have different values of a stage. Collective."""
    if (difference := first_difference(comm, own)) is not None:
        values, one, other, *_ = difference
        raise Stop(
            f"ranks {one} and {other} begin with different values of stage {values.stage}, {values.what}: the code "
            "that makes them should draw the same numbers on every rank, as after torch.manual_seed with the same "
            "number of threads; modules that an earlier Engine has trained have their values on its owners' ranks: "
            "save and resume"
        )


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """A digest of names and values. A whole stage's values go through CRC-32: three times as fast as SHA-256."""
    return digest_of(part for name, x in sorted(tensors.items()) for part in (name, x.dtype, x.shape, _crc(x)))


def _crc(x: Tensor) -> int:
    return zlib.crc32(raw_bytes(x).data)
