"""Ways to damage a schedule by hand, for tests of the checker."""

from __future__ import annotations

from schedgen.schemes.scheme import Sizes


def at(part, op, **operands):
    """The index of the first instruction with these operands (`from_` for from), of the last with last=True."""
    last = operands.pop("last", False)
    wanted = {"op": op, **{key.rstrip("_"): value for key, value in operands.items()}}
    places = [i for i, instruction in enumerate(part) if wanted.items() <= instruction.items()]
    assert places, f"the damage finds no {wanted}"
    return places[-1 if last else 0]


def drop(rank, op, **operands):
    def damage(ranks):
        del ranks[rank][at(ranks[rank], op, **operands)]

    return damage


def twice(rank, op, **operands):
    def damage(ranks):
        place = at(ranks[rank], op, **operands)
        ranks[rank].insert(place, ranks[rank][place])

    return damage


def swap(rank, first, second):
    def damage(ranks):
        part = ranks[rank]
        i, j = at(part, **first), at(part, **second)
        part[i], part[j] = part[j], part[i]

    return damage


def move(rank, what, before=None, after=None, to=None):
    """Take an instruction out and put it before or after another one, on rank `to` or where it was."""

    def damage(ranks):
        instruction = ranks[rank].pop(at(ranks[rank], **what))
        part = ranks[rank if to is None else to]
        part.insert(at(part, **before) if before else at(part, **after) + 1, instruction)

    return damage


def put(rank, instruction, before=None, after=None):
    def damage(ranks):
        part = ranks[rank]
        part.insert(at(part, **before) if before else at(part, **after) + 1, I(**instruction))

    return damage


def edit(rank, what, **operands):
    def damage(ranks):
        ranks[rank][at(ranks[rank], **what)].update(I(**operands))

    return damage


def both(*damages):
    def damage(ranks):
        for one in damages:
            one(ranks)

    return damage


def everywhere(make):
    return both(*(make(rank) for rank in range(4)))


def I(**operands):  # noqa: E743  an instruction, written as the tests write it
    return {key.rstrip("_"): value for key, value in operands.items()}


def job(op, stage, mb):
    return I(op=op, stage=stage, mb=mb)


def send(buf, to, **more):
    return I(op="SEND", buf=buf, to=to, **more)


def recv(buf, source, op="RECV"):
    return {"op": op, "buf": buf, "from": source}


def free(buf):
    return I(op="FREE", buf=buf)


NORM = {"op": "NORM"}


ONE_STAGE_A_WORKER = (
    "ddp", "fsdp", "gpipe", "1f1b", "lpp", "fslpp", "zb-h1", "zb-h2", "chimera", "1f1b-rr", "pipedream",
    "pipedream-2bw",
)  # fmt: skip


def sizes_of(scheme):
    return Sizes(4 if scheme in ONE_STAGE_A_WORKER else 8, 8, 4, 2 if "lpp" in scheme else None)
