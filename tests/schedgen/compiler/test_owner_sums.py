"""--sums: owners of a stage sum its gradient by messages along a ring, a tree, or inside hosts and then between."""

from __future__ import annotations

import numpy as np
import pytest
from compiled import compiled
from edited_programs import comes_back, refused_less_or_twice, runs_with
from examples import further

from schedgen.checker import check
from schedgen.compiler.sum_trees import RING, SUMS, TWO_LEVEL, sum_trees
from schedgen.ir.instructions import Kind, Op
from schedgen.schemes.scheme import Sizes
from schedgen.simulator.buffer_sizes import buffer_sizes, message_bytes
from schedgen.simulator.machine import Machine
from schedgen.simulator.network import topology
from schedgen.simulator.simulate import simulate

BY_MESSAGES = SUMS[1:]


def hosts_of(devices):
    """Hosts of so many devices."""
    return lambda workers: np.arange(workers, dtype=np.int32) // devices


def summed(name, sums, workers, stages=2, devices=4, microbatches=None, **sizes):
    sized = Sizes(stages, microbatches or 2 * workers, workers, **sizes)
    return compiled(name, sized, sums=sums, hosts=hosts_of(devices))


@pytest.mark.parametrize("sums", BY_MESSAGES)
@pytest.mark.parametrize("workers", [2, 3, 4, *further(5, 6, 7, 8)])
def test_every_scheme_is_proved_and_runs(sums, workers):
    half = {"stages": max(workers // 2, 1), "replicas": 2}
    cases = [("ddp", {}), ("fsdp", half), ("1f1b", half), ("lpp", {"groups": 2}), ("zb-v", half | {"stages": workers})]
    for name, sizes in cases if workers % 2 == 0 else [("ddp", {})]:
        for devices in (1, 3, 4):
            program = summed(name, sums, workers, devices=devices, **({"stages": workers} | sizes))
            runs_with(check(program), program)
            assert not program.is_one_of(Op.ALLREDUCE).any()
    comes_back(program)


@pytest.mark.parametrize("sums", BY_MESSAGES)
@pytest.mark.parametrize(("name", "sizes"), [("fsdp", {"replicas": 2}), *further(("ddp", {}))])
def test_a_row_of_a_sum_less_or_twice_is_refused(sums, name, sizes):
    program = summed(name, sums, 4, devices=2, microbatches=4, **sizes)
    for row in np.flatnonzero(program.rows.kind == Kind.DW).tolist():
        refused_less_or_twice(program, row, row)


@pytest.mark.parametrize("workers", [8, 64])
def test_two_levels_carry_no_more_between_hosts_than_any_sum_must(workers):
    devices, hosts, size = workers // 8 * 4 if workers == 8 else 8, 2 if workers == 8 else 8, 2**20
    carried = {}
    for sums in (RING, TWO_LEVEL):
        program = summed("ddp", sums, workers, stages=1, devices=devices, microbatches=workers)
        sends = program.rows_of(Op.SEND)
        bytes = message_bytes(program, buffer_sizes(Machine(weight=size), 1), sends)
        out, to = (hosts_of(devices)(workers)[ranks] for ranks in (program.rows.rank[sends], program.rows.to[sends]))
        carried[sums] = [np.bincount(end[out != to], bytes[out != to], minlength=hosts) for end in (out, to)]
        of_links = np.bincount(program.rows.rank[sends], bytes, minlength=workers)
        assert sums == TWO_LEVEL or (of_links == 2 * (workers - 1) * size // workers).all()
    assert (np.array(carried[TWO_LEVEL]) == 2 * (hosts - 1) * size // hosts).all()
    assert (np.array(carried[RING]) == 2 * (workers - 1) * size // workers).all()


def test_two_levels_are_faster_than_the_rest_between_slow_hosts():
    network = topology(2, 2, (2e-6, 1e-3), (1 / 9e9, 1 / 12.5e6))  # 100 Mbit/s, 1 ms
    machine, times = Machine(weight=2_000_000).on(network), {}
    for sums in SUMS:
        program = summed("ddp", sums, 4, stages=4, devices=2, microbatches=8)
        times[sums] = simulate(program, {"F": 0.02, "B": 0.04}, machine).end.max()
    assert min(times, key=times.__getitem__) == TWO_LEVEL
    assert times[TWO_LEVEL] < 0.7 * times["allreduce"]  # a card carries half the bytes


def test_trees_reach_every_owner_and_begin_at_different_hosts():
    for owners in range(2, 20):
        for devices in range(1, 7):
            for sums in BY_MESSAGES:
                trees = sum_trees(sums, np.arange(owners) // devices, 2)
                assert ((trees < 0).sum(axis=1) == 1).all()
                above = np.where(trees < 0, np.arange(owners), trees)
                for _ in range(owners):
                    above = np.take_along_axis(above, above, axis=1)
                roots = np.argmax(trees < 0, axis=1)
                assert (above == roots[:, None]).all()  # all ways lead there
                if sums == TWO_LEVEL:
                    count = min(len(trees), -(-owners // devices))
                    assert len(set((roots // devices).tolist())) == count
