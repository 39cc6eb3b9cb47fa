"""Every scheme of the package, with every feature that goes with it."""

from __future__ import annotations

import pytest
from damage import sizes_of
from edited_programs import comes_back, runs_with

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
    if name in ("pipedream", "pipedream-2bw"):
        assert set(compiled) >= {"none", "recompute"}
    else:
        assert set(compiled) >= {"none", "tied", "recompute", "slices", "forward", "forward of slices"}
        assert "stash" in compiled or name in ("fsdp", "fslpp")
