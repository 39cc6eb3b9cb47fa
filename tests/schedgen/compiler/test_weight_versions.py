"""Updates without a flush: which version of its weights every job uses, how many there are."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from compiled import compiled
from edited_programs import runs_with
from examples import further

from schedgen.checker import check, check_compiled
from schedgen.ir.instructions import Op
from schedgen.report.chakra import dependencies
from schedgen.schemes.scheme import Sizes
from schedgen.simulator.stats import stats
from schedgen.util.errors import UsageError

UPDATES = ("stash", "vertical")


def pipedream(replicas, microbatches, updates="stash", **options):
    sizes = Sizes(len(replicas), microbatches, replicas=tuple(replicas))
    return compiled("pipedream", sizes, updates=updates, **options)


def jobs(program, *ops):
    """(stage, microbatch) of these instructions, and the version each uses."""
    rows = np.flatnonzero(np.isin(program.rows.op, ops))
    return {(i.stage, i.mb): i.version for i in map(program.instruction, rows.tolist())}


# What the papers say


@pytest.mark.parametrize("updates", UPDATES)
@pytest.mark.parametrize("stages", range(1, 9))
def test_a_straight_pipeline_uses_the_versions_of_the_papers_formulas(stages, updates):
    """PipeDream, section 3.3: w^(t-n+1), ..., w^(t) with stashing, w^(t-n+1) everywhere with vertical sync."""
    for microbatches in (1, 2, 5, 8, 13, 20):
        program = pipedream([1] * stages, microbatches, updates)
        delay = [stages - 1 - (s if updates == "stash" else 0) for s in range(stages)]
        every = itertools.product(range(stages), range(microbatches))
        expected = {(s, b): max(0, b - delay[s]) for s, b in every}
        assert jobs(program, Op.FWD) == jobs(program, Op.BWD) == expected
        numbers = stats(program)
        assert numbers["staleness"] == [min(microbatches - 1, late) for late in delay]
        for late, most in zip(delay, numbers["versions"], strict=True):
            # After the step to version k: that one, and all older ones that microbatches from k on use.
            ahead = ({max(0, b - late) for b in range(k, microbatches)} for k in range(1, microbatches + 1))
            assert most == max(1 + sum(v < k for v in versions) for k, versions in enumerate(ahead, start=1))
            assert most == late + 1 or microbatches <= 2 * late


def buffered(stages, microbatches, m, replicas=1):
    sizes = Sizes(stages, microbatches, group=m, replicas=(replicas,) * stages)
    return compiled("pipedream-2bw", sizes)


@pytest.mark.parametrize("replicas", [1, 2, *further(3)])
@pytest.mark.parametrize("stages", [1, 2, 4, *further(3, 8)])
def test_two_buffers_use_the_versions_of_the_paper_s_formula(stages, replicas):
    """Narayanan et al. 2021, section 3.1: microbatch k, from 1 on, uses version max(floor((k - 1) / m) - 1, 0) at every
    stage, forward and backward; two versions are all that is kept, and every update is one late."""
    d = stages * replicas  # microbatches in flight
    for m, microbatches in ((d, 3 * d), (d, 4 * d + 1), (d + 1, 3 * d + 5), (2 * d, 7 * d)):
        program = buffered(stages, microbatches, m, replicas)
        formula = {(s, k - 1): max((k - 1) // m - 1, 0) for s in range(stages) for k in range(1, microbatches + 1)}
        assert jobs(program, Op.FWD) == jobs(program, Op.BWD) == formula
        numbers = stats(program)
        # One stage has nothing in flight between an update and the next forward, so its buffers are used in turn, too.
        assert numbers["versions"] == [2] * stages and numbers["staleness"] == [1] * stages
        runs_with(check(program), program)


@pytest.mark.parametrize("updates", UPDATES)
@pytest.mark.parametrize("replicas", [(1,), (4,), (3, 1), (1, 4), (2, 3), (3, 1, 2), (1, 2, 3)])
def test_all_replicas_compile_check_and_run(replicas, updates):
    for microbatches in {max(replicas), max(replicas) + 2, 7}:
        program = pipedream(replicas, microbatches, updates)
        runs_with(check(program), program)


# Schemes of one's own


def test_a_scheme_file_says_its_updates_and_the_option_is_stronger(run, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("updates = 'stash'\ndef w(s, b, d): return s, s\ndef n(s, b, d): return b + d\n")
    sizes = ("--stages", 2, "--microbatches", 4, "-o", "-")
    assert json.loads(run("compile", path, *sizes).out)["lowering"]["updates"] == "stash"
    assert json.loads(run("compile", path, *sizes, "--updates", "vertical").out)["lowering"]["updates"] == "vertical"
    assert "updates" not in json.loads(run("compile", path, *sizes, "--updates", "flush").out)["lowering"]


OUT_OF_ORDER = "w = lambda s, b, d: (s, s)\nn = lambda s, b, d: 9 * d + b * (1 - 2 * (d > 0))\n"
FIRST_STAGE_FIRST = """
split, mode = True, "strict"
order = [(0, 0, 0), (1, 0, 0), (1, 0, 1), (0, 0, 1), (0, 0, 2), (0, 1, 0), (1, 1, 0), (1, 0, 2)]
w = lambda s, b, d: (0, 0)
n = lambda s, b, d: order.index((s, b, d)) if (s, b, d) in order else 9 + d - s / 9
"""
IN_A_CIRCLE = "mode = 'strict'\nw = lambda s, b, d: 2 * ((s + b) % 2,)\nn = lambda s, b, d: 2 * d - 4 * b + s * d\n"


@pytest.mark.filterwarnings("ignore::schedgen.util.errors.SlowScheme")
@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        (OUT_OF_ORDER, "backwards of a stage must follow the order of microbatches"),
        (FIRST_STAGE_FIRST, "stages must update from the last to the first"),
        (IN_A_CIRCLE, "all-reduces of different stages wait for one another"),
    ],
    ids=["backwards out of order", "first stage first", "in a circle"],
)
def test_an_order_that_cannot_update_is_one_sentence(scheme, words, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(f"updates = 'vertical'\n{scheme}")
    with pytest.raises(UsageError, match=f"^--updates vertical: .*{words}"):
        check_compiled(compiled(str(path), 2, 2))


@pytest.mark.parametrize("updates", UPDATES)
def test_a_chakra_node_depends_on_the_step_that_made_its_version(updates):
    program = pipedream((2, 1), 8, updates)
    for rank in range(program.header.workers):
        listed = program.instructions(rank)
        made = {(i.stage, i.version): at for at, i in enumerate(listed) if i.op == Op.STEP}
        for i, edges in zip(listed, dependencies(program, rank), strict=True):
            if i.op in (Op.FWD, Op.BWD) and i.version:
                others = {at for key, at in made.items() if key != (i.stage, i.version)}
                every, for_order = edges
                needed = set(every) - set(for_order)
                assert made[i.stage, i.version] in needed and not others & needed
