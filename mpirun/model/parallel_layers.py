"""Tensor parallelism: layers of which each of T workers computes a slice, and how their parameters are divided.

A stage with slices is a sum y = f_0(x) + ... + f_{T-1}(x): slice t computes f_t from all of x. The schedule sums the
outputs, and the gradients of the inputs, over the slices, so that no layer here communicates. A linear layer divided
by its outputs, elementwise operations, and a linear layer divided by its inputs make such a stage [Shoeybi et al.
2019, "Megatron-LM", section 3]; so does attention divided by its heads. What occurs in the sum once, a skip
connection or the last bias, belongs to slice 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from schedgen.util.errors import UsageError


@dataclass(frozen=True)
class Slice:
    """Slice `index` of `count` of a layer."""

    index: int = 0
    count: int = 1

    def share(self, size: int, what: str) -> int:
        """How many of `size` a slice has; UsageError, which names them by `what`, if they do not divide evenly."""
        if size % self.count:
            raise UsageError(f"{size} {what} do not divide into {self.count} slices")
        return size // self.count


UNSLICED = Slice()


class SlicedDim(NamedTuple):
    """The dimension along which a parameter is divided into slices, as a whole or in each of `blocks` equal blocks."""

    dim: int
    blocks: int = 1

    def share(self, parameter: Tensor, slice: Slice) -> Tensor:
        """A slice's share of a parameter, contiguous."""
        split = parameter.unflatten(self.dim, (self.blocks, slice.count, -1)).select(self.dim + 1, slice.index)
        return split.flatten(self.dim, self.dim + 1).contiguous()

    def full_shape(self, share: Sequence[int], slice: Slice) -> tuple[int, ...]:
        """The shape of the parameter of which a share has the shape `share`."""
        return tuple(size * slice.count if dim == self.dim else size for dim, size in enumerate(share))

    def join(self, shares: Sequence[Tensor]) -> Tensor:
        """The parameter, from the shares of all slices in their order."""
        split = [share.unflatten(self.dim, (self.blocks, -1)) for share in shares]
        return torch.stack(split, self.dim + 1).flatten(self.dim, self.dim + 2)


def sliced_dims(module: nn.Module) -> dict[str, SlicedDim]:
    """The parameters and buffers that are divided, as the submodules that own them declare in `sliced_dims`."""
    dims: dict[str, SlicedDim] = {}
    for prefix, part in module.named_modules():
        own: Mapping[str, SlicedDim] = getattr(part, "sliced_dims", {})
        dims |= {f"{prefix}.{name}" if prefix else name: dim for name, dim in own.items()}
    return dims


class ColumnParallelLinear(nn.Linear):
    """A share of the outputs, or of each of `blocks` blocks of outputs: (..., inputs) -> (..., outputs / T)."""

    def __init__(self, inputs: int, outputs: int, slice: Slice = UNSLICED, bias: bool = True, blocks: int = 1) -> None:
        """`inputs` and `outputs` are those of the whole layer."""
        super().__init__(inputs, blocks * slice.share(outputs // blocks, "outputs of a linear layer"), bias)
        names = ["weight", "bias"] if bias else ["weight"]
        self.sliced_dims = dict.fromkeys(names, SlicedDim(0, blocks))


class RowParallelLinear(nn.Linear):
    """A term of the sum, from a share of the inputs: (..., inputs / T) -> (..., outputs). Slice 0 has the bias."""

    def __init__(self, inputs: int, outputs: int, slice: Slice = UNSLICED, bias: bool = True) -> None:
        """`inputs` and `outputs` are those of the whole layer."""
        super().__init__(slice.share(inputs, "inputs of a linear layer"), outputs, bias and slice.index == 0)
        self.sliced_dims = {"weight": SlicedDim(1)}


class HeadParallelAttention(nn.Module):
    """Causal attention with a share of the heads, a term of the sum: (sequences, length, width) -> the same shape."""

    def __init__(self, width: int, heads: int, slice: Slice = UNSLICED) -> None:
        """`heads` are those of the whole layer."""
        super().__init__()
        self.heads = slice.share(heads, "heads")
        self.qkv = ColumnParallelLinear(width, 3 * width, slice, bias=False, blocks=3)
        self.out = RowParallelLinear(width, width, slice, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (sequences, length, width)."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(nnf.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def skip(x: Tensor, y: Tensor, slice: Slice) -> Tensor:
    """x + y, where y is a term of the sum: x is added in slice 0 only. All slices return the same type."""
    return x + y if slice.index == 0 else y.to(torch.promote_types(x.dtype, y.dtype))
