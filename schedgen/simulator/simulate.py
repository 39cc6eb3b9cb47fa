"""When every instruction of a program happens: the list itself is executed against a cost model.

An instruction starts when the one before it on its rank has ended and what it
uses has arrived. Compute and STEP take their durations, everything else no
time of its own. A message starts when its SEND and its RECV are both reached and the sender's
link out and the receiver's link in are free, and takes alpha + beta * bytes; FREE and STEP wait until what they
touch has left. ALLREDUCE starts when all members have come to it, takes what
a ring takes, and NORM waits for it and for all ranks; so does the STEP of a
version for its sum. That of a tie starts when the sums begun before it are
done, too; how much its stages share is not known here, so it counts as all
weights of the smallest of them, the most it can be; shards of a stage share
next to nothing, and count as that. An exchange between shards is waited for where it stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedgen.analysis.lifetimes import Memory
from schedgen.analysis.subject import Numbers, Subject
from schedgen.checker.deadlock import Waits, waits
from schedgen.checker.messages import rule_3
from schedgen.ir.cost import DIRECTION, Amount, by_stage, durations
from schedgen.ir.instructions import COMPUTE, KIND_WORDS, Ints, Kind, Op, Small
from schedgen.ir.program import Program
from schedgen.simulator.cost import Machine
from schedgen.simulator.memory_plan import Bytes, Footprint, follow, measured, message_sizes, needed, plan
from schedgen.util.errors import UsageError
from schedgen.util.heap import set_leaf
from schedgen.util.jit import kernel
from schedgen.util.progress import steps

Times = NDArray[np.float64]

# Why a rank stands still: it waits for a message of a kind, for one of its own to leave, for other ranks.
CAUSES = ("activation", "gradient", "weight", "weight_gradient", "send", "reduction")
SEND_CAUSE, REDUCTION = CAUSES.index("send"), CAUSES.index("reduction")  # the first four are Kind - 1


class Simulation(NamedTuple):
    """Times in the unit of the costs; arrays by row of the projected program, and by rank."""

    start: Times  # when each row starts ...
    end: Times  # ... and ends
    arrival: Times  # of SEND rows: when the message is there; 0 for other rows
    idle: Times  # (workers, len(CAUSES)): time each rank stood still, by cause
    cause: Small  # of rows that waited: what came last, an index of CAUSES
    sizes: Numbers  # bytes of each SEND row's message; 0 for other rows
    memory: Memory  # peak bytes of each rank, by kind
    footprint: Footprint  # bytes each rank needs
    summed: Numbers  # bytes of what each ALLREDUCE row sums; 0 for other rows


def simulate(program: Program, cost: Mapping[str, Amount], machine: Machine | None = None) -> Simulation:
    """Execute a checked, projected program. `cost`: the duration of each direction, for all stages or by stage."""
    machine = machine or Machine()
    table, header = program.rows, program.header
    duration = np.zeros(len(program))
    stepped = np.flatnonzero(table.op == Op.STEP)
    parts = np.diff(header.weight_shards.first_unit)  # a part of the weights takes its part of the time
    duration[stepped] = (by_stage(machine.step, header.stages) / parts)[table.stage[stepped]]
    lengths = durations(cost, split="W" in header.cost)
    for op, direction in DIRECTION.items():
        whole = lengths.get("I", 0) + lengths.get("W", 0)  # of a BWD among split backwards
        rows = np.flatnonzero(table.op == op)
        duration[rows] = by_stage(lengths.get(direction, whole), header.stages)[table.stage[rows]]
    bytes = measured(machine, header.stages, len(header.graph.edges))
    amounts = (bytes.by_kind(header), *bytes.workspace.values(), bytes.owned)
    largest = max(int(np.max(amount)) for amount in amounts)
    if largest * (len(program) + header.workers) >= 2**59:  # no sum of them is 16 times as much
        raise UsageError(f"sizes of {largest} bytes are too large for {len(program)} instructions")
    sizes, sends = np.zeros(len(program), np.int64), np.flatnonzero(table.op == Op.SEND)
    summed = summands(program, bytes)
    sizes[sends] = message_sizes(program, bytes, sends)
    subject = Subject(program, "")
    free = machine.alpha == machine.beta == 0
    message = np.where(sizes > 0, machine.alpha + machine.beta * sizes, 0.0)
    with steps("simulate", 4) as step:
        found = step(follow, subject, bytes)
        footprint = needed(header, bytes, found, step(plan, program, bytes, found))
        needs = waits(subject, found, step(rule_3, subject))
        start, end, arrival, idle, cause = step(
            _execute.sized(len(program)),
            table.op, table.rank, table.kind, program.bounds, needs.first, needs.sends, needs.receiver, found.chain,
            needs.collective, needs.members, _rings(program, needs, summed, machine), _sums(program, needs), table.peer,
            duration, message, free, len(CAUSES),
        )  # fmt: skip
    return Simulation(start, end, arrival, idle, cause, sizes, found.memory, footprint, summed)


def _rings(program: Program, needs: Waits, summed: Numbers, machine: Machine) -> Times:
    """How long each collective takes; `summed`: bytes by row. NORM has none."""
    entered, bytes = np.flatnonzero(program.rows.op == Op.ALLREDUCE), np.zeros(len(needs.members))
    bytes[needs.collective[entered]] = summed[entered]
    times: Times = 2 * (needs.members - 1) * (machine.alpha + machine.beta * bytes / np.maximum(needs.members, 1))
    return times


def summands(program: Program, bytes: Bytes) -> Numbers:
    """By row, of an ALLREDUCE: the bytes that it sums; else 0."""
    table, header = program.rows, program.header
    shared = [
        0
        if stages == tuple(header.tensor_parallel.siblings(stages[0])) and header.tensor_parallel.degree > 1
        else bytes.weight[list(stages)].min()
        for stages in header.tied
    ]
    sizes = np.zeros(len(program), np.int64)
    for kind, of_kind in ((Kind.DW, bytes.weight), (Kind.T, np.array(shared, np.int64))):
        rows = np.flatnonzero((table.op == Op.ALLREDUCE) & (table.kind == kind))
        sizes[rows] = of_kind[table.stage[rows]]
    rows = program.exchanges()
    sizes[rows] = bytes.outputs(header)[header.graph.size_columns(table.stage[rows], table.via[rows])]
    return sizes


def _sums(program: Program, needs: Waits) -> Numbers:
    """By row, of a STEP where weights have versions: the ALLREDUCE before it; else -1."""
    table, found = program.rows, np.full(len(program), -1, np.int64)
    if program.header.weight_versions.count:
        rows = np.flatnonzero((table.op == Op.STEP) | (table.op == Op.ALLREDUCE))
        pair = table.rank[rows].astype(np.int64) * program.header.stages + table.stage[rows]
        rows = rows[np.argsort(pair, kind="stable")]
        before = np.append(-1, needs.collective[rows[:-1]])
        steps = table.op[rows] == Op.STEP
        several = np.array([len(owners) > 1 for owners in program.header.owners])[table.stage[rows]]
        found[rows[steps & several]] = before[steps & several]
    return found


def report(program: Program, run: Simulation) -> dict[str, Any]:
    """What a simulation comes to: times, idle by cause, bytes by kind and link, peak memory."""
    table, workers = program.rows, program.header.workers
    compute = np.flatnonzero(np.isin(table.op, COMPUTE))
    latency, makespan = float(run.end[compute].max()), float(run.end.max())
    busy = np.bincount(table.rank[compute], (run.end - run.start)[compute], minlength=workers)
    sends = np.flatnonzero(table.op == Op.SEND)
    link, number = np.unique(table.rank[sends].astype(np.int64) * workers + table.peer[sends], return_inverse=True)
    traffic = np.bincount(number, run.sizes[sends], minlength=len(link)).astype(np.int64)
    return {
        "latency": latency,
        "makespan": makespan,
        "bubble": max(0.0, float(1 - busy.sum() / (latency * workers))),
        "idle": {cause: float(run.idle[:, i].sum()) for i, cause in enumerate(CAUSES)},
        "bytes": {words: int(run.sizes[table.kind == kind].sum()) for kind, words in KIND_WORDS.items()},
        **_exchanges(program, run),
        "links": [
            {"from": int(one // workers), "to": int(one % workers), "bytes": int(size)}
            for one, size in zip(link, traffic, strict=True)
        ],
        "peak_bytes": int(run.footprint.peak.max()),
        "peak_memory": {kind: peak.tolist() for kind, peak in run.memory._asdict().items()},
        "workers": [
            {
                "worker": r,
                "busy": float(busy[r]),
                "peak_bytes": int(run.footprint.peak[r]),
                "idle": dict(zip(CAUSES, run.idle[r].tolist(), strict=True)),
            }
            for r in range(workers)
        ],
    }


def _exchanges(program: Program, run: Simulation) -> dict[str, Any]:
    """How many sums over shards there are, and the bytes that they move in all; nothing where there are no shards."""
    if program.header.tensor_parallel.degree == 1:
        return {}
    rows, T = program.exchanges(), program.header.tensor_parallel.degree
    return {"exchanges": {"sums": len(rows) // T, "bytes": int(2 * (T - 1) * run.summed[rows].sum() // T)}}


@kernel
def _execute(
    op: Small, rank: Ints, kind: Small, bounds: Numbers, first: Numbers, sends: Numbers, receiver: Ints, chain: Ints,
    collective: Ints, members: Numbers, ring: Times, summed: Numbers, peer: Ints, duration: Times,
    message: Times, free: bool, causes: int,
) -> tuple[Times, Times, Times, Times, Small]:  # fmt: skip
    """Ranks act in the order of their clocks, so that links carry messages in the order of time."""
    rows, workers = len(op), len(bounds) - 1
    start, end, arrival = np.zeros(rows), np.zeros(rows), np.full(rows, -1.0)
    idle, why = np.zeros((workers, causes)), np.full(rows, -1, np.int8)
    sender = np.full(rows, -1, np.int32)
    for row in range(rows):
        if receiver[row] >= 0:
            sender[receiver[row]] = row
    at, clock = bounds[:-1].copy(), np.zeros(workers)
    reached = np.zeros(rows, np.bool_)  # of SEND and receiving rows
    out_free, in_free = np.zeros(workers), np.zeros(workers)
    outside, done, complete = members.copy(), np.zeros(len(members)), np.zeros(len(members))
    inside = np.full(rows, False)
    # Of the row a rank is at: what it uses or frees that has not left yet, and the last arrival of what has.
    left, chained = first.copy(), chain.copy()
    there, there_cause = np.full(workers, -1.0), np.full(workers, -1, np.int64)
    reduced = 0.0  # when the last reduction is done
    asleep = np.full(rows + len(members), -1, np.int32)
    next_asleep = np.full(workers, -1, np.int32)
    leaves = 1
    while leaves < workers:
        leaves *= 2
    tree = np.full(2 * leaves, np.inf)
    for r in range(workers):
        set_leaf(tree, leaves + r, 0.0 if at[r] < bounds[r + 1] else np.inf)
    while tree[1] < np.inf:
        place = 1
        while place < leaves:
            place = 2 * place if tree[2 * place] <= tree[2 * place + 1] else 2 * place + 1
        r, now = place - leaves, tree[1]
        again = np.inf
        while at[r] < bounds[r + 1]:
            row = at[r]
            o = op[row]
            # What it waits for: a row whose message has not started, or a time.
            unknown, until, cause = -1, clock[r], REDUCTION
            while left[row] < first[row + 1] and arrival[sends[left[row]]] >= 0:
                send = sends[left[row]]
                if arrival[send] > there[r]:
                    there[r], there_cause[r] = arrival[send], kind[send] - 1
                left[row] += 1
            if left[row] < first[row + 1]:
                unknown = sends[left[row]]
            elif (o == Op.FREE or o == Op.STEP) and not free:
                while chained[row] >= 0 and arrival[chained[row]] >= 0:
                    send = chained[row]
                    if arrival[send] > there[r]:
                        there[r], there_cause[r] = arrival[send], SEND_CAUSE
                    chained[row] = chain[send]
                unknown = chained[row]
            if there[r] > until:
                until, cause = there[r], there_cause[r]
            one = collective[row]
            blocks = o == Op.ALLREDUCE and kind[row] <= Kind.G
            if one >= 0 and not inside[row]:
                inside[row] = True
                outside[one] -= 1
                done[one] = max(done[one], clock[r])
                if outside[one] == 0:
                    begin = max(done[one], reduced) if kind[row] == Kind.T else done[one]
                    complete[one] = begin + (ring[one] if o == Op.ALLREDUCE else 0.0)
                    if not blocks:
                        reduced = max(reduced, complete[one])
                    woken = asleep[rows + one]
                    while woken >= 0:
                        set_leaf(tree, leaves + woken, done[one])
                        woken = next_asleep[woken]
            if o == Op.NORM:  # waits for every rank, and all of them have started their reductions
                if outside[one] > 0:
                    unknown = rows + one
                elif reduced > until:
                    until, cause = reduced, REDUCTION
            if blocks:
                if outside[one] > 0:
                    unknown = rows + one
                elif complete[one] > until:
                    until, cause = complete[one], REDUCTION
            if summed[row] >= 0:
                if outside[summed[row]] > 0:
                    unknown = rows + summed[row]
                elif complete[summed[row]] > until:
                    until, cause = complete[summed[row]], REDUCTION
            if unknown >= 0:
                next_asleep[r] = asleep[unknown]
                asleep[unknown] = r
                break
            if until > now:
                idle[r, cause] += until - clock[r]
                why[row] = cause
                clock[r] = until
                again = until
                break
            if now > clock[r]:  # woken: it stood still since its clock
                idle[r, cause] += now - clock[r]
                why[row] = cause
                clock[r] = now
            start[row] = clock[r]
            clock[r] += duration[row]
            end[row] = clock[r]
            at[r] = row + 1
            there[r] = -1.0
            if o == Op.FETCH_W or o == Op.RECV or o == Op.SEND:
                reached[row] = True
                send = row if receiver[row] >= 0 else sender[row]
                if arrival[send] < 0 and reached[send] and (free or reached[receiver[send]]):
                    source, to = rank[send], peer[send]
                    begin = start[send] if free else max(now, out_free[source], in_free[to])
                    arrival[send] = begin + message[send]
                    out_free[source] = in_free[to] = arrival[send]
                    woken = asleep[send]
                    asleep[send] = -1
                    while woken >= 0:
                        set_leaf(tree, leaves + woken, arrival[send])
                        woken = next_asleep[woken]
            if clock[r] > now:
                again = clock[r]
                break
        set_leaf(tree, leaves + r, again)
    return start, end, np.maximum(arrival, 0.0), idle, why
