"""Every scheme of the package, with every feature that goes with it."""

from __future__ import annotations

import pytest
from compiled import compiled, sizes_of
from edited_programs import comes_back, runs_with

from schedgen.checker import check
from schedgen.schemes import SCHEMES
from schedgen.util.errors import UsageError


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_is_proved_and_runs_with_every_feature_and_comes_back(name):
    sizes, found = sizes_of(name, microbatches=8 if name == "dualpipe-v" else 4), []
    twice = {"workers": 8, "microbatches": 2 * sizes.microbatches, "replicas": 2}
    for feature, more, options in (
        ("none", {}, {}),
        ("tied", {}, {"tied": [(0, sizes.stages - 1)]}),
        ("recompute", {}, {"recompute": "except-last"}),
        ("shards", {"shards": (3,)}, {}),
        ("stash", {}, {"updates": "stash"}),
        ("vertical", {}, {"updates": "vertical"}),
        ("slices", {"workers": 8}, {"tensor": 2, "substages": 8 // sizes.stages, "replicated_stages": (0,)}),
        ("forward", {}, {"forward": True}),
        ("replicas", twice, {"recompute": "except-last"}),
        ("replicas of slices", twice | {"workers": 16}, {"tensor": 2, "tied": [(0, 1)]}),
        ("shards over replicas", twice | {"shards": (3,)}, {}),
        ("stash of replicas", twice, {"updates": "stash"}),
        ("2bw of replicas", twice | {"microbatches": 24}, {"updates": "2bw"}),
        ("forward of slices", {"workers": 8}, {"tensor": 2, "forward": True}),
    ):
        sized = sizes._replace(**more)
        try:
            program = compiled(name, sized, **options)
        except UsageError:
            continue  # it does not go with this scheme
        found.append(feature)
        runs_with(check(program), program)
    comes_back(program)
    assert set(found) >= {"none", "recompute", "replicas"}
    if name not in ("pipedream", "pipedream-2bw"):
        assert set(found) >= {"tied", "slices", "forward", "forward of slices", "replicas of slices"}
        assert name in ("fsdp", "fslpp") or set(found) >= {"stash", "stash of replicas"}
        assert name in ("ddp", "lpp", "chimera") or "shards over replicas" in found
