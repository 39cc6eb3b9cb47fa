"""Which buffers every row of a program affects, and how: the table of `effects.py`, looked up for each row.

In: a program. Out: `Accesses`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from schedgen.ir.effects import EFFECTS, Buffer, Which
from schedgen.ir.header import Header
from schedgen.ir.instructions import B, F, Kind, Op
from schedgen.ir.program import Program
from schedgen.util.arrays import AnyInts, Flags, Ints, Numbers, Small
from schedgen.util.jit import kernel

_KINDS = len(Kind)


class Accesses(NamedTuple):
    """What the rows of a program do to which buffers, in the order in which they do it; one array entry per access.

    Buffers are numbered within their kind: x and g by stage or, after all stages, by edge, and then by microbatch; w by
    unit and version; opt by unit; dw by unit of gradients; partials by such a unit and sender; saved, half and host by
    stage and microbatch.
    """

    row: Ints  # ascending
    effect: Small  # an Effect
    buffer: Small  # a Buffer
    number: Ints  # -1: there is no such buffer

    def begin(self, rows: Numbers) -> Numbers:
        """For each of these rows, the index of the first access that belongs to it or to a later row."""
        return np.searchsorted(self.row, rows)


def numbers_per_size(header: Header) -> Numbers:
    """By kind of buffer, how many consecutive numbers share a size: number // this is the column in arrays of sizes.

    The columns are stages and then edges for x and g, units for w, opt, dw and partials, and stages for the rest.
    """
    batches = header.microbatches
    return np.array([batches, batches, header.weight_versions.count, 1, header.workers, batches, batches, batches, 1])


def numbers_in_all(header: Header) -> Numbers:
    """By kind of buffer, the exclusive upper bound of its numbers."""
    graph = header.graph
    columns = np.full(len(Buffer), header.stages)
    columns[[Buffer.W, Buffer.OPT]] = len(header.weight_shards.units)
    columns[[Buffer.DW, Buffer.PARTIAL]] = len(header.gradient_units.units)
    columns[Buffer.G] += len(graph.edges)
    columns[Buffer.X] += len(graph.edges) * bool(graph.per_consumer)
    return columns * numbers_per_size(header)


class Slots(NamedTuple):
    """A slot for every buffer in one array: number k of a kind has slot begin[kind] + step[kind] * k.

    The buffers of one stage and microbatch are adjacent, so that they share a cache line.
    """

    begin: Numbers
    step: Numbers
    total: int


def slots(numbers: Numbers) -> Slots:
    """The slots for `numbers`, how many buffers there are of each kind."""
    of_jobs = [kind for kind in (Buffer.X, Buffer.G, Buffer.SAVED, Buffer.HALF, Buffer.HOST) if numbers[kind]]
    begin, step = np.zeros(len(Buffer), np.int64), np.ones(len(Buffer), np.int64)
    begin[of_jobs], step[of_jobs] = np.arange(len(of_jobs)), len(of_jobs)
    count = len(of_jobs) * int(numbers[of_jobs].max(initial=0))
    for kind in (Buffer.W, Buffer.DW, Buffer.PARTIAL, Buffer.OPT):
        begin[kind] = count
        count += int(numbers[kind])
    return Slots(begin, step, count)


def operands(header: Header, buffer: AnyInts, number: AnyInts) -> tuple[Ints, Ints, Ints]:
    """Stage, microbatch and consumer or shard of buffers, as instructions name them; -1 where a name has none."""
    stage, mb, piece = np.full((3, len(number)), -1, np.int32)
    edges = np.array(header.graph.edges).reshape(-1, 2)
    units = {Buffer.W: header.weight_shards, Buffer.OPT: header.weight_shards}
    units |= dict.fromkeys((Buffer.DW, Buffer.PARTIAL), header.gradient_units)
    for thing, count in zip(Buffer, numbers_per_size(header).tolist(), strict=True):
        at = np.flatnonzero(buffer == thing)
        column = number[at] // count
        rest = number[at] - column * count
        if thing in units:
            stage[at], piece[at] = np.array(units[thing].units)[column].T
            continue
        stage[at], mb[at] = column, rest
        of_edge = column >= header.stages
        stage[at[of_edge]], piece[at[of_edge]] = edges[column[of_edge] - header.stages].T
    return stage, mb, piece


def accesses(program: Program, buffers: Collection[Buffer] = tuple(Buffer)) -> Accesses:
    """What every row does to buffers of these kinds. `program` may be damaged, or hold only some ranks' rows."""
    forms = [tuple(does for does in EFFECTS[op].get(kind, ()) if does.buffer in buffers) for op in Op for kind in Kind]
    begin = np.cumsum([0, *map(len, forms)])
    table = np.array([does for form in forms for does in form], np.int64).reshape(-1, 3)
    names = _names(program)
    most = _most(program, names, table, begin)
    row, number = np.empty((2, most), np.int32)
    effect, buffer = np.empty((2, most), np.int8)
    count = _expand.sized(4 * len(program))(*program.rows, table, begin, names, row, effect, buffer, number)
    return Accesses(row[:count], effect[:count], buffer[:count], number[:count])


