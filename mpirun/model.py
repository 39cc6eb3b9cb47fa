"""The model contract: stages, a loss, and how a microbatch is cut from a text.

`--model MODULE:FUNCTION` names a function that takes the number of stages and
returns a `Model`. Nothing in it knows about ranks, steps or seeds.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from schedgen.errors import UsageError


class Model(NamedTuple):
    """What a model function returns.

    stages  one entry a stage: a function that builds its module (preferred:
            only ranks that need a stage build it), or the module itself.
            forward takes the outputs of the stage's producers (the first
            stage: the input) and returns one tensor; its shape is the same
            for every microbatch. A stage's trained parameters have one type,
            and are found by named_parameters: hooks on them, or references
            kept elsewhere, are lost. It may not draw random numbers (dropout)
            or change buffers that its output depends on.
    loss    (output of the last stage, target) -> scalar, a mean over the
            microbatch. The gradient is the mean over microbatches.
    batch   (text, rng) -> (input, target) of one microbatch. `text` is a
            uint8 tensor, shape (bytes,); `rng` is seeded by the run's seed,
            the step and the microbatch.
    length  how many bytes of text `batch` needs at least.
    """

    stages: Sequence[nn.Module | Callable[[], nn.Module]]
    loss: Callable[[Tensor, Tensor], Tensor]
    batch: Callable[[Tensor, np.random.Generator], tuple[Tensor, Tensor]]
    length: int = 1


class Shape(NamedTuple):
    """What every rank knows of a stage: its output on one microbatch, and its number of trained parameters."""

    size: tuple[int, ...]
    dtype: torch.dtype
    parameters: int
    overwrites: bool = False  # whether it changes its inputs in place


def load(name: str, stages: int, seed: int) -> Model:
    """The model `name` (MODULE:FUNCTION) cut into `stages` stages."""
    module_name, colon, function_name = name.partition(":")
    if not colon:
        raise UsageError(f"--model {name}: should be MODULE:FUNCTION")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise UsageError(f"--model {name}: cannot import {module_name}: {type(error).__name__}: {error}") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UsageError(f"--model {name}: {module_name} has no function {function_name}")
    torch.manual_seed(seed)  # for models that return modules, not functions
    try:
        model = function(stages)
    except UsageError as error:
        raise UsageError(f"--model {name}: {error}") from None
    except (Exception, SystemExit) as error:
        raise UsageError(f"--model {name}: {function_name}({stages}) raised {type(error).__name__}: {error}") from None
    if not isinstance(model, Model):
        raise UsageError(f"--model {name}: should return an mpirun.Model, not {type(model).__name__}")
    if not isinstance(model.stages, Sequence):
        raise UsageError(f"--model {name}: stages should be a list, not {type(model.stages).__name__}")
    if len(model.stages) != stages:
        raise UsageError(f"--model {name}: has {len(model.stages)} stages, but the schedule has {stages}")
    return model


def build(model: Model, stage: int, seed: int) -> nn.Module:
    """The module of one stage, its weights seeded by the stage: the same on whichever rank."""
    entry = model.stages[stage]
    if isinstance(entry, nn.Module):
        return copy.deepcopy(entry)
    torch.manual_seed(int(np.random.SeedSequence([seed, stage]).generate_state(1)[0]))
    try:
        module = entry()
    except (Exception, SystemExit) as error:
        raise UsageError(f"stage {stage} of the model cannot be built: {type(error).__name__}: {error}") from None
    if not isinstance(module, nn.Module):
        raise UsageError(f"stage {stage} of the model should be an nn.Module, not {type(module).__name__}")
    return module


def microbatch(model: Model, text: Tensor, seed: int, step: int, mb: int) -> tuple[Tensor, Tensor]:
    """(input, target) of one microbatch of one step; the same wherever it is asked for."""
    return model.batch(text, np.random.default_rng([seed, step, mb]))


def shapes(model: Model, producers: Sequence[Sequence[int]], text: Tensor) -> list[Shape]:
    """What every stage gives, found by running all stages on the meta device: no data, no messages."""
    try:
        data, target = (part.to("meta") for part in microbatch(model, text, 0, 0, 0))
    except (Exception, SystemExit) as error:
        raise UsageError(f"the model's batch fails: {type(error).__name__}: {error}") from None
    outputs: list[Tensor] = []
    found: list[Shape] = []
    for stage in range(len(model.stages)):
        inputs = [outputs[p] for p in producers[stage]] or [data]
        with torch.device("meta"), torch.no_grad():
            module = build(model, stage, 0).to("meta")
            versions = [x._version for x in inputs]
            try:
                output = module(*inputs)
            except (Exception, SystemExit) as error:
                raise UsageError(
                    f"stage {stage} fails on the shapes it gets: {type(error).__name__}: {error}"
                ) from None
        if not isinstance(output, Tensor):
            raise UsageError(f"stage {stage} should return one tensor, not {type(output).__name__}")
        overwrites = versions != [x._version for x in inputs]
        count = sum(parameter.requires_grad for parameter in module.parameters())
        found.append(Shape(tuple(output.shape), output.dtype, count, overwrites))
        outputs.append(output)
    try:
        try:
            loss = model.loss(outputs[-1], target)
        except (Exception, SystemExit):  # it may have tensors of its own, which are not on the meta device
            real = microbatch(model, text, 0, 0, 0)[1]
            loss = model.loss(torch.zeros(outputs[-1].shape, dtype=outputs[-1].dtype), real)
    except (Exception, SystemExit) as error:
        raise UsageError(f"the loss fails on the shapes it gets: {type(error).__name__}: {error}") from None
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UsageError("the loss should be one number")
    return found
