"""Reports by name, before the first step, what of `Model.weights` is not used, and what is missing."""

from __future__ import annotations

import warnings

import torch

from mpirun.model.build_stage import stage_without_values
from mpirun.model.contract import Model
from mpirun.model.fake_mode import fake_mode
from mpirun.model.module_copy import own_tensors
from mpirun.model.weight_names import lack, listed, weight_names
from schedgen.util.errors import MpirunWarning, UsageError


def check_weights(model: Model) -> None:
    """Report by name what of `Model.weights` is not used and what is missing, and which types are converted.

    Rank 0 calls it: these are MpirunWarnings. UsageError if it has nothing of the model. Weights without `names` are
    not compared here: what a stage lacks is reported when it is built.
    """
    if model.weights is None or (names := getattr(model.weights, "names", None)) is None:
        return
    missing: list[str] = []
    types: set[tuple[torch.dtype, torch.dtype]] = set()  # of weights, and of the same tensors in the model
    unused, found, fake = dict.fromkeys(names), 0, fake_mode()
    for stage in range(len(model.stages)):
        module = stage_without_values(model, stage, fake)
        saved, tensors = module.state_dict().keys(), own_tensors(module)
        for name, candidates in weight_names(model, stage, module).items():
            present = [candidate for candidate in candidates if candidate in names]
            found += bool(present)
            if present:
                types.add((model.weights(present[:1])[present[0]].dtype, tensors[name].dtype))
            elif name in saved:
                missing.append(candidates[0])
            for candidate in candidates:
                unused.pop(candidate, None)
    where = f"{model.weights}"
    if not found:
        raise UsageError(f"{where}: has nothing of the model: it has {listed(unused)}, but not {listed(missing)}")
    changed = [pair for pair in sorted(types, key=str) if pair[0] != pair[1]]
    sentences = [f"{where}: {given} becomes {kept}, as the model has it" for given, kept in changed]
    if missing:
        sentences.append(lack(list(dict.fromkeys(missing)), where))
    if unused:
        sentences.append(f"{where}: no stage uses {listed(unused)}")
    for sentence in sentences:
        warnings.warn(sentence, MpirunWarning, stacklevel=2)
