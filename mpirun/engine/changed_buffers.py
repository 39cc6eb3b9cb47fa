"""The error of a backward that needs a buffer as it was before later forwards changed it: it names the buffer."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor

from mpirun.engine.stage import LocalStage

# Torch's message when a backward needs a tensor that no operation made and that has changed since it was saved.
# The tensor's type is there as torch.FloatTensor, torch.cuda.FloatTensor or CPUBFloat16Type.
CHANGED = re.compile(
    r"modified by an inplace operation: \[\S*?(?:\.|CPU|CUDA)(\w+)(?:Tensor|Type) (\[[\d, ]*\])\] is at version (\d+)"
)


def naming_buffers(stage: LocalStage, job: Callable[..., Any], *arguments: Any) -> Any:
    """Run a job. If its backward needs buffers that later forwards have changed, the RuntimeError names them."""
    try:
        return job(*arguments)
    except RuntimeError as error:
        found = CHANGED.search(str(error))
        names = [name for name, x in stage.module.named_buffers() if found and _as_torch_says(x) == found.groups()]
        if not names:
            raise
        raise RuntimeError(
            f"stage {stage.index} changes {' or '.join(names)} in place in every forward, but the backward of an "
            "earlier forward still needs the buffer as it was: compute with a clone of it"
        ) from None


def _as_torch_says(x: Tensor) -> tuple[str, ...]:
    """The type, the shape and the version of a tensor, as `CHANGED` finds them."""
    return x.type().rpartition(".")[2].removesuffix("Tensor"), str(list(x.shape)), str(x._version)
