"""Updates without a flush: which version of its weights every job uses, how many there are; all else is refused."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from damage import I, both, drop, edit, free, job, move, put, recv, send, sizes_of, twice
from edited_programs import runs_with, written
from examples import further

from schedgen.checker import check, check_compiled
from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.ir.instructions import Op
from schedgen.report.chakra import dependencies
from schedgen.schemes import load
from schedgen.schemes.scheme import Sizes
from schedgen.simulator.stats import stats
from schedgen.util.errors import UsageError

UPDATES = ("stash", "vertical")


def compiled(replicas, microbatches, updates="stash", **options):
    sizes = Sizes(len(replicas), microbatches, replicas=tuple(replicas))
    return compile(load("pipedream", sizes), sizes, Options(updates=updates, **options))


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
        program = compiled([1] * stages, microbatches, updates)
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
    return compile(load("pipedream-2bw", sizes), sizes)


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


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (Sizes(4, 12, group=3), "pipedream-2bw needs --group of at least 4, the microbatches in flight, not 3"),
        (Sizes(2, 12, replicas=(2, 2), group=3), "at least 4, the microbatches in flight"),
        (Sizes(2, 12, replicas=(2, 1)), "equally many replicas of each stage, not 2,1"),
    ],
)
def test_two_buffers_that_are_too_few_are_one_sentence(sizes, words):
    with pytest.raises(UsageError, match=words):
        compile(load("pipedream-2bw", sizes), sizes)


@pytest.mark.parametrize("updates", UPDATES)
@pytest.mark.parametrize("replicas", [r for most in ([4], [4, 4], [3, 3, 3]) for r in np.ndindex(*most)])
def test_all_replicas_compile_check_and_run(replicas, updates):
    replicas = [1 + r for r in replicas]
    for microbatches in {max(replicas), max(replicas) + 2, 7}:
        program = compiled(replicas, microbatches, updates)
        runs_with(check(program), program)


@pytest.mark.parametrize("scheme", ["fsdp", "fslpp"])
def test_weights_that_travel_have_no_versions(scheme):
    sizes = sizes_of(scheme)
    with pytest.raises(UsageError, match=r"^--updates stash: w must put a job's weights where it is computed"):
        compile(load(scheme, sizes), sizes, Options(updates="stash"))


# Damage

BASES = {
    "replicas": ("--stages", 2, "--microbatches", 4, "--replicas", "2,1"),
    "stash": ("--stages", 2, "--microbatches", 4),
    "vertical": ("--stages", 2, "--microbatches", 4, "--updates", "vertical"),
    "buffers": ("--stages", 2, "--microbatches", 6, "--updates", "2bw"),
}


def used(op, stage, mb, version):
    return job(op, stage, mb) | I(version=version)


def step(stage, version):
    return I(op="STEP", stage=stage, version=version)


def replicas(make):
    """The same damage on ranks 0 and 1, the replicas of stage 0 or both ranks."""
    return both(*(make(rank) for rank in (0, 1)))


SUM = {"op": "ALLREDUCE", "buf": "dw.0", "group": 1}

DAMAGES = [
    # Rule 9
    ("FWD with an older version", "stash", edit(0, job("FWD", 0, 2), version=0), 9, "version 1 is the newest here"),
    (
        "FWD with the newest version",
        "vertical",
        edit(1, job("FWD", 1, 1), version=1),
        9,
        "version 0 is the one with which the microbatch entered",
    ),
    ("BWD with the newest version", "stash", edit(0, job("BWD", 0, 1), version=1), 9, "its forward uses version 0"),
    ("FWD before the STEP", "stash", move(0, used("FWD", 0, 2, 1), before=step(0, 1)), 9, "version 0 is the newest"),
    (
        "jobs with the newest of two buffers",
        "buffers",
        both(edit(1, job("FWD", 1, 3), version=1), edit(1, job("BWD", 1, 3), version=1)),
        9,
        "version 0 is the one that the update before the last made",
    ),
    ("STEP before a gradient of its two", "buffers", move(1, step(1, 1), before=job("BWD", 1, 1)), 5, "belongs to the"),
    # Rule 5: updates
    ("STEP missing", "stash", drop(0, **step(0, 2)), 5, "the next step of this stage here makes version 2"),
    ("last STEP missing", "stash", drop(0, **step(0, 4)), 5, "STEP of stage 0 to version 4 is missing"),
    (
        "a round too many",
        "replicas",
        replicas(lambda r: put(r, step(0, 3), after=step(0, 2))),
        5,
        "no gradient is left for this step",
    ),
    ("STEP before its BWD", "stash", move(0, step(0, 2), before=job("BWD", 0, 1)), 5, "belongs to the step to version"),
    ("STEP on no owner", "stash", put(1, step(0, 1), after=step(1, 1)), 5, "this rank does not own the stage"),
    ("NORM before STEP", "stash", move(0, I(op="NORM"), before=step(0, 4)), 5, "after NORM"),
    ("no NORM", "stash", replicas(lambda r: drop(r, "NORM")), 5, "NORM is missing"),
    # Rule 5: sums
    ("no ALLREDUCE", "replicas", replicas(lambda r: drop(r, **SUM, last=True)), 5, "of dw.0 is missing"),
    (
        "ALLREDUCE behind the last STEP",
        "replicas",
        replicas(lambda r: put(r, SUM, before=I(op="NORM"))),
        5,
        "one ALLREDUCE belongs to each",
    ),
    (
        "ALLREDUCE before its BWD",
        "replicas",
        replicas(lambda r: move(r, SUM, before=job("BWD", 0, r))),
        5,
        "this sum is not complete here",
    ),
    ("ALLREDUCE of all", "replicas", edit(0, SUM, group=0), 5, "this is not the group of the stage's owners"),
    (
        "ALLREDUCE of one owner",
        "stash",
        put(0, SUM | I(group=0), before=step(0, 1)),
        5,
        "this stage has one owner, so there is nothing to sum",
    ),
    ("ALLREDUCE of others", "replicas", put(2, SUM, before=step(1, 1)), 5, "this rank does not own the stage"),
    # Rule 5 and 7: lives of sums
    ("no FREE of a sum", "stash", drop(0, **free("dw.0")), 5, "dw.0 still holds the gradient of the step before"),
    ("no FREE of the last sum", "stash", drop(0, **free("dw.0"), last=True), 7, "dw.0 is never freed"),
    ("FREE of a sum twice", "stash", twice(0, **free("dw.0")), 5, "no STEP has used this sum yet"),
    # Rule 7: lives of versions
    ("no FREE of a version", "stash", drop(0, **free("w.0@0")), 7, "w.0@0 is used again after its end"),
    (
        "FREE of the last",
        "stash",
        put(0, free("w.0@4"), after=step(0, 4)),
        7,
        "these are the newest weights, which are never freed",
    ),
    ("FREE of no version yet", "stash", move(0, free("w.0@2"), before=step(0, 2)), 2, "w.0@2 is not defined"),
]  # fmt: skip


@pytest.fixture(scope="module")
def base(run):
    texts = {name: run("compile", "pipedream", *options, "-o", "-").out for name, options in BASES.items()}
    return {name: json.loads(text) for name, text in texts.items()}


def copy(file):
    return json.loads(json.dumps(file))


@pytest.mark.parametrize(
    ("name", "damage", "rule", "words"), [row[1:] for row in DAMAGES], ids=[f"{row[1]}: {row[0]}" for row in DAMAGES]
)
def test_damage_is_refused_where_it_is(name, damage, rule, words, base, refused_where_it_is):
    file = copy(base[name])
    damage(file["programs"])
    refused_where_it_is(file, rule, words)


# Lines

WRONG = [
    (I(op="FWD", stage=0, mb=0), "a version is missing"),
    (I(op="STEP", stage=0), "a version is missing"),
    (I(op="FWD", stage=0, mb=0, version=5), "there is no such rank, group or version"),
    (I(op="FWD", stage=0, mb=0, version=-1), "FWD is written as one of"),
    (I(op="BWD", stage=0, mb=0, version="0"), "BWD is written as one of"),
    (free("w.0"), "a version is missing"),
    (free("w.0@5"), "there is no such rank, group or version"),
    (free("w.0@"), "FREE is written as one of"),
    (free("w.0@00"), "a number has leading zeros"),
    (free("dw.0@1"), "FREE is written as one of"),
    (free("x.0.0@0"), "FREE is written as one of"),
    (send("w.0@0", 1), "SEND is written as one of"),
    (recv("g.0.0@0", 1), "RECV is written as one of"),
    (I(op="NORM", group=0, version=0), "NORM is written as one of"),
]


@pytest.mark.parametrize(("wrong", "words"), WRONG, ids=[str(row[0]) for row in WRONG])
def test_a_line_that_says_no_version_or_a_wrong_one_is_refused(wrong, words, base, run, refused, tmp_path):
    file = copy(base["stash"])
    file["programs"][0].insert(0, wrong)
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(file))
    assert words in refused(run("seal", path), 1)
    text = written(compiled((1, 1), 4)).decode()
    path.write_text(text.replace("  [\n", f"  [\n   {json.dumps(wrong)},\n", 1))
    assert words in refused(run("check", path), 1)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("buffers", {"accumulated": None}, "accumulated belongs to updates 2bw"),
        ("stash", {"accumulated": 2}, "accumulated belongs to updates 2bw"),
        ("buffers", {"accumulated": 0}, "accumulated must be a whole number of at least 1"),
    ],
)
def test_how_many_gradients_an_update_has_is_said_where_there_are_two_buffers(
    name, change, words, base, run, refused, tmp_path
):
    file = copy(base[name])
    lowering = file["lowering"] | change
    file["lowering"] = {key: value for key, value in lowering.items() if value is not None}
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(file))
    assert words in refused(run("seal", path), 1)


def test_updates_of_more_gradients_than_the_list_adds_up_are_refused(base, judge, refused):
    file = copy(base["buffers"])
    file["lowering"]["accumulated"] = 3
    assert "no gradient is left for this step" in refused(judge(file)[0], 1)


@pytest.mark.parametrize(
    ("key", "words"), [("tied", "tied stages step together"), ("weights", "is not on the worker of its weights")]
)
def test_a_header_that_versions_do_not_go_with_is_refused(key, words, base, judge, refused):
    file = copy(base["stash"])
    if key == "tied":
        file["tied"] = [[0, 1]]
    else:
        file["weights"] = {"F": [0, 0], "B": [0, 0]}
        file["owners"] = [[0], [0]]
    message = refused(judge(file)[0], 1)
    assert words in message and "(rule 9: " in message


# Schemes of one's own


@pytest.mark.parametrize("updates", ["'sometimes'", "3", "['stash']"])
def test_a_scheme_file_with_wrong_updates_is_one_sentence(updates, run, refused, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(f"updates = {updates}\ndef w(s, b, d): return s, s\ndef n(s, b, d): return b + s + d\n")
    message = refused(run("compile", path, "--stages", 2, "--microbatches", 4, "-o", "-"), 2)
    assert "is none of flush, stash, vertical, 2bw" in message


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
    path, sizes = tmp_path / "mine.py", Sizes(2, 2)
    path.write_text(f"updates = 'vertical'\n{scheme}")
    with pytest.raises(UsageError, match=f"^--updates vertical: .*{words}"):
        check_compiled(compile(load(str(path), sizes), sizes))


def test_torchs_csv_has_no_versions(run, refused, base, tmp_path):
    path = tmp_path / "late.json"
    path.write_bytes(written(compiled((1, 1), 4)))
    message = refused(run("export", path, "--to", "torch-jobs", "-o", tmp_path / "late.csv"), 2)
    assert "versions" in message and not (tmp_path / "late.csv").exists()


@pytest.mark.parametrize("updates", UPDATES)
def test_a_chakra_node_depends_on_the_step_that_made_its_version(updates):
    program = compiled((2, 1), 8, updates)
    for rank in range(program.header.workers):
        listed = program.instructions(rank)
        made = {(i.stage, i.version): at for at, i in enumerate(listed) if i.op == Op.STEP}
        for i, edges in zip(listed, dependencies(program, rank), strict=True):
            if i.op in (Op.FWD, Op.BWD) and i.version:
                others = {at for key, at in made.items() if key != (i.stage, i.version)}
                every, for_order = edges
                needed = set(every) - set(for_order)
                assert made[i.stage, i.version] in needed and not others & needed
