"""torch's lists, read and written, with messages and without: the same order, the same schedule; what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from examples import further
from torch_schedules import dump, schedule

from schedgen.cli.read_schedules import checked
from schedgen.ir.instructions import COMPUTE, Op

DATA = Path(__file__).parents[2] / "data"
REPORTED = DATA / "torch-172668.csv"  # the lists in pytorch issue 172668
# The schemes whose stages are a chain, each on one rank with its weights, and updated once.
PIPELINES = ("1f1b", "breadth-first", "dualpipe-v", "hanayo", "interleaved-zb", "zb-v")
PIPELINES += further("depth-first", "gpipe", "interleaved-1f1b", "v-half", "v-min", "zb-h1", "zb-h2")


@pytest.fixture
def actions(golden, run, tmp_path):
    """A golden schedule as torch's list."""

    def actions(scheme, form="torch-jobs"):
        (tmp_path / "golden.json").write_text(golden[scheme])
        path = tmp_path / "golden.csv"
        assert run("export", tmp_path / "golden.json", "--to", form, "-o", path) == (0, "", "")
        return path

    return actions


def numbers(run, path, *options):
    result = run("stats", path, "--json", *options)
    assert result.code == 0, result.err
    return json.loads(result.out)


def jobs_and_messages(path):
    """By rank, the instructions that torch's lists have, too."""
    program = checked(str(path))
    kept = program.rows.take(program.rows_of(*COMPUTE, Op.SEND, Op.RECV))
    return np.stack(kept.columns()).tolist()


def test_a_row_a_rank_and_a_cell_a_job(actions):
    rows = actions("1f1b").read_text().splitlines()
    assert rows[3] == "3F0,3B0,3F1,3B1,3F2,3B2,3F3,3B3,3F4,3B4,3F5,3B5,3F6,3B6,3F7,3B7"
    assert len(rows) == 4
    assert actions("zb-h1").read_text().splitlines()[3].startswith("3F0,3I0,3F1,3I1,3F2,3I2,3F3,3I3,3W0,3F4")
    with_messages = actions("1f1b", "torch").read_text().splitlines()[3]  # the golden 1F1B has --prefetch 0
    assert with_messages.startswith("3UNSHARD,3RECV_F0,3RECV_F1,3F0,3B0,3SEND_B0,3F1,3B1,3SEND_B1,3RECV_F2,3F2")
    assert with_messages.endswith("3B7,3SEND_B7,3REDUCE_GRAD,3RESHARD")


@pytest.mark.parametrize("scheme", PIPELINES)
def test_what_is_written_is_read_as_the_same_schedule(scheme, actions, run, tmp_path):
    path, again = actions(scheme), tmp_path / "again.json"
    before = numbers(run, tmp_path / "golden.json")
    assert run("compile", path, "-o", again) == (0, "", "")
    assert run("check", again).code == 0
    after = numbers(run, again)
    for what in ("latency", "bubble", "peak_activations", "messages", "gap"):
        assert after[what] == before[what], what
    assert after["scheme"] == {"name": "golden", **{key: before["scheme"][key] for key in list(before["scheme"])[1:4]}}
    assert run("export", again, "--to", "torch-jobs", "-o", "-").out == path.read_text()


@pytest.mark.parametrize("scheme", PIPELINES)
def test_messages_are_written_and_read_in_their_places(scheme, actions, run, tmp_path):
    path, kept = actions(scheme, "torch"), tmp_path / "kept.json"
    assert run("compile", path, "-o", kept).code == 0
    assert jobs_and_messages(kept) == jobs_and_messages(path) == jobs_and_messages(tmp_path / "golden.json")
    assert run("export", kept, "--to", "torch", "-o", "-").out == path.read_text()


# torch's schedules, and the names of those that are also schemes of ours.
TORCH = {
    "ScheduleInterleaved1F1B": "interleaved-1f1b",
    "ScheduleLoopedBFS": "breadth-first",
    "ScheduleInterleavedZeroBubble": "interleaved-zb",
    "ScheduleZBVZeroBubble": "zb-v",
    "ScheduleDualPipeV": "dualpipe-v",
}


