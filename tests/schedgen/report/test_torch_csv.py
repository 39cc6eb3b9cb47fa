"""torch's CSV of compute actions, read and written: the same order, the same schedule; and what is refused."""

from __future__ import annotations

import json

import pytest
from torch_schedules import dump, schedule

from schedgen.schemes import SCHEMES


@pytest.fixture
def actions(golden, run, tmp_path):
    """A golden schedule's CSV."""

    def actions(scheme):
        (tmp_path / "golden.json").write_text(golden[scheme])
        path = tmp_path / "golden.csv"
        # The golden 1F1B has --prefetch 0.
        said = "schedgen: note: torch's CSV has jobs alone: it loses its prefetch\n" if scheme == "1f1b" else ""
        assert run("export", tmp_path / "golden.json", "--to", "torch-jobs", "-o", path) == (0, "", said)
        return path

    return actions


def numbers(run, path, *options):
    result = run("stats", path, "--json", *options)
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_a_row_a_rank_and_a_cell_a_job(actions):
    rows = actions("1f1b").read_text().splitlines()
    assert rows[3] == "3F0,3B0,3F1,3B1,3F2,3B2,3F3,3B3,3F4,3B4,3F5,3B5,3F6,3B6,3F7,3B7"
    assert len(rows) == 4
    assert actions("zb-h1").read_text().splitlines()[3].startswith("3F0,3I0,3F1,3I1,3F2,3I2,3F3,3I3,3W0,3F4")


# A CSV puts weights where jobs run, so schemes that fetch weights get other messages; it has no weight versions.
OTHER = ("fsdp", "fslpp", "pipedream", "pipedream-2bw")


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name not in OTHER])
def test_what_is_written_is_read_as_the_same_schedule(scheme, actions, golden, run, tmp_path):
    path, again = actions(scheme), tmp_path / "again.json"
    before = numbers(run, tmp_path / "golden.json")
    assert run("compile", path, "-o", again) == (0, "", "")
    assert run("check", again).code == 0
    after = numbers(run, again)
    for what in ("latency", "bubble", "peak_activations", "messages", "gap"):
        assert after[what] == before[what], what
    assert after["scheme"] == {"name": "golden", **{key: before["scheme"][key] for key in list(before["scheme"])[1:4]}}
    assert run("export", again, "--to", "torch-jobs", "-o", "-").out == path.read_text()


# torch's schedules, and the names of those that are also schemes of ours.
TORCH = {
    "ScheduleInterleaved1F1B": "interleaved-1f1b",
    "ScheduleLoopedBFS": "breadth-first",
    "ScheduleInterleavedZeroBubble": "interleaved-zb",
    "ScheduleZBVZeroBubble": "zb-v",
    "ScheduleDualPipeV": "dualpipe-v",
}


@pytest.mark.parametrize("name", TORCH)
def test_torchs_own_csv_reads_checks_and_simulates(name, golden, run, tmp_path):
    file, ours = tmp_path / "theirs.json", tmp_path / "ours.json"
    assert run("compile", dump(name, 4, 8, tmp_path), "-o", file) == (0, "", "")
    assert run("check", file).code == run("simulate", file, "--alpha", "0.1").code == 0
    result = numbers(run, file)
    assert (result["scheme"]["workers"], result["scheme"]["stages"], result["scheme"]["microbatches"]) == (4, 8, 8)
    ours.write_text(golden[TORCH[name]])
    expected = numbers(run, ours)
    for what in ("latency", "bubble", "own_window_bubble", "peak_activations", "messages"):
        assert result[what] == expected[what], what
    if TORCH[name] != "breadth-first":  # whose backwards torch takes last microbatch first
        theirs, of_ours = (json.loads(path.read_text())["programs"] for path in (file, ours))
        assert theirs == of_ours


@pytest.mark.parametrize("name", TORCH)
def test_torch_reads_what_is_written_as_its_own(name, run, tmp_path):
    file, back = tmp_path / "theirs.json", tmp_path / "back.csv"
    assert run("compile", dump(name, 4, 8, tmp_path), "-o", file) == (0, "", "")
    assert run("export", file, "--to", "torch-jobs", "-o", back) == (0, "", "")
    torch_schedule = schedule(name, 4, 8)
    own = dict(torch_schedule.pipeline_order)
    torch_schedule._load_csv(back)
    for rank, row in torch_schedule.pipeline_order.items():
        assert [str(action) for action in flat(row)] == [str(action) for action in flat(own[rank])]
        assert pairs(row) == [pair for pair in pairs(own[rank]) if pair[0].stage_index not in (3, 7)]


def flat(row):
    for action in row:
        if action is not None:
            yield from action.sub_actions or [action]


def pairs(row):
    """The actions of each cell with two; the outputs of stages 3 and 7 of a V over 4 ranks are sent to no rank."""
    return [action.sub_actions for action in row if action is not None and action.sub_actions]


def test_torchs_lowered_form_reads_as_its_compute(run, tmp_path):
    path = tmp_path / "lowered.csv"
    path.write_text('0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD\n1RECV_F0, 1F0,"",1B0,1SEND_B0,1RESHARD\n')
    assert run("compile", path, "-o", tmp_path / "x.json").code == 0
    assert run("export", tmp_path / "x.json", "--to", "torch-jobs", "-o", "-").out == "0F0,0B0\n1F0,1B0\n"


