"""How much work a search does, and how it is divided.

Work is counted, not seconds, so that the same call gives the same schedule on any machine. Its unit is the start time
of one job, computed by `run_order`.
"""

from __future__ import annotations

BUDGET = 1000  # millions of job start times computed: the default of all searches
BYTES_SHARES = (0.1, 0.6, 0.3)  # by round, for a limit in bytes: rounds learn what else takes memory
SMALL_SHARES = (0.2, 0.4)  # for problems small enough for CP-SAT, which runs before the last round and takes most time
PROVED_SECONDS = 5.0  # CP-SAT's own deterministic seconds, for a budget of BUDGET

RULE_JOBS = 4  # a rule takes this many times as long as `run_order` for each job
RULES = (100, 6000)  # that are tried, at least and at the most
FEWEST_MOVES = 1000  # of one annealing
LEAST_MOVES = 20_000  # with fewer moves in all annealing finds nothing: the work is left to rules
JUDGED_JOBS = 600  # compiling and simulating an order takes this many times as long as `run_order` for each job
MOST_JUDGED = 2000  # changes of the ways of an order's forwards that are judged
