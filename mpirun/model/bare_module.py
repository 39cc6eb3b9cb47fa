"""A module that is given as it is, in no stages: the one stage of a run, which is called as its author calls it.

A run has lists of leaves, and of tensors: here they become the module's own input and output.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_structure, tree_unflatten

from mpirun.data.microbatches import input_and_target
from mpirun.data.values import in_key_order
from mpirun.model.contract import Model, Origin
from mpirun.model.loss import of_last_stage
from mpirun.model.meta_values import MetaModule, MetaStage, is_on_meta
from mpirun.model.module_tensors import tensor_aliases
from schedgen.util.errors import UsageError, one_line


def bare_model(module: nn.Module, loss: Callable[[Any, Any], Any]) -> Model:
    """The Model of one stage, `module`; `loss` takes its output as it is."""
    call = ModuleCall(module)
    entry = MetaStage(module, MetaModule(module, None)) if is_on_meta(module) else module
    origin = Origin(True, tensor_aliases(module), pair=call.pair, rebuild=call.rebuild, call=call)
    return Model([entry], of_last_stage(loss, call.rebuild), origin=origin)


class ModuleCall:
    """How the module is called: with the nesting of the first microbatch's input, which all have."""

    def __init__(self, module: nn.Module) -> None:
        self.signature = inspect.signature(module.forward)
        self.input: TreeSpec | None = None
        self.output: tuple[list[Any], TreeSpec] | None = None  # of the last call; Tensor stands for each tensor

    def pair(self, collated: Any) -> tuple[Any, Any]:
        """The input and the target of collated samples; UsageError if the input has another nesting.

        Of a mapping, the entries that forward has parameters for are the input, and all of it is the target.
        """
        data, target = input_and_target(collated)
        if isinstance(collated, Mapping):
            data = {name: x for name, x in collated.items() if self._takes(name)} or collated
        data = tuple(data) if isinstance(data, list) else data  # to which a DataLoader collates a tuple
        nesting = tree_structure(in_key_order(data))
        self.input = self.input or nesting
        if nesting != self.input:
            now, first = one_line(nesting), one_line(self.input)
            raise UsageError(f"the batch's input is nested as {now}, but that of the first was {first}")
        return data, target

    def __call__(self, module: nn.Module, *leaves: Any) -> list[Tensor]:
        """The tensors of the module's output for an input of these leaves."""
        assert self.input is not None
        args, kwargs = self._arguments(tree_unflatten(leaves, self.input))
        made, nesting = tree_flatten(module(*args, **kwargs))
        self.output = [Tensor if isinstance(x, Tensor) else x for x in made], nesting
        return [x for x in made if isinstance(x, Tensor)]

    def rebuild(self, outputs: Any) -> Any:
        """The module's output from the tensors of the last call; before there was one, these tensors."""
        if self.output is None:
            return outputs
        tensors = iter([outputs] if isinstance(outputs, Tensor) else outputs)
        leaves, nesting = self.output
        return tree_unflatten([next(tensors) if x is Tensor else x for x in leaves], nesting)

    def _arguments(self, data: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A tuple has the arguments, or (args, kwargs), a dict has them by name, unless forward takes it as it is."""
        ways: list[Any] = [((), data)] if isinstance(data, dict) else []
        if isinstance(data, tuple):
            ways = [data, (data, {})] if [*map(type, data)] == [tuple, dict] else [(data, {})]
        for args, kwargs in ways:
            try:
                self.signature.bind(*args, **kwargs)
            except TypeError:
                continue
            return args, kwargs
        return (data,), {}

    def _takes(self, name: str) -> bool:
        parameters = self.signature.parameters.values()
        return any(parameter.kind is parameter.VAR_KEYWORD or parameter.name == name for parameter in parameters)