def _most(program: Program, names: _Names, table: Numbers, begin: Numbers) -> int:
    """An upper bound on the number of accesses, for allocation."""
    form = program.rows.op.astype(np.int16) * _KINDS + program.rows.kind
    most = int(np.bincount(form, minlength=len(begin) - 1) @ np.diff(begin))
    several = {  # how many buffers, by stage or by tie
        Which.INPUTS: np.diff(names.first_in),
        Which.OUTPUTS: np.diff(names.first_out),
        Which.SHARDS: np.diff(names.first_part),
        Which.TIED: np.diff(names.first_of_tie),
        Which.PARTS: np.array(program.header.parts or [1]),
    }
    of_weights = np.diff(names.first_unit)
    for e in np.flatnonzero(np.isin(table[:, 2], list(several))).tolist():
        more = np.maximum(of_weights if table[e, 1] == Buffer.W else several[Which(table[e, 2])], 1) - 1
        if more.any():
            rows = form == np.searchsorted(begin, e, side="right") - 1
            most += int(np.bincount(program.rows.stage[rows], minlength=len(more)) @ more)
    return most


class _Names(NamedTuple):
    """What the numbers of buffers depend on."""

    edges: Numbers  # (edges, 2): producer, consumer; sorted by producer, then consumer
    by_consumer: Numbers  # indices of the edges, sorted by consumer, then producer
    first_in: Numbers  # by_consumer[first_in[s] : first_in[s + 1]] are the edges into stage s
    first_out: Numbers  # edges first_out[s] to first_out[s + 1] - 1 lead out of stage s
    per_consumer: Flags
    first_unit: Numbers
    first_part: Numbers  # as first_unit, of gradients
    first_of_tie: Numbers  # the stages of tie k are tied[first_of_tie[k] : first_of_tie[k + 1]]
    tied: Numbers
    owner: Flags  # (workers, units)
    redone: Flags  # (stages, microbatches): the forward saves nothing: it is redone, or has no backward on its rank
    on_host: bool  # whether the state of optimizers lives in the memory of the host
    stays: Flags  # by row, for STEP: the version before has a FREE, so it lives on
    stages: int
    batches: int
    versions: int
    workers: int


def _names(program: Program) -> _Names:
    """Gather `_Names` from the header, and from the rows that change what other rows do."""
    header = program.header
    edges = np.array(header.graph.edges, np.int64).reshape(-1, 2)
    by_consumer = np.lexsort((edges[:, 0], edges[:, 1]))
    stages = np.arange(header.stages + 1)
    redone = np.full(header.compute.shape[1:], True) if header.is_forward else header.compute[F] != header.compute[B]
    redone |= program.job_rows(Op.RECOMPUTE) >= 0
    return _Names(
        edges=edges,
        by_consumer=by_consumer,
        first_in=np.searchsorted(edges[by_consumer, 1], stages),
        first_out=np.searchsorted(edges[:, 0], stages),
        per_consumer=header.graph.is_per_consumer,
        first_unit=header.weight_shards.first_unit,
        first_part=header.gradient_units.first_unit,
        first_of_tie=np.cumsum([0, *map(len, header.tied)]),
        tied=np.array([stage for tie in header.tied for stage in tie], np.int64),
        owner=header.is_owner,
        redone=redone,
        on_host=header.offloads_optimizer,
        stays=_freed_later(program),
        stages=header.stages,
        batches=header.microbatches,
        versions=header.weight_versions.count,
        workers=header.workers,
    )


