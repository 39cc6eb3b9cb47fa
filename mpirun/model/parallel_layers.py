"""Tensor parallelism: layers of which T workers compute a share each, and how parameters are cut for it.

A stage of the model that is split is a sum: y = f_0(x) + ... + f_{T-1}(x), where
shard t computes f_t from the whole of x. The schedule adds up outputs, and
gradients of inputs, which then are sums as well: no layer here communicates.
A linear layer cut by its outputs and one cut by its inputs behind it make such
a stage [Shoeybi et al. 2019, "Megatron-LM", section 3], whatever acts on single
elements between them; so does attention cut by its heads. What belongs to the
sum once, a skip connection or a bias behind it, is shard 0's.
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
class Shard:
    """Which part of a layer this is."""

    index: int = 0
    count: int = 1

    def of(self, size: int, what: str) -> int:
        """Its share of so many; UsageError where they do not divide."""
        if size % self.count:
            raise UsageError(f"{size} {what} do not divide into {self.count} shards")
        return size // self.count


WHOLE = Shard()


class Cut(NamedTuple):
    """Along which dimension a parameter is cut. It may be several blocks, of each of which a shard has its share."""

    dim: int
    blocks: int = 1

    def part(self, whole: Tensor, shard: Shard) -> Tensor:
        """A shard's share of a parameter, contiguous."""
        split = whole.unflatten(self.dim, (self.blocks, shard.count, -1)).select(self.dim + 1, shard.index)
        return split.flatten(self.dim, self.dim + 1).contiguous()

    def whole(self, part: Sequence[int], shard: Shard) -> tuple[int, ...]:
        """The shape of the parameter that a share of this shape is of."""
        return tuple(size * shard.count if dim == self.dim else size for dim, size in enumerate(part))

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The parameter that all shards' shares make up."""
        split = [part.unflatten(self.dim, (self.blocks, -1)) for part in parts]
        return torch.stack(split, self.dim + 1).flatten(self.dim, self.dim + 2)


def cuts(module: nn.Module) -> dict[str, Cut]:
    """The parameters of a module that are cut, as the modules that have them say in their `cuts`."""
    found: dict[str, Cut] = {}
    for prefix, part in module.named_modules():
        own: Mapping[str, Cut] = getattr(part, "cuts", {})
        found |= {f"{prefix}.{name}" if prefix else name: cut for name, cut in own.items()}
    return found


class ColumnParallelLinear(nn.Linear):
    """A share of the outputs, or of each of `blocks` parts of them: (..., inputs) -> (..., outputs / T)."""

    def __init__(self, inputs: int, outputs: int, shard: Shard = WHOLE, bias: bool = True, blocks: int = 1) -> None:
        super().__init__(inputs, blocks * shard.of(outputs // blocks, "outputs of a linear layer"), bias)
        self.cuts = {"weight": Cut(0, blocks)} | ({"bias": Cut(0, blocks)} if bias else {})


class RowParallelLinear(nn.Linear):
    """What a share of the inputs gives, part of a sum: (..., inputs / T) -> (..., outputs). Shard 0 has the bias."""

    def __init__(self, inputs: int, outputs: int, shard: Shard = WHOLE, bias: bool = True) -> None:
        super().__init__(shard.of(inputs, "inputs of a linear layer"), outputs, bias and shard.index == 0)
        self.cuts = {"weight": Cut(1)}


class HeadParallelAttention(nn.Module):
    """Causal attention of a share of the heads: (sequences, length, width) -> the same, a part of the sum."""

    def __init__(self, width: int, heads: int, shard: Shard = WHOLE) -> None:
        super().__init__()
        self.heads = shard.of(heads, "heads")
        self.qkv = ColumnParallelLinear(width, 3 * width, shard, bias=False, blocks=3)
        self.out = RowParallelLinear(width, width, shard, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(2, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        return self.out(nnf.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def skip(x: Tensor, y: Tensor, shard: Shard) -> Tensor:
    """x + y where y is a part of a sum, which has x in it once; all shards' of one type."""
    return x + y if shard.index == 0 else y.to(torch.promote_types(x.dtype, y.dtype))
