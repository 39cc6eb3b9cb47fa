"""Pretrained weights compared with a model, before they are read: what is missing, unused or converted."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch

from mpirun.model.build_stage import fake_mode, stage_without_values, whole_shape
from mpirun.model.contract import Model, Weights
from mpirun.model.module_tensors import own_tensors
from mpirun.model.parallel_layers import sliced_dims
from mpirun.model.weight_names import lack, weight_names
from schedgen.util.errors import MpirunWarning, UsageError, listed


def check_weights(model: Model) -> None:
    """Warn of entries of `Model.weights` that no stage uses, of tensors that it lacks, and of types that it converts.

    For rank 0 alone: each is an MpirunWarning. UsageError if no entry belongs to the model. Weights without `names` are
    not compared here: what a stage lacks is reported when the stage is built.
    """
    if model.weights is None or (names := getattr(model.weights, "names", None)) is None:
        return
    missing: dict[str, tuple[int, ...] | None] = {}  # by name, the shape if it is trained
    types: set[tuple[torch.dtype, torch.dtype]] = set()  # in the weights, and in the model
    unused, found, fake = dict.fromkeys(names), 0, fake_mode()
    for stage in range(len(model.stages)):
        with stage_without_values(model, stage, fake) as (module, _):
            tensors, known = own_tensors(module), weight_names(model, stage, module)
            dims = sliced_dims(module)
        for name, candidates in known.items():
            present = [candidate for candidate in candidates if candidate in names]
            found += bool(present)
            if present:
                types.add((model.weights(present[:1])[present[0]].dtype, tensors[name].dtype))
            else:
                shape = whole_shape(tensors[name], dims.get(name), model.slice_of(stage))
                missing[candidates[0]] = shape if tensors[name].requires_grad else None
            for candidate in candidates:
                unused.pop(candidate, None)
    where = f"{model.weights}"
    if not found:
        raise UsageError(f"{where}: has nothing of the model: it has {listed(unused)}, but not {listed(missing)}")
    changed = [pair for pair in sorted(types, key=str) if pair[0] != pair[1]]
    sentences = [f"{where}: {given} becomes {kept}, as the model has it" for given, kept in changed]
    if missing:
        sentences.append(lack(missing, where))
        sentences += _of_same_shape(model.weights, missing, list(unused))
    if unused:
        sentences.append(f"{where}: no stage uses {listed(unused)}")
    for sentence in sentences:
        warnings.warn(sentence, MpirunWarning, stacklevel=2)


def _of_same_shape(weights: Weights, missing: Mapping[str, tuple[int, ...] | None], unused: Sequence[str]) -> list[str]:
    """A sentence on missing trained parameters whose shape an unused weight has, as a list; empty: there are none."""
    of_shape: dict[tuple[int, ...], list[str]] = {}
    for name in unused:
        of_shape.setdefault(tuple(weights([name])[name].shape), []).append(name)
    pairs = {
        name: of_shape[shape].pop(0) for name, shape in missing.items() if shape is not None and of_shape.get(shape)
    }
    if not pairs:
        return []
    what = f"no stage uses {listed(pairs.values())}, of the same shape as the missing {listed(pairs)}"
    return [f"{weights}: {what}: if these are the same parameters, rename them in the files"]
