"""Slots and peaks, compared with the lifetimes that slow plain Python reads off each rank's list."""

from __future__ import annotations

import io
import json
from itertools import combinations, product

import numpy as np
import pytest
from compiled import compiled
from slow_memory_plan import at_once, lives, one_rank, random_bytes

from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.ir.file import write
from schedgen.ir.instructions import Kind, Op
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.simulator.buffer_sizes import BufferSizes, buffer_sizes
from schedgen.simulator.footprint import footprint
from schedgen.simulator.machine import Machine
from schedgen.simulator.memory_plan import memory_plan

SCHEME = Scheme(
    "pairs", 2, lambda s, b, d: (s // 2, s // 2), lambda s, b, d: b * 10 + np.where(d, 9 - s, s), "n", "greedy"
)


@pytest.mark.parametrize("replicas", [(1, 1, 1, 1), (3, 1), (1, 4, 1)], ids=str)
@pytest.mark.parametrize("updates", ["stash", "vertical"])
def test_versions_that_are_alive_together_lie_apart(replicas, updates):
    case = Sizes(len(replicas), 13, replicas=replicas)
    program = compiled("pipedream", case, updates=updates)
    sizes = random_bytes(np.random.default_rng(0), len(replicas))
    planned, needed = memory_plan(program, sizes), footprint(program, sizes)
    for rank in range(program.header.workers):
        part = program.instructions(rank)
        row = planned.slot[program.bounds[rank] : program.bounds[rank + 1]].tolist()
        frees = {(i.stage, i.version) for i in part if i.op == Op.FREE and i.kind == Kind.W}
        alive, most, used = {0: -1}, 0, set()
        (stage,) = {i.stage for i in part if i.op == Op.STEP}
        for i, place in zip(part, row, strict=True):
            if i.op == Op.STEP:
                if (stage, i.version - 1) not in frees:
                    assert alive.pop(i.version - 1) == place  # changed in place
                assert place not in alive.values()
                alive[i.version] = place
                used.add(place)
            elif i.op == Op.FREE and i.kind == Kind.W:
                del alive[i.version]
            most = max(most, len(alive))
        extra = sorted(used - {-1})
        assert len(extra) == most - 1 and (planned.sizes[rank][extra] == sizes.weight[stage]).all()
        assert needed.slots[rank] == planned.sizes[rank].sum()
        one_rank(program, rank, sizes, planned, needed)


# 1F1B on two workers, two microbatches. x.0 and g.0 have 10 bytes, the loss 1; weights 100 and 200 (owned: three
# times that, with optimizer state); forwards keep 1000 and 3000; workspaces: F 5 and 7, B 20 and 30.
TINY = BufferSizes(
    activation=np.array([10, 1]),
    weight=np.array([100, 200]),
    partial=np.array([100, 200]),
    saved=np.array([1000, 3000]),
    half=np.array([0, 0]),
    workspace={"F": np.array([5, 7]), "B": np.array([20, 30])},
    owned=np.array([300, 600]),
)


def test_a_loss_is_kept_as_a_number():
    """Outputs of 1000 bytes: the last stage's is there while its forward runs, a number of it until NORM."""
    sizes = TINY._replace(activation=np.array([10, 1000]))
    needed = footprint(compiled("1f1b", 2, 5, 2), sizes)
    assert needed.owned.tolist() == [400, 800 + 5 * 8]
    assert needed.computed.tolist() == [2040, 3000 + 10 + 1000 + 7]
    for microbatches in (2, 5):  # of forwards alone the outputs are results, and none is kept
        alone = footprint(compiled("1f1b", 2, microbatches, 2, forward=True), sizes)
        assert (alone.owned.tolist(), alone.computed[1]) == ([100, 200], 1000 + 7)


def test_an_owner_has_room_for_the_other_owners_parts_of_a_sum():
    # One stage of 1000 bytes on three owners: each has weights, dw, and receives two parts of 384 >= 1000 / 3 bytes.
    sizes = buffer_sizes(Machine(weight=1000, activation=0, saved=0), 1)
    assert footprint(compiled("ddp", 1, 3, 3), sizes).peak.tolist() == [1000 + 1000 + 2 * 384] * 3


def copies(program, rank):
    return [life for life in lives(program, rank) if life.kind == Kind.W]


def weight_places(program):
    """By rank: (places of weight copies, the most copies at once)."""
    row = memory_plan(program, buffer_sizes(Machine(), program.header.stages)).slot
    fetches = np.flatnonzero(program.rows.op == Op.FETCH_W)
    return [
        (len(set(row[fetches[program.rows.rank[fetches] == rank]].tolist())), at_once(copies(program, rank)))
        for rank in range(program.header.workers)
    ]


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("sizes", [("fsdp", 4, 8, 4), ("fslpp", 4, 8, 4, 2), ("fslpp", 4, 8, 4, 4), ("fsdp", 16, 8, 8)])
def test_weight_copies_need_no_more_places_than_there_are_copies_at_once(sizes, slots):
    found = weight_places(compiled(*sizes, weight_slots=slots))
    assert max(used for used, _ in found) >= min(slots, 2)
    assert all(used == most for used, most in found)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_where_fixed_places_need_one_more_no_other_sharing_needs_less(slots):
    # FSLPP on 8 stages, 4 workers, 2 groups: rank 2 fetches four stages, of which more are held together in pairs.
    program = compiled("fslpp", 8, 8, 4, 2, weight_slots=slots)
    found = weight_places(program)
    assert [used - most for used, most in found] == [0, 0, int(slots > 1), 0]
    held = copies(program, 2)
    together = {
        (one.stage, other.stage)
        for one, other in combinations(held, 2)
        if one.stage != other.stage and not (one.end < other.begin or other.end < one.begin)
    }
    stages = sorted({life.stage for life in held})
    for shared in product(range(found[2][0] - 1), repeat=len(stages)):
        of = dict(zip(stages, shared, strict=True))
        assert any(of[one] == of[other] for one, other in together)


def profile(tmp_path, **costs):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(costs))
    return path


