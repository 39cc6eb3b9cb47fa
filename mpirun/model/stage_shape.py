"""What every rank knows of a stage: shapes and types, memory, which layers draw. `shapes` finds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpirun.model.dataflow import ALIGN, TensorSpec
from mpirun.model.parallel_layers import SlicedDim


class Place(NamedTuple):
    """Where a parameter lies in its stage's flat weights, which are bytes."""

    begin: int  # in bytes
    size: torch.Size
    dtype: torch.dtype

    @property
    def end(self) -> int:
        """The offset of the byte after its last one."""
        return self.begin + self.size.numel() * self.dtype.itemsize

    def of(self, flat: Tensor) -> Tensor:
        """The parameter in a flat tensor, in its shape."""
        return flat[self.begin : self.end].view(self.dtype).view(self.size)


class StageShape(NamedTuple):
    """What every rank knows of a stage: its outputs on one microbatch, and its trained parameters."""

    outputs: tuple[TensorSpec, ...]
    parameter_names: tuple[str, ...]  # of the trained parameters
    weight_bytes: int = 0  # of these parameters, flat
    overwrites_inputs: bool = False  # whether it changes its inputs in place
    overwrites_buffers: bool = False  # whether it changes them, or might in other microbatches
    changed_buffers: tuple[str, ...] = ()  # the buffers that it changed in the trial
    aliased_outputs: tuple[int, ...] = ()  # outputs that lie in the memory of its inputs or parameters
    random_layers: tuple[str, ...] = ()  # layers that draw random numbers, or might in other microbatches
    layout: tuple[Place, ...] = ()  # of the trained parameters in the flat weights
    sliced_dims: Mapping[str, SlicedDim] = {}  # the parameters and buffers that are divided among slices
    model_stage: int = 0  # its index; of a slice or replica, that of the model function's stage


def flat_layout(parameters: Sequence[Tensor]) -> tuple[list[Place], int]:
    """Where each parameter lies in the stage's flat weights, one type after the other, and the bytes of all."""
    places, end = dict[int, Place](), 0
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        for number, parameter in enumerate(parameters):
            if parameter.dtype == dtype:
                places[number] = Place(end, parameter.shape, dtype)
                end += -(-parameter.nbytes // ALIGN) * ALIGN
    return [places[number] for number in range(len(parameters))], end
