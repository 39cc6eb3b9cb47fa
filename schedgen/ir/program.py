"""The instruction set, and `Program`: the instructions of every rank, as arrays.

This is the only place that defines an opcode, its operands and how an
instruction is written as text. A program comes in two orders with one type:
*global*, the time order that passes insert into, and *projected*, grouped by
rank, which is what files hold and what everyone else reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Small = NDArray[np.int8]
AnyInts = NDArray[np.integer[Any]]

# Directions, the third argument of w and n. Where the backward is not split
# there are two, F and B; where it is, three: F, I (gradient of the input) and
# W (gradient of the weights).
F, B, W = 0, 1, 2
I = B  # noqa: E741  the name the zero-bubble papers use
DIRECTIONS = {2: ("F", "B"), 3: ("F", "I", "W")}


class Op(IntEnum):
    """Opcodes. Semantics in one line each; `schedgen/README.md` has the long form."""

    FETCH_W = 0  # start receiving w.stage, or one part of it; the sender has a matching SEND
    RECV = 1  # start receiving buf
    SEND = 2  # start sending buf
    FWD = 3  # x.stage.mb = stage(x.producer.mb, w.stage)
    BWD = 4  # g.producer.mb, dw.stage += backward(g.stage.mb)
    BWD_I = 5  # the part of BWD that yields g.producer.mb
    BWD_W = 6  # the part of BWD that adds to dw.stage
    RECOMPUTE = 7  # redo FWD for a later backward, output thrown away
    ADD = 8  # buf += the partial received from rank `from`
    ALLREDUCE = 9  # buf = sum of the group's buf, of x and g of their shards' buf; a missing dw counts as zero
    NORM = 10  # all ranks learn the losses and the norm of the whole gradient
    STEP = 11  # optimizer step on this rank's w.stage, or one part of it, which becomes its next version
    FREE = 12  # last use is past; waits for sends of buf still under way


class Kind(IntEnum):
    """What a buffer holds. Also the message kind: FIFO order holds per kind."""

    NONE = 0
    X = 1  # x.s.b    output activation of stage s; x.s.b.c the part of it that consumer c reads
    G = 2  # g.s.b    gradient with respect to it; g.s.b.c the share of consumer c
    W = 3  # w.s      weights; w.s@v where a schedule has versions of them, w.s/k a part of divided ones
    DW = 4  # dw.s     weight gradient gathered on this rank; dw.s/k where the weights are divided
    T = 5  # t.k      the part of the dw of tie k's stages that belongs to what they share; never travels


MOST_PAIRS = 2**25  # of a worker and a stage: what tables of these may have
MOST_TIES = 16  # of one stage
MOST_USES = 64  # of parts of weights, for every instruction
LINE = 64  # bytes: where a part of weights, or of a sum, begins is a multiple

KIND_NAME = {Kind.X: "x", Kind.G: "g", Kind.W: "w", Kind.DW: "dw", Kind.T: "t"}
KIND_WORDS = {Kind.X: "activation", Kind.G: "gradient", Kind.W: "weight", Kind.DW: "weight_gradient"}

# Operands by opcode, in the order they are written; "shard" only where the stage's weights are divided.
OPERANDS: dict[Op, tuple[str, ...]] = {
    Op.FETCH_W: ("stage", "shard", "from"),
    Op.RECV: ("buf", "from"),
    Op.SEND: ("buf", "to"),
    Op.FWD: ("stage", "mb"),
    Op.BWD: ("stage", "mb"),
    Op.BWD_I: ("stage", "mb"),
    Op.BWD_W: ("stage", "mb"),
    Op.RECOMPUTE: ("stage", "mb"),
    Op.ADD: ("buf", "from"),
    Op.ALLREDUCE: ("buf", "group"),
    Op.NORM: ("group",),
    Op.STEP: ("stage", "shard"),
    Op.FREE: ("buf",),
}
# The kinds of buffer an opcode may name.
KINDS: dict[Op, tuple[Kind, ...]] = {
    Op.FETCH_W: (Kind.W,),
    Op.RECV: (Kind.X, Kind.G, Kind.DW),
    Op.SEND: (Kind.X, Kind.G, Kind.W, Kind.DW),
    Op.ADD: (Kind.DW,),
    Op.ALLREDUCE: (Kind.DW, Kind.T, Kind.X, Kind.G),
    Op.FREE: (Kind.X, Kind.G, Kind.W, Kind.DW),
}
EXCHANGED = (Kind.X, Kind.G)  # the kinds whose ALLREDUCE is an exchange between shards
COMPUTE = (Op.FWD, Op.BWD, Op.BWD_I, Op.BWD_W, Op.RECOMPUTE)
VERSIONED = (*COMPUTE, Op.STEP)  # have a last operand "version" where a schedule has versions of weights

# When weights change, and which of their versions a job uses.
UPDATES = {
    "flush": "once a list, when all microbatches are through: there is one version",
    "stash": "behind every microbatch's backward; a forward uses the newest version there is, its backward the same",
    "vertical": "as stash, but all stages use the version that was the newest when the microbatch entered the first",
}


class Rows(NamedTuple):
    """Instructions as columns of equal length; -1 where a field does not apply.

    `kind`, `stage`, `mb`, `via` name the buffer (`via`: the consumer c of
    x.s.b.c and g.s.b.c, the part k of w.s/k and dw.s/k; of t.k `stage` is no stage,
    but k); for compute and STEP `stage` and `mb` are the job, and `via` is STEP's
    shard. `peer` is the operand `from`, `to`, `group` or `version`,
    and of w.s@v it is v.
    """

    rank: Ints
    op: Small
    kind: Small
    stage: Ints
    mb: Ints
    via: Ints
    peer: Ints

    def take(self, index: NDArray[np.int64] | slice) -> Rows:
        return Rows(*(column[index] for column in self.columns()))

    def columns(self) -> list[NDArray[Any]]:
        return list(self)


class Instruction(NamedTuple):
    """One row of `Rows` without its rank."""

    op: int
    kind: int
    stage: int
    mb: int
    via: int
    peer: int

    def __str__(self) -> str:
        fields = [f'"op": "{Op(self.op).name}"']
        for name in OPERANDS[Op(self.op)]:
            if name == "buf":
                fields.append(f'"buf": "{self.buffer}"')
            elif name in ("stage", "mb"):
                fields.append(f'"{name}": {self.stage if name == "stage" else self.mb}')
            elif name == "shard":
                fields += [f'"shard": {self.via}'] * (self.via >= 0)
            else:
                fields.append(f'"{name}": {self.peer}')
        if self.op in VERSIONED and self.peer >= 0:
            fields.append(f'"version": {self.peer}')
        return "{" + ", ".join(fields) + "}"

    @property
    def buffer(self) -> str:
        """The name of the buffer it names."""
        version = self.peer if self.op == Op.FREE else -1
        return buffer_name(self.kind, self.stage, self.mb, self.via, version)


def buffer_name(kind: int, stage: int, mb: int = -1, via: int = -1, version: int = -1) -> str:
    """The name of a buffer: x.s.b, x.s.b.c, g.s.b, g.s.b.c, w.s, w.s/k, w.s@v, dw.s, dw.s/k or t.k."""
    if kind in (Kind.W, Kind.DW) and via >= 0:
        return f"{KIND_NAME[Kind(kind)]}.{stage}/{via}"
    parts = [KIND_NAME[Kind(kind)], str(stage)]
    parts += [str(part) for part in (mb, via) if part >= 0]
    return ".".join(parts) + (f"@{version}" if version >= 0 else "")


def cut(size: int, parts: int) -> list[int]:
    """Where the parts of `size` bytes begin, and the end: all but the last that is not empty are equally long.

    A part begins at a multiple of 64 bytes.
    """
    part = -(-size // (parts * LINE)) * LINE
    return [min(k * part, size) for k in range(parts + 1)]


def rows(op: int | AnyInts, rank: AnyInts, **fields: int | AnyInts) -> Rows:
    """`Rows` as long as `rank`; scalars are repeated, fields not given are -1 (kind: 0)."""
    length = len(rank)

    def column(value: int | AnyInts, dtype: type) -> NDArray[Any]:
        return np.broadcast_to(np.asarray(value, dtype), (length,))

    return Rows(
        np.asarray(rank, np.int32),
        column(op, np.int8),
        column(fields.get("kind", Kind.NONE), np.int8),
        *(column(fields.get(name, -1), np.int32) for name in ("stage", "mb", "via", "peer")),
    )


def concatenate(parts: list[Rows]) -> Rows:
    return Rows(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


@dataclass(frozen=True, eq=False)
class Header:
    """What a schedule is, apart from its instructions.

    `compute` and `weights` are the two halves of w on every job, shape
    (directions, stages, microbatches).
    """

    scheme: Mapping[str, Any]  # name, workers, stages, microbatches, then the scheme's own: numbers, words, lists
    mode: str  # "greedy" or "strict": what n means
    n: str  # name of the order
    cost: Mapping[str, float]  # duration of each direction that ordered the jobs
    # weight_slots, fan_out, prefetch, recompute: see `passes.options`; and updates, one of UPDATES, unless it is flush
    lowering: Mapping[str, int | list[int] | str]
    edges: tuple[tuple[int, int], ...]  # (producer, consumer) stages
    tied: tuple[tuple[int, ...], ...]  # stages that share parameters, each its own copy: a tie is 2 or more, ascending
    groups: tuple[tuple[int, ...], ...]  # ranks of each collective
    compute: Ints
    weights: Ints
    generator: str
    apart: tuple[int, ...] = ()  # stages of whose output each of several consumers reads a part of its own
    # By stage, the owner of each part of its weights; a stage with one part is not divided. Empty: none is.
    shards: tuple[tuple[int, ...], ...] = ()
    tensor: int = 1  # T: the file's stage sT + t is shard t of the model's stage s
    whole: tuple[int, ...] = ()  # the model's stages that all T compute alike, ascending; of the others T make a sum

    @property
    def workers(self) -> int:
        return int(self.scheme["workers"])

    @property
    def stages(self) -> int:
        return int(self.scheme["stages"])

    @property
    def microbatches(self) -> int:
        return int(self.scheme["microbatches"])

    @property
    def directions(self) -> tuple[str, ...]:
        return DIRECTIONS[len(self.compute)]

    @property
    def updates(self) -> str:
        """When weights change: one of UPDATES."""
        return str(self.lowering.get("updates", "flush"))

    def round(self, stage: int) -> int:
        """Where weights have versions: microbatches that make one update of a stage, one for each of its owners."""
        return len(self.owners[stage])

    @property
    def versions(self) -> int:
        """The number that every version of weights is below; 0: they have none."""
        return 0 if self.updates == "flush" else self.microbatches + 1

    @cached_property
    def owners(self) -> tuple[tuple[int, ...], ...]:
        """owners(s): every worker that w_weights names, ascending; of a divided stage, the owners of parts."""
        if self.shards:
            return tuple(tuple(sorted(set(ranks))) for ranks in self.shards)
        return tuple(tuple(np.unique(self.weights[:, s]).tolist()) for s in range(self.stages))

    @cached_property
    def several(self) -> tuple[bool, ...]:
        """By stage, whether it has several owners of all its weights, which sum up among themselves."""
        return tuple(not self.shards and len(ranks) > 1 for ranks in self.owners)

    def parts(self, stage: int) -> tuple[int, ...]:
        """`via` of the parts of w.stage and dw.stage: (-1,) where they are not divided."""
        count = len(self.shards[stage]) if self.shards else 1
        return tuple(range(count)) if count > 1 else (-1,)

    @cached_property
    def first_unit(self) -> NDArray[np.int64]:
        """Parts of weights are numbered as units: those of stage s from first_unit[s] to first_unit[s + 1] - 1."""
        counts = [len(ranks) for ranks in self.shards] or [1] * self.stages
        return np.concatenate([[0], np.cumsum(counts)])

    @cached_property
    def units(self) -> list[tuple[int, int]]:
        """(stage, `via`) of every unit."""
        return [(stage, via) for stage in range(self.stages) for via in self.parts(stage)]

    def holders(self, stage: int, via: int) -> tuple[int, ...]:
        """The owners of a unit, ascending."""
        return self.owners[stage] if via < 0 else (self.shards[stage][via],)

    def weight_sizes(self, by_stage: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes of every unit, from those of all weights of each stage."""
        if not self.shards:
            return by_stage
        cuts = [cut(int(size), len(ranks)) for size, ranks in zip(by_stage, self.shards, strict=True)]
        return np.concatenate([np.diff(np.array(ends, np.int64)) for ends in cuts])

    def sharers(self, tie: int) -> tuple[int, ...]:
        """The owners of the stages of a tie, ascending: who enters its ALLREDUCE."""
        return tuple(sorted({rank for stage in self.tied[tie] for rank in self.owners[stage]}))

    @cached_property
    def producers(self) -> tuple[tuple[int, ...], ...]:
        """The stages whose output each stage reads; empty: it reads the input batch."""
        return self._ends(at=1, give=0)

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """The stages that read each stage's output; empty: its output is the loss."""
        return self._ends(at=0, give=1)

    def _ends(self, at: int, give: int) -> tuple[tuple[int, ...], ...]:
        ends: list[list[int]] = [[] for _ in range(self.stages)]
        for edge in self.edges:
            ends[edge[at]].append(edge[give])
        return tuple(tuple(sorted(stages)) for stages in ends)

    @cached_property
    def split(self) -> NDArray[np.bool_]:
        """By stage: whether its output, and the gradients it gives, are parts that add up over its shards."""
        split = np.full(self.stages // self.tensor, self.tensor > 1)
        split[list(self.whole)] = False
        return np.repeat(split, self.tensor)

    def part_uses(self) -> int:
        """How many parts of weights all jobs use together."""
        return len(self.units) * self.microbatches * len(self.compute) if self.shards else 0

    def siblings(self, stage: int) -> range:
        """The shards of the model's stage that `stage` is one of: stages of the file, in their order."""
        return range(stage - stage % self.tensor, stage - stage % self.tensor + self.tensor)

    def share(self, producer: int, consumer: int) -> int:
        """`via` of the gradient that `consumer` sends to `producer`: -1 where it is the only one."""
        return consumer if len(self.consumers[producer]) > 1 else -1

    def part(self, producer: int, consumer: int) -> int:
        """`via` of the x that `consumer` reads of `producer`: -1 where all read the same."""
        return consumer if self.is_apart[producer] else -1

    def vias(self, stage: int) -> tuple[int, ...]:
        """`via` of every x that a stage gives."""
        return self.consumers[stage] if self.is_apart[stage] else (-1,)

    @cached_property
    def is_apart(self) -> NDArray[np.bool_]:
        """By stage: whether it is in `apart`."""
        return np.isin(np.arange(self.stages), self.apart)

    def columns(self, stage: AnyInts, via: AnyInts) -> NDArray[np.int64]:
        """Where the size of an x or g stands in an array by stage and then by edge."""
        edges = np.array(self.edges, np.int64).reshape(-1, 2) @ [self.stages, 1]  # ascending
        found = self.stages + np.searchsorted(edges, stage.astype(np.int64) * self.stages + via)
        return np.where(via < 0, stage, found)


@dataclass(frozen=True, eq=False)
class Program:
    """A header and its instructions, in global or in projected order."""

    header: Header
    rows: Rows
    time: NDArray[np.float64] | None = None  # global order only: when each row happens, ascending

    def __len__(self) -> int:
        return len(self.rows.op)

    def insert(self, new: Rows, after: NDArray[np.int64]) -> Program:
        """Put row k of `new` behind row `after[k]` (-1: first); equal places keep their order."""
        order: slice | NDArray[np.int64] = slice(None)
        if (after[1:] < after[:-1]).any():
            order = np.argsort(after, kind="stable")
            after = after[order]
        old = np.ones(len(self) + len(after), bool)
        old[after + 1 + np.arange(len(after))] = False

        def merge(mine: NDArray[Any], theirs: NDArray[Any]) -> NDArray[Any]:
            merged = np.empty(len(old), mine.dtype)
            merged[old], merged[~old] = mine, theirs
            return merged

        pairs = zip(self.rows.columns(), new.columns(), strict=True)
        rows = Rows(*(merge(mine, theirs[order]) for mine, theirs in pairs))
        time = None if self.time is None else merge(self.time, self.time[np.maximum(after, 0)])
        return Program(self.header, rows, time)

    def project(self) -> Program:
        """The same instructions grouped by rank, each rank in global order."""
        few = self.header.workers < 2**16  # numpy sorts 16 bits in linear time
        rank = self.rows.rank.astype(np.uint16) if few else self.rows.rank
        return Program(self.header, self.rows.take(np.argsort(rank, kind="stable")))

    @cached_property
    def bounds(self) -> NDArray[np.int64]:
        """Projected only: rank r's instructions are rows bounds[r] to bounds[r + 1]."""
        return np.searchsorted(self.rows.rank, np.arange(self.header.workers + 1))

    def instruction(self, row: int) -> Instruction:
        return Instruction(*(int(column[row]) for column in self.rows[1:]))

    def exchanges(self) -> NDArray[np.int64]:
        """The rows of sums over shards: every member's ALLREDUCE of an x or a g."""
        return np.flatnonzero((self.rows.op == Op.ALLREDUCE) & np.isin(self.rows.kind, EXCHANGED))

    def instructions(self, rank: int) -> list[Instruction]:
        """Projected only: the list of one rank."""
        part = self.rows.take(slice(self.bounds[rank], self.bounds[rank + 1]))
        return [Instruction(*row) for row in zip(*(column.tolist() for column in part[1:]), strict=True)]