def _freed_later(program: Program) -> Flags:
    """By row, for STEP of weights with versions: whether the version before has a FREE, and so lives on."""
    table, versions = program.rows, program.header.weight_versions.count
    stays = np.zeros(len(program), bool)
    if versions > 1:
        steps = program.rows_of(Op.STEP)
        frees = np.flatnonzero((table.op == Op.FREE) & (table.kind == Kind.W))
        weights = table.rank.astype(np.int64) * program.header.stages + table.stage
        freed = weights[frees] * versions + table.version[frees]
        stays[steps] = np.isin(weights[steps] * versions + table.version[steps] - 1, freed)
        stays[steps[table.version[steps] == 0]] = False
    return stays


@kernel
def _expand(
    rank: Ints, op: Small, kind: Small, stage: Ints, mb: Ints, piece: Ints, operand: Ints, table: Numbers,
    begin: Numbers, names: _Names, of_row: Ints, effect: Small, buffer: Small, number: Ints,
) -> int:  # fmt: skip
    """Write the accesses of every row into the arrays; return how many there are."""
    first_in, first_out = names.first_in, names.first_out
    batches, count = names.batches, 0
    for row in range(len(op)):
        s, b = stage[row], mb[row]
        form = int(op[row]) * _KINDS + kind[row]
        for e in range(begin[form], begin[form + 1]):
            does, thing, which = table[e, 0], table[e, 1], table[e, 2]
            before = count
            if which == Which.INPUTS:
                for k in range(first_in[s], first_in[s + 1]):
                    edge = names.by_consumer[k]
                    p = names.edges[edge, 0]
                    shared = not names.per_consumer[p] if thing == Buffer.X else first_out[p + 1] - first_out[p] == 1
                    number[count] = (p if shared else names.stages + edge) * batches + b
                    count += 1
            elif which == Which.OUTPUTS:
                consumers = first_out[s + 1] - first_out[s]
                if (thing == Buffer.X and not names.per_consumer[s]) or (thing == Buffer.G and consumers == 1):
                    number[count] = s * batches + b
                    count += 1
                else:
                    for edge in range(first_out[s], first_out[s + 1]):
                        number[count] = (names.stages + edge) * batches + b
                        count += 1
            elif which == Which.JOB or which == Which.UNREDONE:
                number[count] = s * batches + b
                count += which == Which.JOB or not names.redone[s, b]
            elif which == Which.TIED:
                for k in range(names.first_of_tie[s], names.first_of_tie[s + 1]):
                    unit = names.first_unit[names.tied[k]]
                    if names.owner[rank[row], unit]:
                        number[count] = unit
                        count += 1
            elif thing == Buffer.X or thing == Buffer.G:
                number[count] = max(_edge_named(names, thing, s, piece[row]) * batches + b, -1)
                count += 1
            elif (
                (which == Which.BEFORE and names.versions == 1)
                or (which == Which.IN_PLACE and names.stays[row])
                or (which == Which.BESIDE and not names.stays[row])
                or (which == Which.ON_HOST and not names.on_host)
            ):
                continue
            else:
                first = names.first_unit if thing == Buffer.W or thing == Buffer.OPT else names.first_part
                low, high = first[s], first[s + 1]
                if which != Which.SHARDS and (which != Which.PARTS or piece[row] >= 0):
                    low += max(piece[row], 0)
                    high = low + 1
                version = operand[row] - (which == Which.BEFORE) if thing == Buffer.W and names.versions > 1 else 0
                for unit in range(low, high):
                    if unit >= first[s + 1] or not 0 <= version < names.versions:
                        number[count] = -1
                    elif thing == Buffer.W:
                        number[count] = unit * names.versions + version
                    elif thing == Buffer.PARTIAL:
                        number[count] = unit * names.workers + operand[row]
                    else:
                        number[count] = unit
                    count += 1
            for k in range(before, count):
                of_row[k], effect[k], buffer[k] = row, does, thing
    return count


@kernel
def _edge_named(names: _Names, thing: int, s: int, consumer: int) -> int:
    """The column of the x or g of stage s with this consumer: s or, after all stages, the edge; -1 if there is none."""
    edge, behind = names.first_out[s], names.first_out[s + 1]
    several = names.per_consumer[s] or (thing == Buffer.G and behind - edge > 1)
    if (thing == Buffer.G and behind == edge) or several == (consumer < 0):
        return -1
    if not several:
        return s
    while behind - edge > 1:  # consumers ascend
        middle = (edge + behind) // 2
        if names.edges[middle, 1] <= consumer:
            edge = middle
        else:
            behind = middle
    return names.stages + edge if names.edges[edge, 1] == consumer else -1
