"""`--offload`: where copies stand in a list, what they save, and what they cost on the link to the host."""

from __future__ import annotations

import numpy as np
import pytest
from compiled import compiled

from schedgen.analysis import analyse
from schedgen.checker import check
from schedgen.ir.effects import Buffer
from schedgen.ir.instructions import COMPUTE, Kind, Op
from schedgen.schemes.scheme import Sizes
from schedgen.simulator.machine import Machine
from schedgen.simulator.memory_plan import host_plan
from schedgen.simulator.network import HostLink, Level, Network
from schedgen.simulator.simulate import simulate
from schedgen.simulator.timeline import CAUSES, OFFLOAD_CAUSE

SAVED = Machine(activation=0, weight=0, saved=10)


def checked(name, *sizes, **options):
    program = compiled(name, *sizes, **options)
    check(program)
    return program


def on_host(beta=0.0, **host):
    """A machine whose messages take no time, and copies beta a byte."""
    return SAVED.on(Network((Level("network", 0, 0.0, 0.0),), host=HostLink(beta=beta, **host)))


def letters(program, rank):
    """Jobs, and copies, of a rank."""
    named = {Op.FWD: "F", Op.BWD: "B", Op.BWD_I: "I", Op.BWD_W: "W", Op.OFFLOAD: "out", Op.RELOAD: "in"}
    return " ".join(
        f"{'free' if i.op == Op.FREE else named[i.op]}{i.mb}"
        for i in program.instructions(rank)
        if i.op in named or i.kind == Kind.SAVED
    )


def test_copies_have_the_time_of_so_many_jobs_as_prefetch_says():
    lists = [letters(checked("gpipe", 1, 4, offload=[(0, 0)], prefetch=ahead), 0) for ahead in range(2)]
    assert lists == ["F0 out0 free0 F1 F2 F3 in0 B0 B1 B2 B3", "F0 out0 F1 free0 F2 in0 F3 B0 B1 B2 B3"]


def test_a_split_backward_has_a_second_wait():
    program = checked("zb-v", 8, 16, offload="all")
    offloads = program.rows_of(Op.OFFLOAD)
    halves = program.job_rows(Op.BWD_I)[program.rows.stage[offloads], program.rows.mb[offloads]] < offloads
    assert halves.any() and not halves.all()
    plain = checked("zb-v", 8, 16)
    assert analyse(program).memory.saved.max() <= 4 < analyse(plain).memory.saved.max() == 8


@pytest.mark.parametrize(("name", "sizes"), [("1f1b", Sizes(8, 32)), ("interleaved-1f1b", Sizes(16, 32, 8))])
def test_what_is_offloaded_takes_memory_of_the_host_instead(name, sizes):
    plain, half = (checked(name, sizes, offload=o) for o in ((), range(sizes.stages // 2)))
    before, after = (analyse(program).memory.saved.max() for program in (plain, half))
    assert after <= before / 2
    footprint = simulate(half, None, SAVED).footprint
    peaks = np.zeros(8, np.int64)
    lives = analyse(half).lifetimes
    for stage in range(sizes.stages):  # slots serve a stage
        of_stage = (lives.buffer == Buffer.HOST) & (lives.size_column == stage)
        during = lives.timeline(10 * of_stage.astype(np.int64)).during
        most = np.zeros(8, np.int64)
        np.maximum.at(most, half.rows.rank, during)
        peaks += most
    assert footprint.host.tolist() == peaks.tolist()
    slot = host_plan(half).slot
    assert (slot >= 0).tolist() == (half.rows.op == Op.OFFLOAD).tolist()


def test_the_header_names_what_went():
    program = checked("1f1b", 4, 8, offload="all", recompute=[1])
    assert program.header.lowering["offload"] == [0]  # 1 is redone, 2 and 3 follow too soon


def test_a_link_that_carries_a_job_s_bytes_within_a_forward_costs_nothing_and_a_slower_one_is_waited_for():
    plain, program = (checked("1f1b", 8, 32, offload=o) for o in ((), "all"))
    latency = simulate(plain, None, on_host()).latency
    assert simulate(program, None, on_host(beta=0.1)).latency == latency  # 10 bytes in 1, as long as a forward
    slow = simulate(program, None, on_host(beta=0.2))
    assert slow.latency > latency and slow.idle[:, CAUSES.index("offload")].sum() > 0
    waiting = program.rows.op[slow.cause == OFFLOAD_CAUSE]
    assert set(waiting.tolist()) <= {Op.FREE, *COMPUTE}
    shared = simulate(program, None, on_host(beta=0.1, devices=4))
    assert shared.latency > latency


def test_copies_on_a_link_by_hand():
    """gpipe on one worker, F = 1, B = 2, copies take 3: out from 1 to 4 and 4 to 7; in from 8 to 11, from 10 to 14."""
    program = checked("gpipe", 1, 3, offload=[(0, 0)], prefetch=0)
    run = simulate(program, {"F": 1, "B": 2}, on_host(beta=0.3))
    # F0 1; its copy leaves by 4, FREE waits; F1, F2 end at 6; back by 9, B0 waits; then 6 for the backwards.
    assert run.latency == 4 + 2 + 3 + 3 * 2
    use = run.link_use()
    assert use.names == ["host memory 0 out", "host memory 0 in"]
    assert (use.start.tolist(), use.length.tolist()) == ([1, 6], [3, 3])
    assert run.idle[0, OFFLOAD_CAUSE] == 3 + 3


def test_the_state_of_three_units_at_most_is_on_the_device():
    sizes = Sizes(4, 4, 4)._replace(shards=(4,))
    program = checked("fsdp", sizes, offload_optimizer=True)
    moves = [
        (i.op.name if isinstance(i.op, Op) else Op(i.op).name, i.stage)
        for i in program.instructions(1)
        if i.kind == Kind.OPT or i.op in (Op.NORM, Op.STEP)
    ]
    assert moves[:8] == [
        ("RELOAD", 0), ("NORM", -1), ("RELOAD", 1), ("STEP", 0), ("OFFLOAD", 0), ("RELOAD", 2), ("STEP", 1),
        ("OFFLOAD", 1),
    ]  # fmt: skip
    assert moves[-2:] == [("FREE", 2), ("FREE", 3)]
    assert analyse(program).memory.optimizer.tolist() == [3] * 4


def test_the_host_has_the_state_and_copies_take_their_time_on_its_link():
    """Stages of 8 bytes with 16 of state, a byte of copies in 1: the first comes while NORM waits, the last goes."""
    machine = on_host(1.0)._replace(weight=8, owned=24, saved=0)
    plain, moved = (checked("1f1b", 4, 4, offload_optimizer=chosen) for chosen in (False, True))
    before, after = (simulate(program, None, machine) for program in (plain, moved))
    assert (after.footprint.host - before.footprint.host).tolist() == [16] * 4
    assert (before.footprint.owned - after.footprint.owned).tolist() == [16] * 4
    assert before.end.max() + 16 <= after.end.max() <= before.end.max() + 32
    two = checked("interleaved-1f1b", 8, 4, 4, offload_optimizer=True)
    assert simulate(two, None, machine).end.max() == simulate(two, None, SAVED).end.max() + 3 * 16
