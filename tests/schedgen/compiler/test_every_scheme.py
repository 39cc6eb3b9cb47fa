"""Every scheme of the package, with every feature that goes with it."""

from __future__ import annotations

import pytest
from edited_programs import comes_back, runs_with
from scheme_sizes import sizes_of

from schedgen.checker import check
from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.schemes import SCHEMES, load
from schedgen.util.errors import UsageError


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_is_proved_and_runs_and_comes_back_with_every_feature(name):
    sizes, compiled = sizes_of(name), []
    for feature, more, options in (
        ("none", {}, {}),
        ("tied", {}, {"tied": [(0, sizes.stages - 1)]}),
        ("recompute", {}, {"recompute": "except-last"}),
        ("shards", {"shards": (3,)}, {}),
        ("stash", {}, {"updates": "stash"}),
        ("vertical", {}, {"updates": "vertical"}),
        ("slices", {"workers": 8}, {"tensor": 2, "substages": 8 // sizes.stages, "replicated_stages": (0,)}),
        ("forward", {}, {"forward": True}),
        ("replicas", {"workers": 8, "microbatches": 16, "replicas": 2}, {"recompute": "except-last"}),
        ("replicas of slices", {"workers": 16, "microbatches": 16, "replicas": 2}, {"tensor": 2, "tied": [(0, 1)]}),
        ("shards over replicas", {"workers": 8, "microbatches": 16, "replicas": 2, "shards": (3,)}, {}),
        ("stash of replicas", {"workers": 8, "microbatches": 16, "replicas": 2}, {"updates": "stash"}),
        ("2bw of replicas", {"workers": 8, "microbatches": 24, "replicas": 2}, {"updates": "2bw"}),
        ("forward of slices", {"workers": 8}, {"tensor": 2, "forward": True}),
    ):
        sized = sizes._replace(**more)
        try:
            program = compile(load(name, sized, options.get("tensor", 1)), sized, Options(**options))
        except UsageError:
            continue  # it does not go with this scheme
        compiled.append(feature)
        runs_with(check(program), program)
        comes_back(program)
    assert set(compiled) >= {"none", "recompute", "replicas"}
    if name not in ("pipedream", "pipedream-2bw"):
        assert set(compiled) >= {"tied", "slices", "forward", "forward of slices", "replicas of slices"}
        assert name in ("fsdp", "fslpp") or set(compiled) >= {"stash", "stash of replicas"}
        assert name in ("ddp", "lpp", "chimera") or "shards over replicas" in compiled
