"""Train and eval mode: operations of a traced stage that follow its `train()` and `eval()`, as in the module.

A graph is traced in one mode, whose decisions are constants in it: whether a dropout drops, whether BatchNorm uses the
batch's statistics. These follow the mode; any other difference is as it was traced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from mpirun.model.split.node_dependencies import arguments_of

aten = torch.ops.aten
EVAL_VALUES = {"train": False, "training": False, "use_input_stats": False, "dropout_p": 0.0}  # by aten's parameter
COUNTER = "num_batches_tracked"  # the buffer that normalisations count in, in train mode only


class ModeOp(nn.Module):
    """An operation as it was traced; in eval mode some of its arguments have other values."""

    def __init__(self, operation: Callable[..., Any], in_eval: Mapping[int | str, Any]) -> None:
        """`in_eval`: by position or keyword of an argument, its value in eval mode."""
        super().__init__()
        self.operation, self.in_eval = operation, in_eval

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The operation's result."""
        if not self.training:
            args = tuple(self.in_eval.get(position, argument) for position, argument in enumerate(args))
            kwargs |= {name: value for name, value in self.in_eval.items() if isinstance(name, str)}
        return self.operation(*args, **kwargs)


class CountOp(nn.Module):
    """A change in place of a counter, the first argument; in eval mode the counter stays as it is."""

    def __init__(self, operation: Callable[..., Any]) -> None:
        """`operation`: the node's target."""
        super().__init__()
        self.operation = operation

    def forward(self, counter: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The counter."""
        return self.operation(counter, *args, **kwargs) if self.training else counter


class RegionOp(nn.Module):
    """An operation in regions under no_grad or autocast."""

    def __init__(
        self, operation: Callable[..., Any], regions: Sequence[tuple[Callable[..., Any], Sequence[Any]]]
    ) -> None:
        """`regions`: as in `ExportedGraph`."""
        super().__init__()
        self.operation, self.regions = operation, regions

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The operation's result."""
        with ExitStack() as inside:
            for region, arguments in self.regions:
                inside.enter_context(region(*arguments))
            return self.operation(*args, **kwargs)


def mode_op(node: fx.Node, operation: Callable[..., Any], counters: Collection[fx.Node]) -> nn.Module | None:
    """A module that runs a node as the mode asks; None if the mode changes nothing.

    `operation`: in place of the node's target; `counters`: nodes of counters.
    """
    if changes_counter(node, counters):
        return CountOp(operation)
    in_eval = eval_arguments(node)
    return ModeOp(operation, in_eval) if in_eval else None


def counters_of(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of normalisations' counters."""
    return [node for node in graph.find_nodes(op="get_attr") if str(node.target).rpartition(".")[2] == COUNTER]


def keep_eval_mode(stages: Iterable[nn.Module]) -> None:
    """For a module traced in eval mode: what drops there, or uses batch statistics, does so in both modes."""
    for stage in stages:
        for part in stage.modules():
            if isinstance(part, ModeOp):
                part.in_eval = {}


def changes_counter(node: fx.Node, counters: Collection[fx.Node]) -> bool:
    """Whether a node changes a counter in place, which an earlier change may have returned."""
    changed: object = node
    while isinstance(changed, fx.Node) and isinstance(changed.target, OpOverload) and changed.args:
        alias = changed.target._schema.arguments[0].alias_info
        if alias is None or not alias.is_write:
            return False
        changed = changed.args[0]
    return changed is not node and changed in counters


def eval_arguments(node: fx.Node) -> dict[int | str, Any]:
    """The values in eval mode of the arguments that the mode changes, by position or keyword."""
    if not isinstance(node.target, OpOverload):
        return {}
    changed: dict[int | str, Any] = {}
    given = arguments_of(node)
    for position, parameter in enumerate(node.target._schema.arguments):
        value = EVAL_VALUES.get(parameter.name)
        keeps_statistics = given.get("running_mean", node) is not None  # without them, eval mode is like train mode
        if value is not None and given[parameter.name] != value and keeps_statistics:
            changed[parameter.name if position >= len(node.args) else position] = value
    return changed


class Constant:
    """What a graph refers to; equal if it is one object, or tensors of equal values."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        """Whether they are the same."""
        mine, its = self.value, other.value if isinstance(other, Constant) else None
        if mine is its or not (isinstance(mine, Tensor) and isinstance(its, Tensor)):
            return mine is its
        alike = (mine.shape, mine.dtype) == (its.shape, its.dtype)
        return alike and not mine.is_meta and bool(((mine == its) | (mine.isnan() & its.isnan())).all())

    __hash__ = None  # type: ignore[assignment]
