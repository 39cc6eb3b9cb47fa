"""What a stage's forward does besides computing outputs: draw random numbers, and write to tensors that it is given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpirun.model.rng import layers_of

BATCH_NORM_WRITES = frozenset({"running_mean", "running_var"})  # written in training, whatever the schema says


def memory(x: Tensor) -> Any:
    """A tensor's storage, or itself if not strided. Views share its `_cdata`, which is unique while it is alive."""
    return x.untyped_storage() if x.layout == torch.strided else x


class ForwardWatch(TorchDispatchMode):
    """While it is active, records the layers that draw, in `random_layers`, and the memory written to, in `written`.

    Only writes by torch operations are seen, not those through NumPy views.
    """

    def __init__(self, module: nn.Module, layers: Sequence[str]) -> None:
        """`layers`: names of the module's layers; empty: its `RandomOp`s or, if it has none, the module itself."""
        super().__init__()
        self.module = module
        self.held = [(x, memory(x)) for x in (*module.buffers(), *module.parameters())]  # so that ids stay unique
        self.buffers = _buffers(module)
        self.drawn = False  # by the layer whose forward is running
        self.random_layers: list[str] = []
        self.written: set[int] = set()  # the `_cdata` of memory
        self.layers = layers_of(module, layers)
        for name in self.layers:
            layer = module.get_submodule(name) if name else module
            layer.register_forward_pre_hook(lambda *_: setattr(self, "drawn", False))
            layer.register_forward_hook(lambda *_, name=name: self.random_layers.append(name) if self.drawn else None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; record whether it draws, and where it writes."""
        kwargs, written = kwargs or {}, _may_write_to(func)
        if written or torch.Tag.nondeterministic_seeded in func.tags:
            parameters = func._schema.arguments
            values = {parameter.name: parameter.default_value for parameter in parameters}
            values |= {parameter.name: value for parameter, value in zip(parameters, args, strict=False)} | kwargs
            # Attention is tagged as drawing, but draws only with dropout.
            self.drawn |= torch.Tag.nondeterministic_seeded in func.tags and values.get("dropout_p", 1.0) != 0.0
            for name in written if values.get("training", True) else written - BATCH_NORM_WRITES:
                self.written |= {memory(x)._cdata for x in tree_leaves(values[name]) if isinstance(x, Tensor)}
        return func(*args, **kwargs)

    def has_written_to(self, x: object) -> bool:
        """Whether `x` is a tensor whose memory has been written to."""
        return isinstance(x, Tensor) and memory(x)._cdata in self.written

    def changed_buffers(self) -> list[str]:
        """The module's buffers that have been changed, replaced, added or removed."""
        before, after = self.buffers, _buffers(self.module)
        return [n for n in {**before, **after} if before.get(n) != after.get(n) or before[n][1] in self.written]


def leaves_of_graph(outputs: Iterable[Tensor]) -> list[Tensor]:
    """The tensors whose `grad` a backward from these outputs would add to."""
    nodes = [x.grad_fn for x in outputs if x.grad_fn is not None]
    seen, leaves = set(nodes), []
    while nodes:
        node: Any = nodes.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.append(leaf)
        new = {before for before, _ in node.next_functions if before is not None} - seen
        seen |= new
        nodes += new
    return leaves


def _buffers(module: nn.Module) -> dict[str, tuple[int, int]]:
    """By name of a buffer, its id and its memory's `_cdata`."""
    return {name: (id(x), memory(x)._cdata) for name, x in module.named_buffers()}


@cache
def _may_write_to(operation: Any) -> frozenset[str]:
    return frozenset(
        argument.name
        for argument in operation._schema.arguments
        if argument.name in BATCH_NORM_WRITES or (argument.alias_info is not None and argument.alias_info.is_write)
    )
