"""Sums over the owners of a stage by messages, along the trees of `sum_trees`, in place of an ALLREDUCE.

An owner sends each part of its sum once, up the part's tree, after it has added those of its branches. The root then
has the total and sends it down. Whoever receives it adds it to a part that it has sent and freed, and so to zero: all
owners have the bits of the root. Each receiver runs its next job before it adds, so that transfers overlap jobs.
"""

from __future__ import annotations

import numpy as np

from schedgen.compiler.passes.find_rows import NextRow, rows_at_end
from schedgen.compiler.place import PlacedScheme
from schedgen.ir.instructions import COMPUTE, Kind, Op
from schedgen.ir.program import Program, rows
from schedgen.util.arrays import Ints, Numbers, stable_order


def owner_sums(program: Program, placed: PlacedScheme) -> Program:
    """The program, after `gradient_reduction`, with the SENDs, RECVs and ADDs of the sums over owners."""
    header, table = program.header, program.rows
    if not header.sums_by_messages:
        return program
    complete = np.full((header.stages, header.workers), -1, np.int64)  # the row after which a rank's sum is complete
    backwards, adds = program.rows_of(Op.BWD, Op.BWD_W), program.rows_of(Op.ADD)
    ends = rows_at_end(program, backwards, placed.lengths)
    for added, end in ((backwards, ends), (adds, adds)):
        np.maximum.at(complete, (table.stage[added], table.rank[added]), end)
    next_compute, found = NextRow(program, *COMPUTE), list[Numbers]()
    for stage, owners in enumerate(header.owners):
        if header.several_owners[stage]:
            ranks = np.array(owners)
            messages = _messages(placed.sum_trees(owners), complete[stage, ranks], ranks, next_compute)
            found.append(np.insert(messages, 0, stage, axis=0))
    stage, step, part, source, to, sent, added = np.concatenate(found, axis=1)
    # After one row, step by step: first all messages, those to other hosts and to near ranks first, then the ADDs.
    is_inside, distance = placed.hosts[source] == placed.hosts[to], (to - source) % header.workers
    number = np.empty(len(source), np.int64)
    number[np.lexsort((distance, is_inside, step))] = np.arange(len(source))
    op, message = np.repeat([Op.SEND, Op.RECV, Op.ADD], len(source)), np.tile(np.arange(len(source)), 3)
    after = np.concatenate([sent, sent, added])
    order = np.lexsort((op == Op.RECV, number[message], op == Op.ADD, step[message], after))
    op, message = op[order], message[order]
    ends = np.where(op == Op.SEND, (source[message], to[message]), (to[message], source[message]))
    shard = np.where(header.gradient_units.counts[stage] > 1, part, -1)[message]
    new = rows(op, ends[0], kind=Kind.DW, stage=stage[message], shard=shard, operand=ends[1])
    return program.insert(new, after=after[order])


def _messages(trees: Numbers, complete: Numbers, ranks: Ints, next_compute: NextRow) -> Numbers:
    """The messages of one stage: columns of step, part, sender, receiver, row after which it is sent, and is added.

    complete: by owner, the row after which its own sum is complete; -1: it has none
    """
    parts, owners = trees.shape
    above = np.where(trees < 0, -1, trees + owners * np.arange(parts)[:, None]).ravel()  # nodes: owners of each part
    ready = np.tile(complete, parts)  # by node, the row after which its sum is complete; -1: nothing is added to it
    height, by_depth = _heights(above)
    at_height = np.split(stable_order(height), np.cumsum(np.bincount(height))[:-1])
    messages = []

    def send(step: int, source: Numbers, to: Numbers) -> None:
        sent, rank = ready[source], ranks[to % owners]
        added = next_compute(sent, rank)
        np.maximum.at(ready, to, added)
        columns = np.full(len(source), step), source // owners, ranks[source % owners], rank, sent, added
        messages.append(np.stack(columns))

    for step, nodes in enumerate(at_height):
        up = nodes[(above[nodes] >= 0) & (ready[nodes] >= 0)]
        send(step, up, above[up])
    for step, nodes in enumerate(by_depth[1:], len(at_height)):
        send(step, above[nodes], nodes)
    return np.concatenate(messages, axis=1)


def _heights(above: Numbers) -> tuple[Numbers, list[Numbers]]:
    """By node, the length of the longest branch below it; and the nodes at each depth, the roots first."""
    depth, up = (above >= 0).astype(np.int64), np.where(above < 0, np.arange(len(above)), above)
    while (depth[up] > 0).any():
        depth, up = depth + depth[up], up[up]
    by_depth = np.split(stable_order(depth), np.cumsum(np.bincount(depth))[:-1])
    height = np.zeros(len(above), np.int64)
    for nodes in by_depth[:0:-1]:
        np.maximum.at(height, above[nodes], height[nodes] + 1)
    return height, by_depth
