"""Buffers that a traced forward assigns new tensors to: its last operations change the buffers in place instead.

torch.export does this for the root's buffers only, and changes the wrong buffer if one before it is None.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from schedgen.util.errors import UsageError

aten = torch.ops.aten


@contextlib.contextmanager
def changing_assigned_buffers(module: nn.Module) -> Iterator[None]:
    """Inside, a forward of `module` ends by copying into its buffers what it has assigned to them.

    UsageError, raised by the assignment, if the buffer had another shape or type, or if either is None.
    """
    parts = {*module.modules()}
    before: dict[tuple[nn.Module, str], Tensor] = {}  # the tensors when the forward began

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
        memory = {x.untyped_storage()._cdata for x in (*before.values(), *module.buffers())}
        return value.clone() if value.untyped_storage()._cdata in memory else None  # else it may change before the end

    def change(*_: object) -> None:
        for (part, name), buffer in before.items():
            part._buffers[name] = buffer.copy_(part.get_buffer(name))
        before.clear()

    register = torch_module.register_module_buffer_registration_hook
    handles = [register(assign), module.register_forward_hook(change)]
    # With its own hook torch.export would do the same, too.
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


def _what(buffer: Tensor | None) -> str:
    return "None" if buffer is None else f"{buffer.dtype} of shape {tuple(buffer.shape)}"