def test_stats_and_simulate_say_the_peak_by_hand(run, tmp_path):
    path = tmp_path / "a.json"
    with path.open("wb") as out:
        write(compiled("1f1b", 2, 2, 2), out)
    costs = profile(
        tmp_path, F=[1, 2], B=[2, 4], activation=[10, 1], weight=[100, 200], saved=[1000, 3000], owned=[300, 600],
        workspace={"F": [5, 7], "B": [20, 30]}, alpha=0.5,
    )  # fmt: skip
    # Rank 0, by instruction (bytes of what it computed while the instruction runs):
    #   FWD 0 0     saved 1000 + x.0.0 10 + 5 = 1015
    #   SEND x.0.0, RECV g.0.0 into place 0
    #   FWD 0 1     saved 2000 + x.0.0 10 + x.0.1 10 + 5 = 2025
    #   SEND x.0.1, RECV g.0.1 into place 1: g.0.0 is still there
    #   BWD 0 0     saved 2000 + x.0.0 10 + x.0.1 10 + 20 = 2040, the most
    #   FREE x.0.0, FREE g.0.0
    #   BWD 0 1     saved 1000 + x.0.1 10 + 20 = 1030
    #   FREE x.0.1, FREE g.0.1
    # Rank 1:
    #   RECV x.0.0 into place 0, RECV x.0.1 into place 1
    #   FWD 1 0     saved 3000 + x.1.0 1 + 7 = 3008
    #   BWD 1 0     saved 3000 + g.0.0 10 + 30 = 3040
    #   FREE x.0.0, SEND g.0.0
    #   FWD 1 1     saved 3000 + g.0.0 10 + x.1.1 1 + 7 = 3018
    #   BWD 1 1     saved 3000 + g.0.0 10 + g.0.1 10 + 30 = 3050, the most
    # Besides: 400 and 802 bytes are owned, with dw and two losses, and places take 20.
    numbers = json.loads(run("stats", path, "--profile", costs, "--json").out)
    assert numbers["peak_bytes"] == 3872
    assert [worker["peak_bytes"] for worker in numbers["workers"]] == [2460, 3872]
    kinds = {"activation": 21, "gradient": 20, "weight": 0, "weight_gradient": 200, "partial": 0, "saved": 3000,
             "half": 0, "host": 0, "optimizer": 0, "places": 20, "owned": 802}  # fmt: skip
    assert numbers["memory_bytes"] == kinds
    assert numbers["workers"][0]["memory_bytes"] == kinds | {
        "activation": 20, "weight_gradient": 100, "saved": 2000, "owned": 400,
    }  # fmt: skip
    # Messages take no time: worker 1 works from 1 on, two times 2 + 4, then worker 0's last 2.
    assert numbers["latency"] == 1 + 2 * 6 + 2
    # What stage 1 saves lives for 4, what stage 0 saves for 2 + 4 + 2, two of each; the peaks are 2 and 1.
    # The memory bound is worker 1's: two of 4 in a peak of 1. On the way: to worker 1, its jobs, and back. With room
    # for one microbatch worker 1 has nothing to do at its ends but these two.
    bounds = {"work": 12, "critical_path": 3 + 6, "ends": 1 + 12 + 2, "memory": 2 * 4 / 1}
    assert numbers["bounds"] == bounds
    assert "peak bytes            3872" in run("stats", path, "--profile", costs).out
    simulated = json.loads(run("simulate", path, "--profile", costs, "--json").out)
    assert simulated["peak_bytes"] == 3872
    assert [worker["peak_bytes"] for worker in simulated["workers"]] == [2460, 3872]
    assert "peak_bytes" not in run("stats", path, "--json").out


