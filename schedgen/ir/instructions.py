"""The instruction set: opcodes, their operands, and how an instruction is written.

This is the only place that defines an opcode and its operands. What an instruction does to which buffers is
`effects.py`; what it means, step by step, is `tests/helpers/reference_machine.py`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar, NamedTuple, Protocol, TypeVar

# Directions, the third argument of w and n. Where the backward is not split
# there are two, F and B; where it is, three: F, I (gradient of the input) and
# W (gradient of the weights). A list of forwards alone has one.
F, B, W = 0, 1, 2
I = B  # noqa: E741  the name the zero-bubble papers use
DIRECTIONS = {2: ("F", "B"), 3: ("F", "I", "W"), 1: ("F",)}


class Op(IntEnum):
    """Opcodes. Semantics in one line each; `schedgen/docs/file.md` has the long form."""

    FETCH_W = 0  # start receiving w.stage, or one shard of it; the sender has a matching SEND
    RECV = 1  # start receiving buf
    SEND = 2  # start sending buf
    FWD = 3  # x.stage.mb = stage(x.producer.mb, w.stage)
    BWD = 4  # g.producer.mb, dw.stage += backward(g.stage.mb)
    BWD_I = 5  # the part of BWD that yields g.producer.mb
    BWD_W = 6  # the part of BWD that adds to dw.stage
    RECOMPUTE = 7  # redo FWD for a later backward, output thrown away
    ADD = 8  # buf += the partial received from rank `from`
    ALLREDUCE = 9  # buf = sum of the group's buf (for x and g: of the slices' buf); a missing dw counts as zero
    NORM = 10  # all ranks learn the losses and the norm of the whole gradient
    STEP = 11  # optimizer step on this rank's w.stage, or one shard of it, which becomes its next version
    FREE = 12  # forget buf after its last use; waits for its sends, or its copy to the host, still in flight
    OFFLOAD = 13  # start copying buf to the memory of the host
    RELOAD = 14  # start copying buf back


class Kind(IntEnum):
    """What a buffer holds. Also the message kind: FIFO order holds per kind."""

    NONE = 0
    X = 1  # x.s.b    output activation of stage s; x.s.b.c its output for consumer c alone
    G = 2  # g.s.b    gradient with respect to it; g.s.b.c the share of consumer c
    W = 3  # w.s      weights; w.s@v version v of them, w.s/k shard k of divided weights
    DW = 4  # dw.s     weight gradient gathered on this rank; dw.s/k where weights are divided, or it is summed in parts
    T = 5  # t.k      in the dw of tie k's stages, the gradients of the shared parameters; only ALLREDUCE names it
    SAVED = 6  # saved.s.b  what the forward of stage s saves for its backward
    OPT = 7  # opt.s    state of the optimizer of w.s; opt.s/k where weights are divided


KIND_NAME = {Kind.X: "x", Kind.G: "g", Kind.W: "w", Kind.DW: "dw", Kind.T: "t", Kind.SAVED: "saved", Kind.OPT: "opt"}
KIND_WORDS = {Kind.X: "activation", Kind.G: "gradient", Kind.W: "weight", Kind.DW: "weight_gradient"}

# Operands by opcode, in the order they are written; "shard" only where the stage's weights are divided, "version" only
# where the schedule has versions of weights.
OPERANDS: dict[Op, tuple[str, ...]] = {
    Op.FETCH_W: ("stage", "shard", "from"),
    Op.RECV: ("buf", "from"),
    Op.SEND: ("buf", "to"),
    Op.FWD: ("stage", "mb", "version"),
    Op.BWD: ("stage", "mb", "version"),
    Op.BWD_I: ("stage", "mb", "version"),
    Op.BWD_W: ("stage", "mb", "version"),
    Op.RECOMPUTE: ("stage", "mb", "version"),
    Op.ADD: ("buf", "from"),
    Op.ALLREDUCE: ("buf", "group"),
    Op.NORM: ("group",),
    Op.STEP: ("stage", "shard", "version"),
    Op.FREE: ("buf",),
    Op.OFFLOAD: ("buf",),
    Op.RELOAD: ("buf",),
}
# The kinds of buffer an opcode may name.
KINDS: dict[Op, tuple[Kind, ...]] = {
    Op.FETCH_W: (Kind.W,),
    Op.RECV: (Kind.X, Kind.G, Kind.DW, Kind.SAVED),
    Op.SEND: (Kind.X, Kind.G, Kind.W, Kind.DW, Kind.SAVED),
    Op.ADD: (Kind.DW,),
    Op.ALLREDUCE: (Kind.DW, Kind.T, Kind.X, Kind.G),
    Op.FREE: (Kind.X, Kind.G, Kind.W, Kind.DW, Kind.SAVED, Kind.OPT),
    Op.OFFLOAD: (Kind.SAVED, Kind.OPT),
    Op.RELOAD: (Kind.SAVED, Kind.OPT),
}
EXCHANGED = (Kind.X, Kind.G)  # the kinds whose ALLREDUCE is an exchange between slices
COMPUTE = (Op.FWD, Op.BWD, Op.BWD_I, Op.BWD_W, Op.RECOMPUTE)
LETTER = {Op.FWD: "F", Op.BWD: "B", Op.BWD_I: "I", Op.BWD_W: "W"}  # of its direction; of a whole backward B
FORWARD_OPS = (Op.FETCH_W, Op.RECV, Op.SEND, Op.FWD, Op.ALLREDUCE, Op.FREE)  # the opcodes of a list of forwards
FORWARD_KINDS = (Kind.NONE, Kind.X, Kind.W)  # the kinds of buffer that they name there

_Value = TypeVar("_Value", covariant=True)  # an int, or a column of many instructions


class _Packed(Protocol[_Value]):
    @property
    def piece(self) -> _Value: ...
    @property
    def operand(self) -> _Value: ...


class Operands:
    """The operands that share a field, by their names; each is -1, or means nothing, where an instruction has none.

    `piece` is which piece of a stage's buffer is meant: the consumer of an x or g, the shard of a w or dw. `operand`
    is the one that is written last: `from`, `to`, `group` or `version`.
    """

    __slots__ = ()
    FIELD: ClassVar[dict[str, str]] = {
        "shard": "piece", "consumer": "piece", "tie": "stage",
        "source": "operand", "to": "operand", "group": "operand", "version": "operand",
    }  # fmt: skip

    @property
    def shard(self: _Packed[_Value]) -> _Value:
        """For weights, their gradients, opt and STEP: the shard k of the stage; -1 where it is not divided."""
        return self.piece

    @property
    def consumer(self: _Packed[_Value]) -> _Value:
        """For x: the stage that reads it; for g: the stage that gives it; -1 where the name has no consumer."""
        return self.piece

    @property
    def source(self: _Packed[_Value]) -> _Value:
        """For RECV, FETCH_W and ADD: the operand `from`, a rank."""
        return self.operand

    @property
    def to(self: _Packed[_Value]) -> _Value:
        """For SEND: a rank."""
        return self.operand

    @property
    def group(self: _Packed[_Value]) -> _Value:
        """For collectives: the index in the header's `groups` of the ranks that enter it."""
        return self.operand

    @property
    def version(self: _Packed[_Value]) -> _Value:
        """For compute, STEP and FREE of weights: the version of the weights; -1 where they have none."""
        return self.operand


