"""Schedules, and ways to damage them by hand, for tests of the checker."""

from __future__ import annotations

TIES = [[0, 3], [1, 2]]
# Besides the golden schedules: how they are compiled, and the graph file.
BASES = {
    "stash": ("pipedream --stages 2 --microbatches 4", {}),
    "replicas": ("pipedream --stages 2 --microbatches 4 --replicas 2,1", {}),
    "vertical": ("pipedream --stages 2 --microbatches 4 --updates vertical", {}),
    "buffers": ("pipedream --stages 2 --microbatches 6 --updates 2bw", {}),
    "forwards": ("1f1b --stages 2 --microbatches 2 --forward", {}),
    "forwards of slices": ("1f1b --stages 2 --microbatches 2 --tensor 2 --forward", {}),
    "redone": ("1f1b --stages 2 --microbatches 2 --recompute 1", {}),
    "limited": ("gpipe --stages 4 --microbatches 8 --mode greedy --memory-limit 4", {}),
    "tied": ("1f1b --microbatches 2", {"stages": 4, "tied": TIES[:1]}),
    "ties": ("1f1b --microbatches 2", {"stages": 4, "tied": TIES}),
    "ties of all": ("ddp --microbatches 4 --workers 4", {"stages": 4, "tied": TIES}),
    "tie of one": ("zb-v --microbatches 4", {"stages": 8, "tied": [[0, 7]]}),
    "outputs": ("1f1b --microbatches 2", {"stages": 4, "edges": [[0, 1], [0, 3], [1, 2], [2, 3]], "per_consumer": [0]}),
    "shards": ("fsdp --stages 2 --microbatches 2 --workers 2 --shards 2", {}),
    "sliced": ("1f1b --stages 2 --microbatches 2 --tensor 2", {}),
    "slices": (
        "1f1b --stages 2 --microbatches 1 --tensor 2",
        {"stages": 4},
    ),  # of two substages; the last stage is whole
    "ring": ("ddp --stages 2 --microbatches 4 --workers 4 --sums ring", {}),
    "two sums": ("ddp --stages 1 --microbatches 6 --workers 3 --sums tree", {}),
}


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


def append(rank, instruction):
    def damage(ranks):
        ranks[rank].append(instruction)

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


def step(stage, version=None):
    return I(op="STEP", stage=stage) | ({} if version is None else I(version=version))


def allreduce(buf, group=None):
    return I(op="ALLREDUCE", buf=buf) | ({} if group is None else I(group=group))


NORM = {"op": "NORM"}
