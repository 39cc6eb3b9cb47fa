"""`--evict`: ranks that save many forwards lend some to ranks that save few; memory, time, and where messages stand."""

from __future__ import annotations

import pytest
from mutants import with_rows

from schedgen.analysis import analyse
from schedgen.checker import check
from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.compiler.recipe import recipe_of
from schedgen.ir.instructions import COMPUTE, Instruction, Kind, Op
from schedgen.ir.transport import read_transport
from schedgen.report.torch_csv import as_torch_csv
from schedgen.schemes import load
from schedgen.schemes.scheme import Sizes
from schedgen.simulator.machine import Machine
from schedgen.simulator.network import Level, Network
from schedgen.simulator.simulate import simulate
from schedgen.simulator.stats import stats
from schedgen.simulator.timeline import OFFLOAD_CAUSE
from schedgen.util.errors import RefusedFile, UsageError

SAVED = Machine(activation=0, weight=0, saved=10)


EIGHT = Sizes(8, 32)


def compiled(name="1f1b", sizes=EIGHT, *, evict=True, **options):
    program = compile(load(name, sizes), sizes, Options(evict=evict, **options))
    check(program, transport=options.get("in_order"))
    return program


# About (p + 1) / 2 + 1: no rank holds more than the fullest of a pair of ranks and the emptiest can share.
@pytest.mark.parametrize(
    ("name", "sizes", "prefetch", "most"),
    [
        ("1f1b", Sizes(4, 32), 1, [3, 3, 2, 3]),  # as with prefetch 0: messages have no job's time otherwise
        ("1f1b", Sizes(8, 32), 0, [5, 5, 5, 5, 4, 5, 4, 4]),
        ("1f1b", Sizes(8, 32), 1, [6, 6, 6, 5, 4, 3, 4, 5]),
        ("1f1b", Sizes(16, 32), 1, [10, 10, 10, 10, 10, 10, 10, 9, 8, 7, 8, 9, 9, 8, 9, 9]),
        ("1f1b", Sizes(4, 16, replicas=2), 1, [3, 3, 2, 3, 3, 3, 2, 3]),
        ("pipedream", Sizes(8, 32), 1, [6, 6, 6, 5, 4, 3, 4, 5]),
    ],
)
def test_no_rank_holds_more_than_its_pair_can_share(name, sizes, prefetch, most):
    plain, program = (compiled(name, sizes, prefetch=prefetch, evict=each) for each in (False, True))
    assert analyse(program).memory.saved.tolist() == most
    fewer = analyse(plain).memory.saved - most
    peaks = [simulate(each, None, SAVED).footprint.peak for each in (plain, program)]
    assert (peaks[0] - peaks[1]).tolist() == (10 * fewer).tolist()


def test_messages_have_the_time_of_so_many_jobs_as_prefetch_says():
    lists, named = [], {Op.SEND: "out", Op.RECV: "in", Op.FREE: "free", Op.FWD: "F", Op.BWD: "B"}
    for rank in (0, 7):
        part = compiled(sizes=Sizes(8, 9)).instructions(rank)
        lists.append(" ".join(f"{named[i.op]}{i.mb}" for i in part if i.op in COMPUTE or i.kind == Kind.SAVED))
    assert lists == [
        "F0 F1 F2 F3 out3 F4 out4 free3 F5 out5 free4 F6 free5 F7 B0 F8 B1 in3 B2 in4 B3 in5 B4 B5 B6 B7 B8",
        "in3 in4 in5 F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 out3 F7 free3 B7 out4 F8 free4 B8 out5 free5",
    ]


def test_messages_that_take_a_job_s_time_cost_little_and_slower_ones_are_waited_for():
    plain, program = compiled(evict=False), compiled()

    def run(program, beta):
        return simulate(program, None, SAVED.on(Network((Level("network", 0, 0.0, beta),))))

    assert run(program, 0).latency == run(plain, 0).latency == 117
    assert run(program, 0.05).latency < 1.05 * 117
    slow = run(program, 0.4)
    assert slow.latency > 117 and slow.idle[:, OFFLOAD_CAUSE].sum() > 0
    assert stats(program)["bounds"] == stats(plain)["bounds"]  # a forward that is lent is in flight, too


@pytest.mark.parametrize("name", ["one", "rank", "pair", "edge-kind", "pair+batch"])
def test_a_list_is_safe_on_a_transport_that_delivers_in_order(name):
    compiled(in_order=read_transport(f"in-order:{name}"))


def test_a_list_is_compiled_again_from_its_header():
    program = compiled()
    assert program.header.lowering["evict"] is True
    assert "--evict" in recipe_of(program).command
    with pytest.raises(UsageError, match="torch's lists have no OFFLOAD, or SEND of what"):
        as_torch_csv(program, messages=True)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("gpipe", {}, "--evict: no rank would hold less"),  # all are full
        ("1f1b", {"recompute": "all"}, "--evict: no rank would hold less"),
        ("1f1b", {"offload": "all"}, "--evict does not go with --offload"),
        ("1f1b", {"forward": True}, "--evict does not go with --forward"),
    ],
)
def test_evict_refuses(name, options, words):
    with pytest.raises(UsageError, match=words):
        compiled(name, Sizes(4, 8), **options)


def test_two_ranks_do_not_lend_each_other_what_neither_has():
    program = compiled(sizes=Sizes(2, 2), evict=False)
    new = [
        (int(program.bounds[rank]), rank, Instruction(op, Kind.SAVED, 0, 0, -1, -1 if op == Op.FREE else 1 - rank))
        for rank in (0, 1)
        for op in (Op.RECV, Op.SEND, Op.FREE)
    ]
    with pytest.raises(RefusedFile, match=r"RECV.*cycle with line \d+: rank 1: .*RECV.*rule 4"):
        check(with_rows(program, new))