class Fields(NamedTuple):
    """An instruction's fields; -1 where one does not apply. See `Operands` for the last two."""

    op: int
    kind: int
    stage: int
    mb: int
    piece: int
    operand: int


class Instruction(Fields, Operands):
    """One instruction of a rank."""

    __slots__ = ()

    def __str__(self) -> str:
        """The instruction as its line in a file."""
        fields = [f'"op": "{Op(self.op).name}"']
        for name in OPERANDS[Op(self.op)]:
            if name == "buf":
                fields.append(f'"buf": "{self.buffer}"')
            elif name in ("stage", "mb"):
                fields.append(f'"{name}": {self.stage if name == "stage" else self.mb}')
            elif name == "shard":
                fields += [f'"shard": {self.shard}'] * (self.shard >= 0)
            elif name == "version":
                fields += [f'"version": {self.version}'] * (self.version >= 0)
            else:
                fields.append(f'"{name}": {self.operand}')
        return "{" + ", ".join(fields) + "}"

    @property
    def tie(self) -> int:
        """For t.k: the tie k."""
        return self.stage

    @property
    def buffer(self) -> str:
        """The name of the buffer that the instruction names."""
        version = self.version if self.op == Op.FREE else -1
        return buffer_name(self.kind, self.stage, self.mb, self.piece, version)


def buffer_name(kind: int, stage: int, mb: int = -1, piece: int = -1, version: int = -1) -> str:
    """The name of a buffer: x.s.b, x.s.b.c, g.s.b, g.s.b.c, w.s, w.s/k, w.s@v, dw.s, t.k, saved.s.b, opt.s ..."""
    if kind in (Kind.W, Kind.DW, Kind.OPT) and piece >= 0:
        return f"{KIND_NAME[Kind(kind)]}.{stage}/{piece}"
    numbers = [str(number) for number in (stage, mb, piece) if number >= 0]
    return ".".join([KIND_NAME[Kind(kind)], *numbers]) + (f"@{version}" if version >= 0 else "")
