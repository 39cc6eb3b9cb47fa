"""Every built-in scheme, by name; `load` also reads a user's own file.

A scheme is a module with a docstring, which `schedgen schemes` prints, and `scheme(sizes, name)`, whose w and n are
written as in its paper. A variant of a scheme, with another name, order or number, is only an entry here.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from schedgen.ir.limits import check_jobs
from schedgen.schemes import (
    chimera,
    ddp,
    dualpipe_v,
    hanayo,
    interleaved_1f1b,
    interleaved_zb,
    looped,
    lpp,
    one_f_one_b,
    pipedream_2bw,
    round_robin,
    v_half,
    zb_h1,
    zb_v,
)
from schedgen.schemes.building_block import third
from schedgen.schemes.orders import ORDERS
from schedgen.schemes.replicas import replicated
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.schemes.user_file import load_file
from schedgen.util.errors import UsageError
from schedgen.util.option_fields import count


class BuiltIn(NamedTuple):
    """A built-in scheme, or a variant of one."""

    module: ModuleType
    variant: Mapping[str, Any] = {}  # the arguments of the module's `scheme` that differ
    variant_text: str = ""

    @property
    def text(self) -> str:
        """What the scheme is, its w and its n, a line each."""
        return self.variant_text or inspect.getdoc(self.module) or ""


SCHEMES: dict[str, BuiltIn] = {
    "ddp": BuiltIn(ddp),
    "fsdp": BuiltIn(ddp, {"fully_sharded": True}, """\
Fully sharded data parallelism: microbatches are spread as in ddp, every stage has one owner.
w(s, b, d) = (s mod W, b mod W)   [Rahimi 2025, "Formal definitions"; W <= B, there W = B]
n: depth-first, greedy"""),
    "gpipe": BuiltIn(one_f_one_b, {"order": "breadth-first"}, """\
GPipe: a worker a stage, all forwards and then all backwards.
w(s, b, d) = (s mod W, s mod W)   [Rahimi 2025, "Formal definitions"; W <= S, there W = S]
n: breadth-first, strict; with W = S that is n(s, b, F) = b, n(s, b, B) = B + b   [GPipe, section 2.3]
With S = vW it is looped breadth-first   [Lamy-Poirier 2022, "Breadth-first pipeline parallelism"]"""),
    "1f1b": BuiltIn(one_f_one_b),
    "lpp": BuiltIn(lpp),
    "fslpp": BuiltIn(lpp, {"fully_sharded": True}, """\
Fully sharded looped pipeline: lpp's placement of jobs, every stage has one owner.
w(s, b, d) = (h(s, s), h(s, b)), h(s, b) = (R b mod W) + (s mod R)   [Rahimi 2025, "Formal definitions"]
n: depth-first, greedy"""),
    "interleaved-1f1b": BuiltIn(interleaved_1f1b),
    "depth-first": BuiltIn(looped, {"order": "depth-first"}, """\
Depth-first: v stages a worker, and whoever is free takes the oldest microbatch.
w(s, b, d) = (s mod W, s mod W)   [Rahimi 2025, "One code to schedule them all"; S = vW]
n: oldest microbatch first, greedy"""),
    "breadth-first": BuiltIn(looped),
    "zb-h1": BuiltIn(zb_h1),
    "zb-h2": BuiltIn(zb_h1, {"h": 2}, """\
ZB-H2: as ZB-H1, but more forwards warm up, at twice 1F1B's memory.
Where F = I = W and B >= 2W - 1, no bubble between a worker's first and last job.
w(s, b, d) = (s mod W, s mod W)   [Qi et al. 2023, "Zero bubble pipeline parallelism", section 2.3; W = S]
n(F) = b, n(I) = b + W-1-s + min(W-1-s, x), n(W) = b + W-1 + x, x = min(W-1, max(0, B-W)), ties F < I < W, strict"""),
    "interleaved-zb": BuiltIn(interleaved_zb),
    "zb-v": BuiltIn(zb_v),
    "v-half": BuiltIn(v_half),
    "v-min": BuiltIn(v_half, {"block": third}, """\
V-Min: ZB-V's placement with a third of 1F1B's activation memory, the least of its kind.
w(s, b, d) = (h(s), h(s)), h(s) = min(s, 2W - 1 - s)   [Qi et al. 2024, "Controllable memory", section 3; S = 2W]
n: a building block repeated every 6 jobs and squeezed, W jobs in the gaps, strict"""),
    "dualpipe-v": BuiltIn(dualpipe_v),
    "chimera": BuiltIn(chimera),
    "hanayo": BuiltIn(hanayo),
    "1f1b-rr": BuiltIn(round_robin),
    "pipedream": BuiltIn(round_robin, {"updates": "stash"}, """\
PipeDream: 1F1B-RR without a flush; every backward is followed by a step, which makes a new version of the weights.
w(s, b, d) = (P(s) + b mod r(s), the same), and n is that of 1f1b-rr, too   [PipeDream, sections 3.2 and 3.3]
weights: a forward uses the newest version, its backward the same; --updates vertical: all stages use the first's"""),
    "pipedream-2bw": BuiltIn(pipedream_2bw),
}  # fmt: skip


def load(name: str | os.PathLike[str], sizes: Sizes, tensor: int = 1, interleave: bool = False) -> Scheme:
    """The scheme called `name`, or the one that the file `name` defines; UsageError if sizes do not fit it.

    `tensor`: slices of each stage. `sizes.workers` counts all workers; schemes that do not place slices see 1/T of it,
    and those that run as `sizes.replicas` replicas 1/R of it. `interleave`: as for `replicated`.
    """
    name = os.fspath(name)
    sizes, tensor = sizes.checked(), count.check("tensor", tensor)
    if isinstance(sizes.replicas, int):
        return replicated(load(name, sizes.per_replica(), tensor), sizes, interleave)
    if name in SCHEMES:
        built_in, sizes = SCHEMES[name], sizes.per_slice(tensor)
        check_jobs(sizes.stages, sizes.microbatches, per_pair=2)  # some make lists of all jobs
        if sizes.replicas is not None and (interleave or "replicas" not in built_in.module.PARAMETERS):
            how = "--interleave" if interleave else name
            raise UsageError(f"{how} takes one number of --replicas, those of the whole scheme")
        for option in ("groups", "chunks", "group"):
            if getattr(sizes, option) is not None and option not in built_in.module.PARAMETERS:
                raise UsageError(f"{name} takes no --{option}")
        scheme: Scheme = built_in.module.scheme(sizes, name, **built_in.variant)
        return scheme
    if not name.endswith(".py"):
        for near in difflib.get_close_matches(name, SCHEMES, 1):
            raise UsageError(f"there is no scheme '{name}' (a file would end in .py or .csv); did you mean {near}?")
        names = f"it is one of {', '.join(SCHEMES)}, or a file that ends in .py or .csv"
        raise UsageError(f"there is no scheme '{name}': {names}")
    return load_file(Path(name), sizes, tensor)


def describe() -> str:
    """One paragraph per scheme: its name, the options it takes, and its text."""
    lines = []
    for name, built_in in SCHEMES.items():
        options = " ".join(f"--{option}" for option in ("stages", "microbatches", *built_in.module.PARAMETERS))
        lines += [f"{name}  {options}", *(f"    {line}" for line in built_in.text.splitlines() if line), ""]
    return "\n".join([*lines, f"Each also takes --replicas R. Orders for --n: {', '.join(ORDERS)}."])
