"""Pretrained weights compared with a model, before they are read: what is missing or unused."""

from __future__ import annotations

import warnings

from mpirun.model.contract import Model
from mpirun.model.stage_copies import fake_mode, stage_without_values
from mpirun.model.weight_names import lack, weight_names
from schedgen.util.errors import MpirunWarning, UsageError, listed


def check_weights(model: Model) -> None:
    """Warn of entries of `Model.weights` that no stage uses, and of tensors that it lacks.

    For rank 0 alone: each is an MpirunWarning. UsageError if no entry belongs to the model. Weights without `names` are
    not compared.
    """
    if model.weights is None or (names := getattr(model.weights, "names", None)) is None:
        return
    missing: list[str] = []
    unused, fake = dict.fromkeys(names), fake_mode()
    for stage in range(len(model.stages)):
        with stage_without_values(model, stage, fake) as module:
            known = weight_names(model, stage, module)
        for candidates in known.values():
            if not any(candidate in names for candidate in candidates):
                missing.append(candidates[0])
            for candidate in candidates:
                unused.pop(candidate, None)
    where = f"{model.weights}"
    if unused.keys() == {*names}:
        raise UsageError(f"{where}: has nothing of the model: it has {listed(unused)}, but not {listed(missing)}")
    sentences = []
    if missing:
        sentences.append(lack(missing, where))
    if unused:
        sentences.append(f"{where}: no stage uses {listed(unused)}")
    for sentence in sentences:
        warnings.warn(sentence, MpirunWarning, stacklevel=2)
