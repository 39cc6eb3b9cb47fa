"""The parameters and buffers of a module: their names, those that several names or stages share, and exchanges of them.

A run trains the modules that it is given: a parameter stays the object that it is, and its `data` lies where the run
has planned it. What runs a module for another purpose, as the trial does, runs it inside `kept`.

A forward that is repeated must not update buffers, such as running statistics, twice, and computes with the values that
they had the first time: `frozen_statistics`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpirun.model.meta_values import MetaStage


@contextlib.contextmanager
def kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, modules may get other tensors, hooks, modes and attributes: in the end they have those from before.

    So do lists, dicts and sets that are attributes, where forwards cache what they make.
    """
    parts = [part for module in modules for part in module.modules()]
    before = [
        (part, dict(vars(part)), [(x, copy.copy(x)) for x in vars(part).values() if isinstance(x, dict | list | set)])
        for part in parts
    ]
    data = [
        (x, x.data, x.requires_grad)
        for part in parts
        for x in (*part._parameters.values(), *part._buffers.values())
        if x is not None
    ]
    try:
        yield
    finally:
        for part, attributes, containers in before:
            vars(part).clear()
            vars(part).update(attributes)
            for container, content in containers:
                container.clear()
                container.extend(content) if isinstance(container, list) else container.update(content)
        for x, memory, requires_grad in data:
            x.data = memory
            if x.is_leaf:  # else a forward has made a buffer a part of its graph
                x.requires_grad_(requires_grad)


def use_dense_gradients(module: nn.Module) -> None:
    """Let embeddings have dense gradients, since gradients are added up in dense buffers."""
    for part in module.modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            part.sparse = False


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module by name, each once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def temporary_buffers(module: nn.Module) -> set[str]:
    """The names of a module's buffers that `state_dict` leaves out."""
    return {
        f"{owner}.{name}".removeprefix(".")
        for owner, part in module.named_modules(remove_duplicate=False)
        for name in part._non_persistent_buffers_set
    }


def place(x: Tensor) -> tuple[Any, ...]:
    """Where a tensor's elements lie: tensors with one place are one value, whatever objects they are."""
    if x.layout != torch.strided or x.is_nested:
        return (id(x),)
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()


def tensor_aliases(module: nn.Module) -> dict[str, list[str]]:
    """The other names of each parameter or saved buffer that has several names in a module, by each of its names."""
    names: dict[Any, list[str]] = {}
    temporary = temporary_buffers(module)
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        if name not in temporary:
            names.setdefault(place(tensor), []).append(name)
    several = [known for known in names.values() if len(known) > 1]
    return {name: [other for other in known if other != name] for known in several for name in known}


def shared_parameters(stages: Sequence[object]) -> list[list[tuple[int, str]]]:
    """The trained parameters with more than one name in stages that are modules, each as a tie of (stage, name)."""
    places: dict[Any, list[tuple[int, str]]] = {}
    for stage, module in enumerate(stages):
        if isinstance(module, nn.Module):
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if parameter.requires_grad:
                    places.setdefault(place(parameter), []).append((stage, name))
    return [tie for tie in places.values() if len(tie) > 1]


def given_modules(entry: object) -> list[tuple[str, nn.Module]]:
    """The existing modules in a stage's entry, each with the prefix of its names in the stage."""
    layers = entry.items() if isinstance(entry, Mapping) else [("", entry)]
    modules = [(prefix, layer.module if isinstance(layer, MetaStage) else layer) for prefix, layer in layers]
    return [(prefix, module) for prefix, module in modules if isinstance(module, nn.Module)]


def replace_tensors(module: nn.Module, new: Mapping[int, Tensor]) -> None:
    """Replace parameters and buffers of a module; `new`: the new tensors, by the id of the old one."""
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, old in tensors.items():
                if id(old) in new:
                    tensors[name] = new[id(old)]  # type: ignore[assignment]


@contextlib.contextmanager
def frozen_statistics(module: nn.Module, begin: Mapping[str, Tensor] | None = None) -> Iterator[None]:
    """Inside, forwards compute the same, but write to copies of the buffers, which are dropped at the end.

    `begin`: copies that forwards begin with and write to, from `buffer_copies(every_name=True)`; None, empty: copies of
    the buffers as they are.
    """
    before = [(part, dict(part._buffers)) for part in module.modules() if part._buffers]
    copies = begin or buffer_copies(module, every_name=True)
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        for name, buffer in part._buffers.items():
            if buffer is not None:
                copy = copies.get(prefix + name)
                part._buffers[name] = buffer.clone() if copy is None else copy
    try:
        yield
    finally:
        for part, buffers in before:
            part._buffers.update(buffers)


def buffer_copies(module: nn.Module, every_name: bool = False) -> dict[str, Tensor]:
    """Copies of a module's buffers, by name; `every_name`: a buffer with several names has its one copy under each."""
    copies = {id(buffer): buffer.detach().clone() for buffer in module.buffers()}
    return {name: copies[id(buffer)] for name, buffer in module.named_buffers(remove_duplicate=not every_name)}


def set_buffers(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give a module's buffers these values, by name."""
    for name, buffer in module.named_buffers():
        buffer.detach().copy_(values[name])
