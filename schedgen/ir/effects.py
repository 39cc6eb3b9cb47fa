"""The effects of every instruction on buffers, as the table `EFFECTS`: a new instruction is a new entry.

`accesses.py` looks up the effects of each row of a program; the checker, the simulator, the exports and the passes
follow buffers by these accesses. Only code that executes lists states the effects a second time;
`tests/helpers/reference_machine.py` does so deliberately, without this table.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from schedgen.ir.instructions import OPERANDS, Kind, Op


class Buffer(IntEnum):
    """The kinds of buffers that take memory on a rank."""

    X = 0  # x, computed or received
    G = 1  # g
    W = 2  # weights
    DW = 3  # their gradient, gathered on this rank
    PARTIAL = 4  # a dw received from another rank, not added yet
    SAVED = 5  # what a forward keeps for its backward
    HALF = 6  # what a BWD_I keeps in addition for its BWD_W
    HOST = 7  # in the memory of the host: what an OFFLOAD copies there, until its RELOAD
    OPT = 8  # the state of an optimizer, from its RELOAD to its FREE, where it lives in the memory of the host


class Effect(IntEnum):
    """What happens to a buffer."""

    READ = 0  # it exists, and still does afterwards
    SEND = 1  # READ, by a message that may still be in flight after the instruction
    DEFINE = 2  # it does not exist before, and exists afterwards
    RECEIVE = 3  # DEFINE, by a message: the next instruction that touches it waits for the message
    ADD = 4  # a summand is added to it; DEFINE if it does not exist
    CHANGE = 5  # it is rewritten in place, after the messages that send it have left
    END = 6  # it exists before and not afterwards, after the messages that send it have left


class Which(IntEnum):
    """Which buffers of a kind are meant, for an instruction at (stage s, microbatch b)."""

    NAMED = 0  # the one that `buf`, or `stage` and `shard`, name; for a partial, the one from rank `from`
    JOB = 1  # the one of this job
    UNREDONE = 2  # the one of this job; none if its forward saves nothing, as where a RECOMPUTE redoes it
    INPUTS = 3  # for each producer p of s: x.p.b as s reads it, or g.p.b as s gives it
    OUTPUTS = 4  # for each consumer of s: x.s.b as s gives it (only one x if all read the same), or g.s.b as s reads it
    SHARDS = 5  # for each shard of the weights of s, or of their gradient
    TIED = 6  # for each stage of tie k that this rank owns
    BEFORE = 7  # version v - 1 of the weights named; none where weights have no versions
    IN_PLACE = 8  # the weights named, unless version v - 1 has a FREE: v overwrites it
    BESIDE = 9  # the weights named, if version v - 1 has a FREE: v gets memory of its own
    PARTS = 10  # the gradient of the weights named, in all its parts
    ON_HOST = 11  # the state of the optimizer of the weights named, if it lives in the memory of the host


class Does(NamedTuple):
    """One effect on some buffers of a kind."""

    effect: Effect
    buffer: Buffer
    which: Which


X, G, W, DW, PARTIAL, SAVED, HALF, HOST, OPT = Buffer
READ, SEND, DEFINE, RECEIVE, ADD, CHANGE, END = Effect
NAMED, JOB, UNREDONE, INPUTS, OUTPUTS, SHARDS, TIED, BEFORE, IN_PLACE, BESIDE, PARTS, ON_HOST = Which
Form = dict[Kind, tuple[Does, ...]]  # what an opcode does, by the kind of buffer that it names


def _job(*does: Does) -> Form:
    return {Kind.NONE: does}


def _named(effect: Effect, *buffers: Buffer) -> Form:
    """The form of an opcode with one effect on the buffer that it names, which may be of these kinds."""
    return {Kind[buffer.name]: (Does(effect, buffer, NAMED),) for buffer in buffers}


_FORWARD = Does(READ, W, SHARDS), Does(READ, X, INPUTS)
_BACKWARD = *_FORWARD, Does(READ, G, OUTPUTS)

# Effects are in the order in which memory is taken and released. A buffer that an instruction ends takes memory
# until the instruction is done. A message goes to rank `to` or comes from rank `from`; all ranks of `group` enter an
# ALLREDUCE or NORM together.
EFFECTS: dict[Op, Form] = {
    Op.FETCH_W: _named(RECEIVE, W),
    Op.RECV: _named(RECEIVE, X, G)
    | {Kind.DW: (Does(RECEIVE, PARTIAL, NAMED),), Kind.SAVED: (Does(RECEIVE, SAVED, JOB),)},
    Op.SEND: _named(SEND, X, G, W, DW) | {Kind.SAVED: (Does(SEND, SAVED, JOB),)},
    Op.FWD: _job(*_FORWARD, Does(DEFINE, SAVED, UNREDONE), Does(DEFINE, X, OUTPUTS)),
    Op.RECOMPUTE: _job(*_FORWARD, Does(DEFINE, SAVED, JOB)),
    Op.BWD: _job(*_BACKWARD, Does(DEFINE, G, INPUTS), Does(ADD, DW, SHARDS), Does(END, SAVED, JOB)),
    Op.BWD_I: _job(*_BACKWARD, Does(READ, SAVED, JOB), Does(DEFINE, HALF, JOB), Does(DEFINE, G, INPUTS)),
    Op.BWD_W: _job(*_BACKWARD, Does(ADD, DW, SHARDS), Does(END, HALF, JOB), Does(END, SAVED, JOB)),
    Op.ADD: {Kind.DW: (Does(ADD, DW, NAMED), Does(END, PARTIAL, NAMED))},
    Op.ALLREDUCE: _named(CHANGE, X, G) | _named(ADD, DW) | {Kind.T: (Does(ADD, DW, TIED),)},
    Op.NORM: _job(),
    Op.STEP: _job(
        Does(READ, W, BEFORE),
        Does(CHANGE, W, IN_PLACE),
        Does(DEFINE, W, BESIDE),
        Does(READ, DW, PARTS),
        Does(CHANGE, OPT, ON_HOST),
    ),
    Op.FREE: _named(END, X, G, W, DW, OPT) | {Kind.SAVED: (Does(END, SAVED, JOB),)},
    Op.OFFLOAD: _named(SEND, OPT) | {Kind.SAVED: (Does(SEND, SAVED, JOB), Does(DEFINE, HOST, JOB))},
    Op.RELOAD: _named(RECEIVE, OPT) | {Kind.SAVED: (Does(RECEIVE, SAVED, JOB), Does(END, HOST, JOB))},
}


def ops_that(effect: Effect) -> tuple[Op, ...]:
    """The opcodes that have this effect."""
    return tuple(
        op for op, form in EFFECTS.items() if any(does.effect == effect for all in form.values() for does in all)
    )


COPIES = (Op.OFFLOAD, Op.RELOAD)  # messages to and from the memory of the rank's own host
SENDERS = tuple(op for op in ops_that(SEND) if op not in COPIES)  # to another rank
RECEIVERS = tuple(op for op in ops_that(RECEIVE) if op not in COPIES)
COLLECTIVES = tuple(op for op in Op if "group" in OPERANDS[op])
