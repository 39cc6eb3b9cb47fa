"""Buffers that a traced forward assigns new tensors to: its last operations change the buffers in place instead.

torch.export does this for the root's buffers only, and changes the wrong buffer if one before it is None.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from schedgen.util.errors import UsageError

aten = torch.ops.aten


class Merged(NamedTuple):
    """A buffer to which the forward assigned another buffer; in the trace it gets a copy."""

    part: nn.Module
    name: str
    value: Tensor
    copy: Tensor
    value_version: int
    copy_version: int


@contextlib.contextmanager
def changing_assigned_buffers(module: nn.Module) -> Iterator[None]:
    """Inside, a forward of `module` ends by copying into its buffers what it has assigned to them.

    The assignment raises UsageError if the buffer had another shape or type, or if either is None. The end of the
    forward raises it if two buffers became one that is also changed in place: in a stage they stay two.
    """
    parts = {*module.modules()}
    before: dict[tuple[nn.Module, str], Tensor] = {}  # the tensors when the forward began
    versions: dict[int, int] = {}  # of the buffers when the forward began, by memory
    merged: list[Merged] = []

    def begin(*_: object) -> None:
        versions.clear()
        versions.update({_memory(x): x._version for x in module.buffers()})

    def assign(part: nn.Module, name: str, value: Tensor | None) -> Any:
        buffer = part._buffers.get(name)
        if part not in parts or value is buffer:
            return None
        if value is None or buffer is None or (value.shape, value.dtype) != (buffer.shape, buffer.dtype):
            raise UsageError(
                f"cannot be traced: sets the buffer {name}, which is {_what(buffer)}, to {_what(value)}: "
                "a stage's buffer keeps the shape and type that it has before the forward"
            )
        before.setdefault((part, name), buffer)
        if _memory(value) not in {_memory(x) for x in (*before.values(), *module.buffers())}:
            return None
        copy = value.clone()  # the buffer whose memory it shares may change before the forward ends
        if _memory(value) in {_memory(x) for x in module.buffers() if x is not buffer}:
            merged.append(Merged(part, name, value, copy, value._version, copy._version))
        return copy

    def change(*_: object) -> None:
        for part, name, value, copy, *then in merged:
            stays = part._buffers[name] is copy and _memory(value) in {_memory(x) for x in module.buffers()}
            since_begin = stays and value._version != versions.get(_memory(value), then[0])
            if since_begin or then != [value._version, copy._version]:
                raise UsageError(
                    f"cannot be traced: makes the buffer {name} share memory with another, and changes it in "
                    "place: assign a clone of the other"
                )
        for (part, name), buffer in before.items():
            part._buffers[name] = buffer.copy_(part.get_buffer(name))
        before.clear()
        merged.clear()

    register = torch_module.register_module_buffer_registration_hook
    handles = [register(assign), module.register_forward_pre_hook(begin), module.register_forward_hook(change)]
    # torch.export's own hook would do the same again, so registering it does nothing.
    torch_module.register_module_buffer_registration_hook = lambda hook: RemovableHandle(OrderedDict())
    try:
        yield
    finally:
        torch_module.register_module_buffer_registration_hook = register
        for handle in handles:
            handle.remove()


def set_lines_of_changes(graph: fx.Graph) -> None:
    """Give copies at the end of the forward, which come from no source line, the source line of what they copy."""
    for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
        if isinstance(node.args[1], fx.Node) and not node.meta.get("stack_trace"):
            node.meta = dict(node.args[1].meta)


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _what(buffer: Tensor | None) -> str:
    return "None" if buffer is None else f"{buffer.dtype} of shape {tuple(buffer.shape)}"
