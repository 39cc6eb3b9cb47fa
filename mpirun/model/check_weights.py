"""What `Model.weights` has for nothing, and what they lack: said by name, before a step is made."""

from __future__ import annotations

import warnings

from mpirun.model.build_stage import stage_without_values
from mpirun.model.contract import Model
from mpirun.model.fake_mode import fake_mode
from mpirun.model.weight_names import lack, listed, weight_names
from schedgen.util.errors import MpirunWarning, UsageError


def check_weights(model: Model) -> None:
    """Say by name what `Model.weights` has for nothing, and what it lacks: MpirunWarnings, for rank 0 to call.

    UsageError where it has nothing of the model. Weights without `names` are not compared here: what a stage misses
    is said where it is built.
    """
    if (names := getattr(model.weights, "names", None)) is None:
        return
    missing: list[str] = []
    unused, found, fake = dict.fromkeys(names), 0, fake_mode()
    for stage in range(len(model.stages)):
        module = stage_without_values(model, stage, fake)
        saved = module.state_dict().keys()
        for name, candidates in weight_names(model, stage, module).items():
            found += any(candidate in names for candidate in candidates)
            if name in saved and not any(candidate in names for candidate in candidates):
                missing.append(candidates[0])
            for candidate in candidates:
                unused.pop(candidate, None)
    where = f"{model.weights}"
    if not found:
        raise UsageError(f"{where}: has nothing of the model: it has {listed(unused)}, but not {listed(missing)}")
    if missing:
        warnings.warn(lack(list(dict.fromkeys(missing)), where), MpirunWarning, stacklevel=2)
    if unused:
        warnings.warn(f"{where}: no stage uses {listed(unused)}", MpirunWarning, stacklevel=2)