def test_in_the_csv_of_torch_2_4_a_backward_beside_a_w_is_the_half_i(run, tmp_path, actions):
    path, old = actions("zb-h1"), tmp_path / "old" / "golden.csv"
    old.parent.mkdir()
    old.write_text(path.read_text().replace("I", "B"))
    assert run("compile", old, "-o", tmp_path / "old.json") == (0, "", "")
    assert run("compile", path, "-o", tmp_path / "new.json") == (0, "", "")
    assert (tmp_path / "old.json").read_bytes() == (tmp_path / "new.json").read_bytes()


def test_overlapped_actions_run_one_behind_the_other(run, tmp_path):
    path = tmp_path / "overlap.csv"
    path.write_text("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
    assert run("compile", path, "-o", tmp_path / "x.json").code == 0
    assert run("export", tmp_path / "x.json", "--to", "torch-jobs", "-o", "-").out == "0F0,0F1,0B0,0B1\n"


def test_a_pairs_forward_is_sent_after_both(run, tmp_path):
    path = tmp_path / "pair.csv"
    path.write_text("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1\n")
    assert run("compile", path, "-o", tmp_path / "x.json").code == 0
    assert run("export", tmp_path / "x.json", "--to", "torch-jobs", "-o", "-").out == path.read_text()
    assert numbers(run, tmp_path / "x.json")["latency"] == 11  # stage 1 gets x.0.1 at 6, after the pair, not at 2
    path.write_text("(0F0;1F0)OVERLAP_F_B,(1B0;0B0)OVERLAP_F_B\n")  # the next job may be its reader
    assert run("compile", path, "-o", tmp_path / "x.json").code == 0


def test_a_rank_may_have_nothing_to_do(run, tmp_path):
    path = tmp_path / "idle.csv"
    path.write_text("0F0,0B0\n\n1F0,1B0\n")
    assert run("compile", path, "-o", tmp_path / "x.json").code == 0
    assert numbers(run, tmp_path / "x.json")["scheme"]["workers"] == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no action"),
        ("0F0,0B0\n0G0\n", ":2: cell 1: '0G0' is not an action"),
        ("0F0,0B0x\n", ":1: cell 2: '0B0x' is not an action"),
        ("(0F0;0Q0)OVERLAP_F_B\n", "'0Q0' is not an action"),
        ('"0F0\n', "not CSV"),
        ("0F0\n", "no B of stage 0 and microbatch 0"),
        ("0F0,0B0,0F0\n", "F of stage 0 and microbatch 0 is listed twice"),
        ("0F0,0I0\n", "no W of stage 0 and microbatch 0"),
        ("0F0,0B0,2F0,2B0\n", "3 stages and 1 microbatch, but no F of stage 1 and microbatch 0"),
        ("999999999F999999999,0B0\n", "but no F of stage 0 and microbatch 0"),
    ],
)
def test_what_is_no_such_file_is_refused(text, words, run, refused, tmp_path):
    path = tmp_path / "wrong.csv"
    path.write_text(text)
    message = refused(run("compile", path, "-o", "-"), 1)
    assert words in message and str(path) in message


def test_an_order_that_cannot_run_names_the_jobs_that_wait(run, refused, tmp_path):
    path = tmp_path / "stuck.csv"
    path.write_text("0B0,0F0\n")
    assert "B(0, 0) on worker 0 waits for F(0, 0)" in refused(run("compile", path, "-o", "-"), 2)


def test_halves_of_a_backward_belong_to_one_worker(run, refused, tmp_path):
    path = tmp_path / "apart.csv"
    path.write_text("0F0,0I0\n0W0\n")
    assert "on different workers" in refused(run("compile", path, "-o", "-"), 2)


def test_sizes_are_the_files_own(actions, run, refused, tmp_path):
    path = actions("1f1b")
    assert run("compile", path, "--stages", "4", "--microbatches", "8", "--workers", "4", "-o", "-").code == 0
    for option, value in (
        ("stages", 8),
        ("microbatches", 4),
        ("workers", 2),
        ("groups", 1),
        ("chunks", 1),
        ("shards", 2),
    ):
        message = refused(run("compile", path, f"--{option}", value, "-o", "-"), 2)
        assert f"has its own sizes: leave --{option} {value} out" in message
    assert "No such file" in refused(run("compile", tmp_path / "none.csv", "-o", "-"), 1)


def test_what_no_action_says_is_named(run, graph_file, refused, tmp_path):
    """A schedule that its CSV does not describe fully; a fully described one gets no such note (above)."""
    graph = graph_file(stages=4, edges=[[0, 1], [0, 2], [1, 2], [2, 3]], tied=[[0, 3]])
    sizes = ("--microbatches", 4, "-o", tmp_path / "s.json")
    for options, words in (
        (("1f1b", "--graph", graph), "the stage graph and ties"),
        (("fsdp", "--stages", 4), "weights away from their jobs"),
        (("fsdp", "--stages", 4, "--shards", 2), "weights away from their jobs"),
        (("1f1b", "--stages", 4, "--recompute", "0.1"), "forwards that are redone"),
        (("1f1b", "--stages", 4, "--prefetch", 2), "its prefetch"),
    ):
        assert run("compile", *options, *sizes).code == 0
        code, out, err = run("export", tmp_path / "s.json", "--to", "torch-jobs", "-o", "-")
        assert (code, err) == (0, f"schedgen: note: torch's CSV has jobs alone: it loses {words}\n") and "0F0" in out
