"""The static checker: proves a projected program correct without running it, or refuses it.

It trusts nothing but the header and shares no code with the passes. What an instruction does to which buffers comes
from `ir.effects`, what follows from the list from `analysis`. A refusal is a `RefusedFile` with file, line, rank,
instruction, reason and rule. Run time is linear in the length of the program, times its logarithm where it sorts.

proof.py            the program under proof, and how a refusal is worded
row_rules.py        rules 1, 2, 3, 6, 7 and 8; the exact peak memory is `analysis.memory`
deadlock.py         rule 4
repair.py           orders of messages, and communicators, with which rule 4 holds
gradient_sums.py    rule 5
weight_versions.py  rule 9, and rule 5 where weights have versions
tensor_slices.py    rules 10 and 11
"""

from __future__ import annotations

from collections.abc import Callable

from schedgen.analysis import Memory, analyse
from schedgen.checker.deadlock import rule_4
from schedgen.checker.gradient_sums import rule_5
from schedgen.checker.proof import RULES, Proof
from schedgen.checker.row_rules import rule_1, rule_2, rule_3, rule_6, rule_7, rule_8
from schedgen.checker.tensor_slices import check_copies, rule_10, rule_11
from schedgen.checker.weight_versions import rule_9
from schedgen.ir.file import read
from schedgen.ir.program import Program
from schedgen.ir.transport import Transport
from schedgen.util.errors import RefusedFile, UsageError
from schedgen.util.files import display_name, open_input
from schedgen.util.progress import over

__all__ = ["RULES", "Memory", "Prove", "check", "check_but_waits", "check_compiled", "checked"]

Prove = Callable[[Program, str], object]  # takes a program and what messages call its file; raises RefusedFile


def check(program: Program, name: str = "program", transport: Transport | None = None) -> Memory:
    """Prove the eleven rules for a projected program; return its exact peak memory. `name` is for error messages.

    With a `transport` other than MPI, rule 3 and rule 4 hold for it, whether or not they would for MPI.
    """
    proof = check_but_waits(program, name, transport)
    proof.analysis.forget_accesses()
    rule_4(proof)
    rule_11(proof)
    return proof.analysis.memory


def check_but_waits(program: Program, name: str, transport: Transport | None = None) -> Proof:
    """Prove all rules but those for which it matters what waits for what: 4, 11 and, with a transport, 3's order."""
    proof = Proof(program, name, transport)
    rules = (rule_1, rule_9, rule_2, rule_3, rule_10, rule_6, rule_7, rule_8, rule_5)
    for rule in over(rules, "check", len(rules)):
        rule(proof)
    return proof


def checked(name: str, prove: Prove = check) -> Program:
    """The program in file `name` (-: standard input), read and proved by `prove`. Raises RefusedFile."""
    label = display_name(name)
    with open_input(name) as source:
        program, fault = read(source, label)
    prove(program, label)
    if fault:
        raise RefusedFile(fault)
    return program


def check_compiled(program: Program) -> None:
    """Check what the compiler does not guarantee by construction in its own program. Raises UsageError.

    * Where weights have versions, the sums among a stage's owners are in the middle of the list, where sums of
      different stages may wait for one another. Every other pass keeps the global order executable.
    * A w that places each slice itself may make the slices of a replicated stage add up gradients in different groups.
    * A memory limit does not delay a backward that runs on a worker other than its forward's.
    """
    header = program.header
    if not header.has_flush and any(header.several_owners):
        try:
            check(program)
        except RefusedFile as error:
            if error.rule not in (4, 6):
                raise
            raise UsageError(
                f"--updates {header.weight_versions.updates}: in this order all-reduces of different stages wait for "
                "one another: workers that share a stage should have no other stage, or the same order of jobs"
            ) from None
    check_copies(program)
    limit = header.memory_limit
    if limit is not None and (held := int(analyse(program).memory.saved.max())) > limit:
        raise UsageError(
            f"--memory-limit {limit}: a worker holds {held} saved forwards, "
            "since the limit does not delay backwards that run on another worker than their forwards"
        )
