"""The total checker: proves a projected program right without running it.

It trusts nothing but the header and shares no code with the passes. `check`
raises `RefusedFile` with file, line, rank, instruction, reason and rule at
the first thing that is not so, and returns the exact peak memory otherwise.
Time grows with the length of the program, and with its logarithm where it
sorts.

subject.py    the program under proof, and how a refusal is worded
jobs.py       rule 1
lives.py      rules 2, 7 and 8: what each instruction does to which buffer
ties.py       what the sum of a tie does to which buffer
messages.py   rules 3 and 6
deadlock.py   rule 4
gradients.py  rule 5
updates.py    rule 9, and rule 5 where weights have versions
exchanges.py  rule 10
"""

from __future__ import annotations

from schedgen.analysis.lifetimes import Memory, lives, rule_2, rule_7
from schedgen.analysis.subject import RULES, Subject
from schedgen.checker.deadlock import rule_4, waits
from schedgen.checker.gradients import rule_5
from schedgen.checker.jobs import rule_1
from schedgen.checker.messages import rule_3, rule_6
from schedgen.checker.shard_sums import rule_10
from schedgen.checker.weight_versions import rule_9
from schedgen.ir.program import Program
from schedgen.util.errors import RefusedFile, UsageError
from schedgen.util.progress import steps

__all__ = ["RULES", "Memory", "check", "check_compiled"]


def check(program: Program, name: str = "program") -> Memory:
    """Prove the ten rules for a projected program; `name` stands in errors."""
    subject = Subject(program, name)
    with steps("check", 10) as step:
        step(rule_1, subject)
        step(rule_9, subject)
        found = step(lives, subject)
        step(rule_2, subject, found)
        pairs = step(rule_3, subject)
        step(rule_10, subject)
        step(rule_6, subject)
        step(rule_7, subject, found)
        step(rule_5, subject)
        step(rule_4, subject, waits(subject, found, pairs))
    return found.memory


def check_compiled(program: Program) -> None:
    """Prove what the compiler has just written, where that is not right by construction. Raises UsageError.

    Every pass keeps the order of time executable, with one exception: where weights have versions, the sums among a
    stage's owners stand in the middle of the list, where sums of different stages may wait for one another.
    """
    header = program.header
    if not (header.weight_versions and any(header.several_owners)):
        return
    try:
        check(program)
    except RefusedFile as error:
        if error.rule not in (4, 6):
            raise
        raise UsageError(
            f"--updates {header.weight_versions.updates}: in this order sums of different stages wait for one "
            "another: a worker that shares a stage with others should have no other stage, or the same order as they"
        ) from None
