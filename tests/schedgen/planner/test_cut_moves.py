"""Cuts that are chosen by simulation, compared with all possible cuts."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from schedgen.compiler.compile import compile
from schedgen.planner.cut_moves import best_cuts, moves
from schedgen.schemes import load
from schedgen.schemes.scheme import Sizes
from schedgen.simulator.simulate import simulate


class Judge:
    """The seconds of a scheme's step for given cuts of layers whose backward takes twice their forward."""

    def __init__(self, scheme, layers, stages, workers, microbatches):
        sizes = Sizes(stages, microbatches, workers)
        self.program = compile(load(scheme, sizes), sizes)
        self.until = np.concatenate([[0], np.cumsum(layers)]) / 1000
        self.all_cuts = [(*cut, len(layers)) for cut in itertools.combinations(range(1, len(layers)), stages - 1)]
        self.asked = 0

    def __call__(self, cuts):
        self.asked += 1
        forward = np.diff(self.until[[0, *cuts]])
        return float(simulate(self.program, {"F": forward, "B": 2 * forward}).end.max())

    def balanced(self):
        return min(self.all_cuts, key=lambda cuts: np.diff(self.until[[0, *cuts]]).max())


def test_cuts_move_away_from_balance_where_that_is_faster():
    """What torch's `_partition` finds for 1F1B on 4 workers; the slowest stage is fastest at 0.600."""
    judge = Judge("1f1b", [8, 11, 2, 1, 18, 5, 4, 11], 4, 4, 8)
    assert judge(judge.balanced()) == pytest.approx(0.600)
    assert judge(best_cuts(judge.balanced(), judge, 200)) == pytest.approx(0.573)


def test_found_cuts_are_within_one_percent_of_all_cuts():
    choose = random.Random(1)
    for _ in range(12):
        layers = [choose.randint(1, 20) for _ in range(choose.randint(5, 8))]
        judge = Judge("1f1b", layers, choose.randint(2, 4), None, choose.randint(2, 8))
        found = judge(best_cuts(judge.balanced(), judge, 200))
        assert found <= 1.01 * min(map(judge, judge.all_cuts)), layers


@pytest.mark.parametrize("allowed", [0, 7])
def test_no_more_cuts_are_tried_than_allowed(allowed):
    """If none are allowed, as for a very large schedule, only the initial cuts are tried."""
    judge = Judge("1f1b", [8, 11, 2, 1, 18, 5, 4, 11], 4, 4, 8)
    best_cuts(judge.balanced(), judge, allowed)
    assert judge.asked == max(1, allowed)


def test_moves_leave_every_stage_a_layer():
    assert set(moves((1, 3, 4))) == {(2, 3, 4), (1, 2, 4)}
    assert set(moves((4,))) == set()
