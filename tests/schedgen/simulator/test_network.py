"""Networks: messages and sums share links and cards, no busy receiver holds up others, devices differ."""

from __future__ import annotations

import numpy as np
import pytest
from compiled import compiled
from drawn_programs import programs
from event_simulation import simulate as simulate_again
from hypothesis import given
from hypothesis import strategies as st

from schedgen.compiler.compile import compile
from schedgen.compiler.options import Options
from schedgen.ir.instructions import Op
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.simulator.machine import Machine
from schedgen.simulator.network import HostLink, Level, Network, topology
from schedgen.simulator.simulate import MESSAGES, simulate


@st.composite
def networks(draw, workers):
    """Up to three levels, cards or none, devices of any speed; every sum's pieces are whole numbers of bytes."""
    per_host = draw(st.integers(1, 3))
    sizes = [per_host, per_host * draw(st.integers(2, 3)), 0][3 - draw(st.integers(1, 3)) :]
    levels = []
    for k, devices in enumerate(sizes):
        alpha = draw(st.sampled_from([0.0, 0.5, 3.0, ((0.0, 0.5), (8.0, 2.0))]))
        card = draw(st.sampled_from([0.0, 0.125, 0.5])) if k else 0.0
        levels.append(Level(f"level {k}", devices, alpha, draw(st.sampled_from([0.0, 0.25, 0.5])), card))
    speed = draw(st.one_of(st.just(1.0), st.tuples(*[st.sampled_from([0.5, 1.0])] * workers)))
    host = HostLink(*(draw(st.sampled_from([0.0, 0.25, 2.0])) for _ in range(2)), draw(st.integers(1, 3)))
    return Network(tuple(levels), speed, host=host)


@given(st.data())
def test_a_second_simulation_agrees(data):
    """Of random programs on random networks: every start and every arrival."""
    program = data.draw(programs())
    machine = Machine(activation=data.draw(st.sampled_from([1, 60])), weight=120, saved=3, step=0.5)
    machine = machine.on(data.draw(networks(program.header.workers)))
    if machine.network.is_free:
        return
    run = simulate(program, program.header.cost, machine)
    start, arrival = simulate_again(program, program.header.cost, machine)
    used = run.link_use()
    ends, same = used.start + used.length, np.diff(used.link) == 0
    assert (used.start[1:][same] >= ends[:-1][same] - 1e-9).all()  # one at a time on each link
    assert run.start.tolist() == start.tolist()
    assert run.arrival[program.rows_of(*MESSAGES)].tolist() == arrival.tolist()


@pytest.mark.parametrize(("stages", "end"), [(1, 15), (8, 13.25), (64, 13.03125)])
def test_sums_of_different_stages_share_links(stages, end):
    """8 GB on 4 workers at 1 GB/s take 12 s in any cut: jobs of 3 s hide at most the sums before the last stage's."""
    program = compiled("ddp", Sizes(stages, 4, 4))
    cost = {"F": 1 / stages, "B": 2 / stages}
    assert simulate(program, cost, Machine(beta=1e-9, weight=8 * 10**9 // stages)).end.max() == pytest.approx(end)


@pytest.mark.parametrize(("scheme", "shards", "end"), [("ddp", None, 38), ("fsdp", (8,), 60.75)])
def test_a_busy_receiver_holds_up_no_other_message(scheme, shards, end):
    """DDP and ZeRO-3 on 8 workers: 28 s of sums after the jobs' 24; 42 s of messages through each link."""
    program = compiled(scheme, Sizes(8, 8, 8, shards=shards))
    assert simulate(program, {"F": 1, "B": 2}, Machine(beta=0.5 / 128, weight=512)).end.max() == end


def test_an_idle_link_takes_the_message_whose_path_is_free():
    """x.0 goes to workers 1 and 2; worker 1 still receives 10 bytes from worker 3, and worker 2 waits for nobody."""
    place = np.array([0, 3, 1, 2])
    scheme = Scheme(
        "fork", 4, lambda s, b, d: (place[s] + 0 * b, place[s] + 0 * b), lambda s, b, d: 0 * s + b + 10 * d,
        "fork", "greedy", edges=((0, 2), (1, 2), (0, 3), (2, 3)),
    )  # fmt: skip
    program = compile(scheme, Sizes(4, 1, 4), Options(forward=True))
    run = simulate(program, {"F": [2, 1, 1, 1]}, Machine(beta=1, activation=[1, 10, 1, 1]))
    assert run.arrival[program.is_one_of(Op.SEND) & (program.rows.to == 2) & (program.rows.stage == 0)] == 2 + 1


def test_devices_differ():
    """The fast one of two workers, of speeds 1 and 1/2, takes two of three microbatches: neither waits."""
    scheme = Scheme("uneven", 2, lambda s, b, d: (b // 2, b // 2), lambda s, b, d: 2 * b + d, "uneven", "strict")
    machine = Machine().on(Network((Level("host", 0, 0.0, 0.0),), (1.0, 0.5)))
    assert simulate(compile(scheme, Sizes(1, 3, 2)), {"F": 4, "B": 8}, machine).latency == 24


def test_a_host_s_card_is_shared():
    """Two hosts of two: each sum of n bytes sends 2 n through a card, twice what two ranks alone would send."""
    program = compiled("ddp", Sizes(1, 4, 4))
    apart = Network((Level("host", 2, 0, 0), Level("network", 0, 0, 1)))
    runs = [
        simulate(program, {"F": 1, "B": 2}, Machine(weight=60).on(network))
        for network in (topology(2, 2, [0], [0, 1]), apart)
    ]
    assert [run.end.max() for run in runs] == [3 + 2 * 60, 3 + 2 * 60 / 2]
    used = runs[0].link_use()
    ranks = [f"{rank} {way}" for way in ("out", "in") for rank in range(4)]
    assert used.names == [*ranks, "host 0 out", "host 1 out", "host 0 in", "host 1 in"]
    busy = np.bincount(used.link, used.length)
    assert used.start.min() == 3 and busy.tolist() == [60] * 8 + [120] * 4


@pytest.mark.parametrize(
    ("workers", "card", "ends"),
    [([0, 1, 2, 3], 1, [15, 17]), ([0, 0, 2, 2], 1, [9, 17]), ([0, 1, 2, 3], 1 / 8, [9, 9.125])],
)
def test_messages_share_a_card_in_turns(workers, card, ends):
    """Of two ranks, two messages of 8 share a card from when both are ready; of one they do not. A fast one is free."""
    place, order = lambda s, b, d: (np.take(workers, 2 * s + b),) * 2, lambda s, b, d: 2 * b + d
    scheme = Scheme("pairs", 4, place, order, "pairs", "greedy")
    program = compile(scheme, Sizes(2, 2, 4), Options(forward=True))
    network = Network((Level("host", 2, 0, 0), Level("network", 0, 0, 1, card)))
    run = simulate(program, {"F": 1}, Machine(activation=8).on(network))
    assert sorted(run.arrival[program.rows_of(Op.SEND)]) == ends