@pytest.mark.parametrize("name", TORCH)
def test_torchs_own_jobs_are_the_schedule_of_the_same_name(name, golden, run, tmp_path):
    file, ours = tmp_path / "theirs.json", tmp_path / "ours.json"
    assert run("compile", dump(name, 4, 8, tmp_path, "compute_only"), "-o", file) == (0, "", "")
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
    back, torch_schedule = tmp_path / "back.csv", schedule(name, 4, 8)
    own = dict(torch_schedule.pipeline_order)
    listed = run("export", dump(name, 4, 8, tmp_path, "compute_only"), "--to", "torch-jobs", "-o", back)
    assert listed.code == 0 and "has jobs alone: its messages are" in listed.err
    torch_schedule._load_csv(back)
    for rank, row in torch_schedule.pipeline_order.items():
        assert [str(action) for action in flat(row)] == [str(action) for action in flat(own[rank])]
        assert pairs(row) == [pair for pair in pairs(own[rank]) if pair[0].stage_index not in (3, 7)]
    own = dict(schedule(name, 4, 8).pipeline_order_with_comms)
    listed = run("export", dump(name, 4, 8, tmp_path), "--to", "torch", "-o", back)
    assert (listed.code, "8 UNSHARD, 8 RESHARD, 8 REDUCE_GRAD are left out: " in listed.err) == (0, True)
    torch_schedule._load_csv(back, format="compute_comms")
    for rank, row in torch_schedule.pipeline_order_with_comms.items():
        assert list(map(str, of_microbatches(row))) == list(map(str, of_microbatches(own[rank])))
        assert pairs(row) == [pair for pair in pairs(own[rank]) if pair[0].stage_index not in (3, 7)]


def flat(row):
    for action in row:
        if action is not None:
            yield from action.sub_actions or [action]


def of_microbatches(row):
    return [action for action in flat(row) if action.microbatch_index is not None]


def pairs(row):
    """The actions of each cell with two; the outputs of stages 3 and 7 of a V over 4 ranks are sent to no rank."""
    return [action.sub_actions for action in row if action is not None and action.sub_actions]


def test_a_reported_list_is_proved_simulated_and_drawn_with_its_messages(run, tmp_path):
    said = run("check", REPORTED)
    assert said.code == 0 and "2 workers, 76 instructions: every job once, no deadlock" in said.out
    assert numbers(run, REPORTED)["messages"] == 12
    assert run("draw", REPORTED).code == run("simulate", REPORTED, "--alpha", "0.1").code == 0
    kept, anew = tmp_path / "torch-172668.json", tmp_path / "anew.json"
    assert run("compile", REPORTED, "--cost", "F=1,B=2", "--stages", 4, "-o", kept).code == 0
    same = run("diff", kept, REPORTED)
    assert (same.code, same.out) == (0, "")
    said = run("compile", REPORTED, "--prefetch", 2, "-o", anew)
    assert (said.code, f"--prefetch replaces the messages of {REPORTED} by schedgen's" in said.err) == (0, True)
    assert jobs_and_messages(anew) != jobs_and_messages(kept)
    assert "prefetch: 1 -> 2" in run("diff", REPORTED, anew, "--jobs").out
    sizes = ("--stages", 4, "--microbatches", 2, "--workers", 2)
    assert f"{REPORTED} is compared with the messages of schedgen" in run("compare", REPORTED, *sizes).err


def test_what_torch_sends_is_kept_to_the_end_or_to_its_wait(run, tmp_path):
    path = tmp_path / "waits.csv"
    for waits in (False, True):
        path.write_text(REPORTED.read_text().replace("0SEND_F0,2RECV", f"0SEND_F0,{'0WAIT_SEND_F0,' * waits}2RECV"))
        rows = [row for row in checked(str(path)).instructions(0) if row.op != Op.RECV]
        frees = [k for k, row in enumerate(rows) if row.op == Op.FREE and row.buffer == "x.0.0"]
        after = {row.op for row in rows[frees[0] + 1 :]}
        assert len(frees) == 1 and (frees[0] == 2 if waits else after == {Op.FREE})


def test_receive_slots_are_those_that_torch_counts(run, tmp_path):
    theirs = numbers(run, dump("ScheduleZBVZeroBubble", 4, 10, tmp_path))
    assert (theirs["receive_slots_apart"], theirs["receive_slots"]) == (43, 33)  # 43: pytorch pull request 196465
    assert sum(worker["receive_slots"] for worker in theirs["workers"]) == 33


def test_a_pairs_forward_is_sent_after_both(run, tmp_path):
    path = tmp_path / "pair.csv"
    path.write_text("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1\n")
    assert run("compile", path, "-o", tmp_path / "x.json").code == 0
    assert run("export", tmp_path / "x.json", "--to", "torch-jobs", "-o", "-").out == path.read_text()
    assert numbers(run, tmp_path / "x.json")["latency"] == 11  # stage 1 gets x.0.1 at 6, after the pair, not at 2
    path.write_text("(0F0;1F0)OVERLAP_F_B,(1B0;0B0)OVERLAP_F_B\n")  # the next job may be its reader
    assert run("compile", path, "-o", tmp_path / "x.json").code == 0


