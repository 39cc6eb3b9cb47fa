"""The model that `--model MODULE:FUNCTION` names: import it, call it with the number of stages, check what it returns.

Out: a `Model` whose fields are what the contract says. Every mistake in it is a UsageError of one sentence.

Or a module is given as it is, in no stages: the one stage of a run, which is called as its author calls it. A run has
lists of leaves, and of tensors: here they become the module's own input and output.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_structure, tree_unflatten

from mpirun.data.microbatches import input_and_target
from mpirun.data.values import in_key_order
from mpirun.model.contract import Layers, Model, Origin, StageEntry
from mpirun.model.dataflow import check_reads
from mpirun.model.loss import of_last_stage
from mpirun.model.meta_values import MetaModule, MetaStage, is_on_meta
from mpirun.model.module_tensors import own_tensors, shared_parameters, tensor_aliases
from schedgen.util.errors import UsageError, one_line, raised, raised_at


def load_model(name: str, stages: int, seed: int, needs_batch: bool = True) -> Model:
    """The model `name` (MODULE:FUNCTION) in `stages` stages.

    `needs_batch`: UsageError if the model does not say how a microbatch is made.
    """
    module_name, colon, function_name = name.partition(":")
    if not colon:
        raise UsageError(f"--model {name}: should be MODULE:FUNCTION")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise UsageError(f"--model {name}: cannot import {module_name}: {raised(error)}") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UsageError(f"--model {name}: {module_name} has no function {function_name}")
    torch.manual_seed(seed)  # for model functions that return modules, not functions
    try:
        model = function(stages)
        if not isinstance(model, Model):
            raise UsageError(f"should return an mpirun.Model, not {type(model).__name__}")
        if needs_batch and model.batch is None:
            raise UsageError("has no batch, which the command line needs; an Engine gets its data from the script")
        return check_model(model, stages)
    except UsageError as error:
        raise UsageError(f"--model {name}: {error}") from None
    except (Exception, SystemExit) as error:
        what = f"{function_name}({stages}) raised {raised(error)}{raised_at(error)}"
        raise UsageError(f"--model {name}: {what}") from error


def join_stages(model: Model, layers: Sequence[int]) -> Model:
    """The model with stages that join consecutive stages of its own; `layers`: by new stage, how many it joins."""
    if sum(layers) != len(model.stages):
        raise UsageError(f"the schedule joins {sum(layers)} stages of the model, but it has {len(model.stages)}")
    if model.origin.join is not None:
        joined = model.origin.join(model.stages, layers)
        return model._replace(**joined, origin=model.origin._replace(join=None))
    stages: list[Layers] = []
    stage_of: list[int] = []
    parts = iter(model.stages)
    for stage, count in enumerate(layers):
        merged: dict[str, Callable[[], nn.Module]] = {}
        for part in itertools.islice(parts, count):
            if not isinstance(part, Mapping):
                raise UsageError(
                    "the schedule joins stages of the model, but they are neither given by their layers nor split"
                )
            if twice := merged.keys() & part.keys():
                raise UsageError(f"the schedule joins stages of the model, but two layers are called {min(twice)}")
            merged |= part
            stage_of.append(stage)
        stages.append(merged)
    return model._replace(
        sliced=[stage_of[stage] for stage in model.sliced if layers[stage_of[stage]] == 1],
        stages=stages,
        tied=[[(stage_of[stage], name) for stage, name in tie] for tie in model.tied],
    )


def check_model(model: Model, stages: int) -> Model:
    """The model, its numbers converted to Python ints; UsageError if a field is not what the contract says."""
    if model.loss_of not in ("microbatch", "minibatch"):
        raise UsageError(f"loss_of should be microbatch or minibatch, not {model.loss_of!r}")
    if len(model.stages) != stages:
        raise UsageError(f"the model has {len(model.stages)} stages, not the {stages} that it is asked for")
    for stage, entry in enumerate(model.stages):
        _check_stage(stage, entry, model.weights is not None)
    if outside := [stage for stage in model.sliced if not 0 <= stage < stages - 1]:
        raise UsageError(f"the model slices stage {outside[0]}, but only stages before the last can have slices")
    if wrong := [place for tie in model.tied for place in tie if not 0 <= place[0] < stages]:
        raise UsageError(f"the model ties {wrong[0][1]} of stage {wrong[0][0]}, but there are {stages} stages")
    if model.reads is not None:
        check_reads(model.reads, stages)
    return model._replace(
        length=int(model.length),
        sliced=sorted({int(stage) for stage in model.sliced}),
        tied=_joined_ties(model),
        tensor_parallel=1,
    )


def _check_stage(stage: int, entry: StageEntry, has_weights: bool) -> None:
    layers = entry.items() if isinstance(entry, Mapping) else [("stage", entry)]
    if not layers or not all(isinstance(name, str) and callable(layer) for name, layer in layers):
        raise UsageError(f"stage {stage} should be layers by name, a function or a module, not {entry!r:.80}")
    for name, layer in layers:
        if not name or "." in name:
            raise UsageError(f"stage {stage} has a layer called {name!r}, which no module can be")
        tensors = own_tensors(layer) if isinstance(layer, nn.Module) and not has_weights else {}
        for tensor_name, tensor in tensors.items():
            if tensor.is_meta:
                raise UsageError(f"stage {stage} has no values for {tensor_name}, which is on the meta device")


def _joined_ties(model: Model) -> list[list[tuple[int, str]]]:
    """The model's ties, and those of parameters that stages given as modules share; those with a place in common join.

    The places of an earlier tie come first.
    """
    ties: list[list[tuple[int, str]]] = []
    for tie in [*model.tied, *shared_parameters(model.stages)]:
        places = [(int(stage), name) for stage, name in tie]
        joined = [known for known in ties if not set(known).isdisjoint(places)]
        ties = [known for known in ties if known not in joined]
        ties.append(list(dict.fromkeys(place for known in (*joined, places) for place in known)))
    return ties


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
