"""The command repair: messages in another order, or communicators, with which a schedule is safe."""

from __future__ import annotations

import json
import sys
from functools import partial

from schedgen.checker import check, check_but_waits
from schedgen.checker.proof import Proof
from schedgen.checker.repair import Fewest, fewest, repair
from schedgen.cli.options import RepairOptions
from schedgen.cli.read_lists import checked
from schedgen.cli.read_schedules import costs
from schedgen.ir.file import write
from schedgen.ir.transport import MESSAGES, read_transport
from schedgen.simulator.simulate import simulate
from schedgen.util.errors import UsageError, note, number_of
from schedgen.util.files import display_name, is_standard_output, open_output


def run_repair(options: RepairOptions) -> int:
    """Move messages until a schedule is safe on a transport, or find communicators that make it safe as it is."""
    if options.fewest == bool(options.transport):
        raise UsageError("repair needs either --transport or --fewest (see schedgen repair --help)")
    transport = read_transport(options.transport or "in-order:edge-kind")
    if transport is None:
        raise UsageError("repair moves messages for a transport that delivers in order, not for mpi")
    name = display_name(options.file)
    program = checked(options.file, partial(check_but_waits, transport=transport))
    if options.fewest:
        return _print_fewest(options, fewest(program, name))
    cost, machine = costs(options, program)
    repaired = repair(program, name, transport)
    check(repaired.program, f"internal error, {name} repaired", transport)
    if options.output:
        with open_output(options.output) as file:
            write(repaired.program, file)
    times = [simulate(each, cost, machine).latency for each in (program, repaired.program)]
    was = f"{times[0]:g}" if repaired.in_place else "one that never ends"
    ends = len(program.rows_of(*MESSAGES))
    out = sys.stderr if is_standard_output(options.output) else sys.stdout
    moved = f"{len(repaired.moved)} of {ends} SENDs and receives moved"
    print(f"{name}: safe on {transport.name}, {moved}; simulated time {times[1]:g}, as it was {was}", file=out)
    proof = Proof(program, name)
    for row, behind in zip(repaired.moved.tolist(), repaired.behind.tolist(), strict=True):
        print(f"{proof.where(row)}: now behind {proof.where(behind) if behind >= 0 else 'nothing'}", file=out)
    return 0


def _print_fewest(options: RepairOptions, few: Fewest) -> int:
    """Print communicators, or write them as an assignment."""
    text = "[\n " + ",\n ".join(json.dumps(each.as_json) for each in few.found) + "\n]\n"
    count = number_of(len(few.found), "communicator")
    words = "the fewest" if len(few.found) == few.needed else f"at least {few.needed} are needed"
    note(f"{count}, {words}; each pair of ranks and kind of buffer has one of them")
    with open_output(options.output or "-") as out:
        out.write(text.encode("ascii"))
    return 0