def test_what_a_profile_leaves_out(run, refused, tmp_path):
    path = tmp_path / "a.json"
    with path.open("wb") as out:
        write(compiled("zb-h1", 2, 2, 2), out)

    def peak_of(**costs):
        whole = {"F": 1, "I": 1, "W": 1, "activation": 0, "weight": 100, "saved": 0}
        return json.loads(run("stats", path, "--profile", profile(tmp_path, **(whole | costs)), "--json").out)

    assert peak_of()["peak_bytes"] == 100 + 100  # owned as much as the weights, and dw
    assert peak_of(owned=300)["peak_bytes"] == 300 + 100
    assert peak_of(workspace=7)["peak_bytes"] == 200 + 7
    assert peak_of(workspace={"W": [1, 2]})["peak_bytes"] == 200 + 2
    assert peak_of(workspace={"B": 9})["peak_bytes"] == 200 + 9
    assert peak_of(half=50)["memory_bytes"]["half"] == 2 * 50  # worker 1 does both I before its first W
    for wrong, words in (
        ({"workspace": {"G": 1}}, "not 'G'"),
        ({"workspace": {"F": [1, 2, 3]}}, "workspace of F has 3 numbers"),
        ({"workspace": {"F": "much"}}, "workspace of F should be a number"),
        ({"half": -1}, "half should be a number"),
        ({"owned": [1]}, "owned has 1 number, but"),
        ({"per_consumer": [1, 2, 3, 4]}, "per_consumer has 4 numbers, but the schedule has 1 edge: 0-1"),
    ):
        costs = profile(tmp_path, F=1, I=1, W=1, **wrong)
        assert words in refused(run("stats", path, "--profile", costs), 1)
    assert run("stats", path, "--profile", costs, "--cost", "F=1,I=1,W=1").code == 2


def test_what_tied_stages_share(run, refused, tmp_path):
    """Stages 0 and 2 of 3 share 600 bytes: two ranks sum them in slices of 320. Stages 0 and 1 share 64 on one rank."""
    path, whole = tmp_path / "a.json", {"F": 1, "B": 1, "activation": 0, "weight": 1000, "saved": 0, "beta": 1}

    def numbers(**costs):
        return json.loads(run("simulate", path, "--profile", profile(tmp_path, **whole, **costs), "--json").out)

    for ties, tied, added, sooner in (
        (((0, 2),), [599.5], [2 * 600 + 320, 2 * 600 + 320], 1000 - 600),
        ((), [600], [0, 0], 0),
        (((0, 1),), 64, [3 * 64, 0], 0),
    ):
        text = io.BytesIO()
        write(compile(SCHEME, Sizes(3, 2, 2), Options(tied=ties)), text)
        path.write_bytes(text.getvalue())
        unknown, known = numbers(), numbers(tied=tied)
        peaks = [[worker["peak_bytes"] for worker in each["workers"]] for each in (known, unknown)]
        assert [a - b for a, b in zip(*peaks, strict=True)] == added
        assert unknown["makespan"] - known["makespan"] == sooner
    for wrong, words in (([1, 2], "tied has 2 numbers, but there is 1 tie"), ("x", "tied should be a number")):
        costs = profile(tmp_path, **whole, tied=wrong)
        assert words in refused(run("stats", path, "--profile", costs), 1)