def test_jobs_alone_may_be_anywhere(run, tmp_path):
    path = tmp_path / "apart.csv"
    path.write_text("0F0,0F1\n0B0,0B1\n")  # the second rank redoes the forwards
    said = run("check", path)
    assert (said.code, "2 workers" in said.out, "has jobs alone" in said.err) == (0, True, True)


def test_a_rank_may_have_nothing_to_do(run, refused, tmp_path):
    path = tmp_path / "idle.csv"
    path.write_text("0F0,0B0\n\n1F0,1B0\n")
    assert run("compile", path, "-o", tmp_path / "x.json").code == 0
    assert numbers(run, tmp_path / "x.json")["scheme"]["workers"] == 3
    assert "no rank without a stage, as rank 1 is" in refused(
        run("export", tmp_path / "x.json", "--to", "torch", "-o", "-"), 2
    )


def lists(*changes):
    """The reported lists, with some of their text replaced."""
    text = REPORTED.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


NOTHING = "is no action of torch's, such as 2F0, 2SEND_F0, 2UNSHARD or (2F1;3B0)OVERLAP_F_B"
DIGITS = "has a number with leading zeros or too many digits"
UNDEFINED = "is not defined on this rank before this line (rule 2: every operand is defined before it is used)"
WRONG = {
    "": "it has no action of the form 2F0",
    "0F0,0B0\n0G0\n": f"rank 1, cell 1: '0G0' {NOTHING}",
    "0F0,0B0x\n": f"rank 0, cell 2: '0B0x' {NOTHING}",
    "0F0,,0b0\n": f"rank 0, cell 3: '0b0' {NOTHING}",
    "(0F0;0Q0)OVERLAP_F_B\n": f"rank 0, cell 1: '(0F0;0Q0)OVERLAP_F_B' {NOTHING}",
    "0F0,0B٣\n": f"rank 0, cell 2: '0B٣' {NOTHING}",
    '"0F0\n': "not CSV: unexpected end of data",
    '"0F0\n0F1",0B0\n': f"rank 0, cell 1: '0F0\\n0F1' {NOTHING}",
    "0F0,0B00\n": f"rank 0, cell 2: '0B00' {DIGITS}",
    f"0F0,0B{2**63}\n": f"rank 0, cell 2: '0B{2**63}' {DIGITS}",
    "0F0\n": "rank 0: of 1 microbatch, stage 0 lacks B0",
    "0F0,0B0,0F0\n": "rank 0, cell 3: 0F0: this job is listed twice",
    "0F0,0I0\n": "rank 0: of 1 microbatch, stage 0 lacks W0",
    "0F0,0B0,2F0,2B0\n": "rank 0, cell 3: 2F0: there is no job of stage 1",
    "999999999F999999999,0B0\n": "rank 0, cell 1: 999999999F999999999: there is no job of stage 1",
    "0F1,0B0,0F2,0B1\n": "rank 0, cell 3: of 2 microbatches, stage 0 has an extra F2 and lacks F0",
    "0B0,0F0\n": "n stops the schedule: F(0, 0) on worker 0 waits for B(0, 0), B(0, 0) on worker 0 waits for F(0, 0)",
    lists((",0RESHARD", ",0RESH")): f"rank 0, cell 26: '0RESH' {NOTHING}",
    lists(("2SEND_B1,", "")): (
        'rank 1, cell 18: {"op": "RECV", "buf": "g.1.1", "from": 0}: rank 0 never sends this '
        "(rule 3: every SEND has its RECV or FETCH_W, in order)"
    ),
    lists(("3RECV_F0,", "")): f'rank 1, cell 9: {{"op": "FWD", "stage": 3, "mb": 0}}: x.2.0 {UNDEFINED}',
    lists(
        ("0SEND_F0,", ""), ("1RECV_F0,", "")
    ): f'rank 1, cell 3: {{"op": "FWD", "stage": 1, "mb": 0}}: x.0.0 {UNDEFINED}',
    lists(("2SEND_F1", "2SEND_F1,2SEND_F1")): (
        'rank 0, cell 13: {"op": "SEND", "buf": "x.2.1", "to": 1}: rank 1 never receives this '
        "(rule 3: every SEND has its RECV or FETCH_W, in order)"
    ),
    lists(("3SEND_B0,", "3SEND_B0,3SEND_F0,")): "rank 1, cell 14: 3SEND_F0: its stage has no neighbour there",
    lists(("2SEND_B0", "2SEND_B9")): "rank 0, cell 15: 2SEND_B9: there is no such microbatch in 0..1",
    lists(("2SEND_B0", "4SEND_B0")): "rank 0, cell 15: 4SEND_B0: there is no such stage in 0..3",
    lists(("2SEND_B0", "1SEND_B0")): "rank 0, cell 15: 1SEND_B0: its stage is on rank 1: cell 4 has a job of it",
    lists((",2B1,", ","), ("3RESHARD,", "3RESHARD,2B1,")): (
        "rank 1, cell 21: 2B1: its stage is on rank 0: cell 9 has a job of it"
    ),
    lists(("0F0,", "0WAIT_SEND_F0,0F0,")): f'rank 0, cell 3: {{"op": "FREE", "buf": "x.0.0"}}: x.0.0 {UNDEFINED}',
    lists(
        ("0F0,0SEND_F0", "0SEND_F0,0F0")
    ): f'rank 0, cell 3: {{"op": "SEND", "buf": "x.0.0", "to": 1}}: x.0.0 {UNDEFINED}',
    lists(("3RECV_F0,3F0,3RECV_F1,", "3RECV_F1,3RECV_F0,3F0,")): (
        'rank 1, cell 9: {"op": "RECV", "buf": "x.2.1", "from": 0}: the next message of this kind from rank 0 is sent '
        'by rank 0, cell 10: {"op": "SEND", "buf": "x.2.0", "to": 1} '
        "(rule 3: every SEND has its RECV or FETCH_W, in order)"
    ),
    lists(("2RECV_F0,0F1,0SEND_F1,", "0F1,0SEND_F1,2RECV_F0,"), ("1SEND_F0,1RECV_F1", "1RECV_F1,1SEND_F0")): "",
    lists(("2RECV_F0,0F1,0SEND_F1,", "0F1,0SEND_F1,2RECV_F0,")): (
        'rank 0, cell 6: {"op": "SEND", "buf": "x.0.1", "to": 1}: waits forever, in a cycle with '
        'rank 1, cell 5: {"op": "SEND", "buf": "x.1.0", "to": 0}; behind them wait '
        '{"op": "RECV", "buf": "x.1.0", "from": 1}, {"op": "RECV", "buf": "x.0.1", "from": 0} '
        "(rule 4: no deadlock, even if every SEND blocks until it is matched)"
    ),
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_such_list_is_refused(text, run, refused, tmp_path):
    path = tmp_path / "wrong.csv"
    path.write_text(text)
    if not WRONG[text]:  # messages that the rendezvous allows
        assert run("check", path).code == 0
        return
    assert refused(run("check", path), 1) == f"schedgen: {path}: {WRONG[text]}"


def test_a_table_of_torchs_that_is_no_list_is_named(refused, run, tmp_path):
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    rows = get_schedule_ops("1F1B", 4, 10, 1)  # torch's Schedule1F1B lists F1 to F10 on the last rank
    path = tmp_path / "1f1b.csv"
    path.write_text("\n".join(",".join("" if action is None else str(action) for action in row) for row in rows))
    assert "rank 3, cell" in (said := refused(run("check", path), 1))
    assert said.endswith(": of 10 microbatches, stage 3 has an extra F10 and lacks F0")


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


def test_what_torchs_lists_cannot_say_is_refused_by_name(run, graph_file, refused, tmp_path):
    graph = graph_file(stages=4, edges=[[0, 1], [0, 2], [1, 2], [2, 3]])
    sizes = ("--microbatches", 8, "-o", tmp_path / "s.json")
    for options, words in (
        (("1f1b", "--graph", graph), "torch's lists have no stage graph other than a chain"),
        (("1f1b", "--graph", graph_file(stages=4, tied=[[0, 3]])), "torch's lists have no ties between stages"),
        (("fsdp", "--stages", 4), "torch's lists have no FETCH_W, which brings weights to their jobs"),
        (("fsdp", "--stages", 4, "--shards", 2), "torch's lists have no FETCH_W, which brings weights to their jobs"),
        (("chimera", "--stages", 4), "torch's lists have no stage on several ranks, as stage 0 is"),
        (("1f1b", "--stages", 4, "--recompute", "0.1"), "torch's lists have no RECOMPUTE"),
        (("pipedream", "--stages", 4), "torch's lists have no versions"),
        (("1f1b", "--stages", 4, "--forward"), "torch's lists have no forwards without backwards"),
    ):
        assert run("compile", *options, *sizes).code == 0
        assert words in refused(run("export", tmp_path / "s.json", "--to", "torch", "-o", "-"), 2)


def test_messages_that_torch_would_mix_up_are_refused(run, tmp_path):
    path = tmp_path / "mixed.csv"
    path.write_text(lists(("2RECV_F1,2F0", "2RECV_B0,2RECV_F1,2F0"), ("2SEND_F1,2RECV_B0", "2SEND_F1")))
    assert run("check", path).code == 0  # each kind of message keeps its order
    code, _, said = run("export", path, "--to", "torch", "-o", "-")
    assert (
        code == 2
        and "rank 0 would receive x.1.1 of rank 1 as g.2.0, since torch matches messages by their order alone" in said
    )
