"""The model that `--model MODULE:FUNCTION` names: import it, call it with the number of stages, check what it returns.

Out: a `Model` whose fields are what the contract says. Every mistake in it is a UsageError of one sentence.
"""

from __future__ import annotations

import importlib
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral

import torch
from torch import nn
from torch.jit import ScriptModule

from mpirun.data.microbatches import Minibatch
from mpirun.model.contract import Layers, Model
from mpirun.model.dataflow import check_reads
from mpirun.model.loss import check_loss
from mpirun.model.module_tensors import shared_parameters
from schedgen.util.errors import UsageError, raised


def load_model(
    name: str, stages: int, seed: int, layers: Sequence[int] | None = None, needs_batch: bool = True
) -> Model:
    """The model `name` (MODULE:FUNCTION) in `stages` stages.

    `layers`: the function is asked for sum(layers) stages, of which stage k joins layers[k]; None: one each.
    `needs_batch`: UsageError if the model does not say how a microbatch is made.
    """
    if layers is not None:
        return join_stages(load_model(name, sum(layers), seed, None, needs_batch), layers)
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
    except UsageError as error:
        raise UsageError(f"--model {name}: {error}") from None
    except (Exception, SystemExit) as error:
        raise UsageError(f"--model {name}: {function_name}({stages}) raised {raised(error)}") from None
    if not isinstance(model, Model):
        raise UsageError(f"--model {name}: should return an mpirun.Model, not {type(model).__name__}")
    try:
        if needs_batch and model.batch is None:
            raise UsageError("has no batch, which the command line needs; an Engine gets its data from the script")
        return check_model(model, stages)
    except UsageError as error:
        raise UsageError(f"--model {name}: {error}") from None


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
    _check_stages(model, stages)
    make = model.batch.make if isinstance(model.batch, Minibatch) else model.batch
    functions = {"loss": model.loss, "batch": make, "weights": model.weights}
    for field, function in functions.items():
        if not callable(function) and (function is not None or field not in ("batch", "weights")):
            raise UsageError(f"{field} should be a function, not {type(function).__name__}")
    check_loss(model.loss)
    if not isinstance(model.length, Integral) or model.length < 1:
        raise UsageError(f"length should be a number of bytes, not {model.length!r}")
    if not isinstance(model.loss_of, str) or model.loss_of not in ("microbatch", "minibatch"):
        raise UsageError(f"loss_of should be microbatch or minibatch, not {model.loss_of!r}")
    if not isinstance(model.sliced, Collection) or isinstance(model.sliced, str):
        raise UsageError(f"sliced should be a list, not {type(model.sliced).__name__}")
    for stage in model.sliced:
        if not isinstance(stage, Integral) or not 0 <= stage < stages - 1:
            raise UsageError(f"the model slices stage {stage!r}, but only stages before the last can have slices")
    tied = _checked_ties(model, stages)
    if model.reads is not None:
        _check_list("reads", model.reads)
        for sources in model.reads:
            _check_list("what a stage reads", sources)
        check_reads(model.reads, stages)
    return model._replace(
        length=int(model.length),
        sliced=sorted({int(stage) for stage in model.sliced}),
        tied=tied,
        tensor_parallel=1,
    )


def _check_stages(model: Model, stages: int) -> None:
    _check_list("stages", model.stages)
    if len(model.stages) != stages:
        raise UsageError(f"the model has {len(model.stages)} stages, not the {stages} that it is asked for")
    for stage, entry in enumerate(model.stages):
        layers = entry.items() if isinstance(entry, Mapping) else [("stage", entry)]
        if not layers or not all(isinstance(name, str) and callable(layer) for name, layer in layers):
            raise UsageError(f"stage {stage} should be layers by name, a function or a module, not {entry!r:.80}")
        for name, layer in layers:
            if not name or "." in name:
                raise UsageError(f"stage {stage} has a layer called {name!r}, which no module can be")
            if isinstance(layer, nn.Module) and any(isinstance(part, ScriptModule) for part in layer.modules()):
                raise UsageError(
                    f"stage {stage} has a ScriptModule, which takes no hooks: give the module that was scripted"
                )
            tensors = [*layer.named_parameters(), *layer.named_buffers()] if isinstance(layer, nn.Module) else []
            for tensor_name, tensor in tensors:
                if tensor.is_meta and model.weights is None:
                    raise UsageError(f"stage {stage} has no values for {tensor_name}, which is on the meta device")


def _checked_ties(model: Model, stages: int) -> list[list[tuple[int, str]]]:
    """The model's ties, and those of parameters that stages given as modules share."""
    _check_list("tied", model.tied)
    ties: list[list[tuple[int, str]]] = []
    for tie in model.tied:
        _check_list("a tie", tie)
        if not tie:
            raise UsageError("a tie is empty: it should list pairs (stage, name)")
        for place in tie:
            pair = isinstance(place, Sequence) and len(place) == 2
            if not pair or not isinstance(place[0], Integral) or not isinstance(place[1], str):
                raise UsageError(f"a tie is of pairs (stage, name), not {place!r}")
            if not 0 <= place[0] < stages:
                raise UsageError(f"the model ties {place[1]} of stage {place[0]}, but there are {stages} stages")
        ties.append([(int(stage), name) for stage, name in tie])
    for (stage, name), count in Counter(place for tie in ties for place in tie).items():
        if count > 1:
            raise UsageError(f"the model ties {name} of stage {stage} twice")
    for shared in shared_parameters(model.stages):  # joins the given ties that have some of its places
        joined = [tie for tie in ties if not set(tie).isdisjoint(shared)]
        ties = [tie for tie in ties if tie not in joined]
        ties.append(list(dict.fromkeys(place for tie in (*joined, shared) for place in tie)))
    return ties


def _check_list(what: str, value: object) -> None:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise UsageError(f"{what} should be a list, not {type(value).__name__}")
