"""Owners of a stage that sum its gradient by messages have the bits of one process, and of one another."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
from examples import ASKED, further
from run_results import AN_OWNER_WITHOUT_JOBS, DEPTH_FIRST, TWO_OWNERS

from schedgen.compiler.sum_trees import SUMS

MODEL = "models_for_graphs:mlp_of_four"
SCHEMES = {
    "ddp": ("ddp", {}),
    "1f1b": ("1f1b", {"stages": 2, "replicas": 2, "microbatches": 5}),
    "without jobs": (AN_OWNER_WITHOUT_JOBS + DEPTH_FIRST, {}),
}
SCHEMES |= further(
    ("fsdp", ("fsdp", {"replicas": 2, "stages": 4})),
    ("two owners", (TWO_OWNERS + DEPTH_FIRST, {})),
    ("zb-v", ("zb-v", {"replicas": 2})),
    ("lpp", ("lpp", {"groups": 2})),
)
HOSTS = {"two-level": {"topology": "2x2"}}
CASES = [(name, sums) for name in SCHEMES for sums in SUMS[1:] if ASKED or name == "ddp" or sums == SUMS[-1]]
RUN = "--steps", 2, "--clip", 1


@pytest.fixture(scope="module")
def schedules(compiled):
    sizes = {"stages": 4, "microbatches": 8, "workers": 4}
    return {
        (name, sums): compiled(SCHEMES[name][0], **(sizes | SCHEMES[name][1] | HOSTS.get(sums, {})), sums=sums)
        for name, sums in CASES
    }


@pytest.fixture(scope="module")
def runs(inside, schedules, text, tmp_path_factory):
    """By case, the run in canonical mode and the plain one, and by rank the hashes of the weights of the latter."""
    folder, requests = tmp_path_factory.mktemp("copies"), []
    for k, schedule in enumerate(schedules.values()):
        arguments = [schedule, "--model", MODEL, "--text", text, *RUN, "--verify"]
        requests += [
            {"arguments": [*arguments, "--canonical"]},
            {"arguments": arguments, "copies": str(folder / str(k))},
        ]
    seen = inside(4, requests)
    copies = [json.loads((folder / str(k)).read_text()) for k in range(len(schedules))]
    return dict(zip(schedules, zip(seen[::2], seen[1::2], copies, strict=True), strict=True))


@pytest.mark.parametrize(("name", "sums"), CASES)
def test_in_canonical_mode_every_bit_is_that_of_one_process(runs, name, sums):
    canonical, _, _ = runs[name, sums]
    assert canonical.code == 0, canonical.out
    assert set(canonical.differences.values()) == {0}


@pytest.mark.parametrize(("name", "sums"), CASES)
def test_the_gradient_is_that_of_one_process_and_all_owners_have_the_same_bits(runs, name, sums):
    _, plain, copies = runs[name, sums]
    assert plain.code == 0 and plain.differences["gradients"] <= 1e-5, plain.out
    of_stage = defaultdict(list)
    for of_rank in copies:
        for stage, digest in of_rank.items():
            of_stage[stage].append(digest)
    assert any(len(digests) > 1 for digests in of_stage.values())
    assert all(len(set(digests)) == 1 for digests in of_stage.values())


@pytest.mark.parametrize("how", [*further("direct"), "staged"])
def test_transfers_wait_for_the_kernels_of_a_late_device(inside, schedules, text, how):
    """The total is added to a part that is zeroed after its send."""
    arguments = ["--model", MODEL, "--text", text, *RUN, "--verify", "--canonical"]
    names = [("ddp", sums) for sums in (SUMS[1], *further(*SUMS[2:-1]), SUMS[-1])]
    for seen in inside(4, [{"arguments": [schedules[name], *arguments], "late": how, "delay": 3} for name in names]):
        assert seen.code == 0 and set(seen.differences.values()) == {0}, seen.out
