"""Pretrained weights compared with a model, before they are read: what is missing, unused or converted."""

from __future__ import annotations

import warnings

import torch

from mpirun.model.contract import Model
from mpirun.model.module_tensors import own_tensors
from mpirun.model.stage_copies import fake_mode, stage_without_values
from mpirun.model.weight_names import lack, weight_names
from schedgen.util.errors import MpirunWarning, UsageError, listed


def check_weights(model: Model) -> None:
    """Warn of entries of `Model.weights` that no stage uses, of tensors that it lacks, and of types that it converts.

    For rank 0 alone: each is an MpirunWarning. UsageError if no entry belongs to the model. Weights without `names` are
    not compared here: what a stage lacks is reported when the stage is built.
    """
    if model.weights is None or (names := getattr(model.weights, "names", None)) is None:
        return
    missing: list[str] = []
    types: set[tuple[torch.dtype, torch.dtype]] = set()  # in the weights, and in the model
    unused, fake = dict.fromkeys(names), fake_mode()
    for stage in range(len(model.stages)):
        with stage_without_values(model, stage, fake) as module:
            tensors, known = own_tensors(module), weight_names(model, stage, module)
        for name, candidates in known.items():
            present = [candidate for candidate in candidates if candidate in names]
            if present:
                types.add((model.weights(present[:1])[present[0]].dtype, tensors[name].dtype))
            else:
                missing.append(candidates[0])
            for candidate in candidates:
                unused.pop(candidate, None)
    where = f"{model.weights}"
    if not types:
        raise UsageError(f"{where}: has nothing of the model: it has {listed(unused)}, but not {listed(missing)}")
    changed = [pair for pair in sorted(types, key=str) if pair[0] != pair[1]]
    sentences = [f"{where}: {stored} becomes {kept}, as the model has it" for stored, kept in changed]
    if missing:
        sentences.append(lack(missing, where))
    if unused:
        sentences.append(f"{where}: no stage uses {listed(unused)}")
    for sentence in sentences:
        warnings.warn(sentence, MpirunWarning, stacklevel=2)
