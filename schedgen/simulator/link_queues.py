"""Messages at links, as `execution.py` moves them: which start, which wait, and where.

A ready message starts if all links of its path are free. Else it waits at the last of them to become free; messages
wait there in the order in which they were ready. A message of several turns occupies its path for one of them, and is
then the last that was ready; after its last turn the next message of the same path is.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np

from schedgen.simulator.network import Paths
from schedgen.util.arrays import Ints, Numbers, Small, Times
from schedgen.util.jit import kernel


class Queues(NamedTuple):
    """Messages at links. SENDs are numbered by row and, after all rows, the parts of sums."""

    turn: Times  # by turn, as numbered by `Paths.first_turn`: when it began
    ready: Numbers  # shape (1,): the last of `order`
    # By message.
    order: Ints  # in which those that wait were ready, or had their last turn; 0: it has not waited since then
    turns_left: Small
    behind: Ints  # the next message of the same path, which begins when this one has no turns left; -1: none
    next_waiting: Ints  # the next message that waits at the same link; -1: none
    # By link.
    free_at: Times
    waiting: Ints  # the first message that waits; -1: none
    last_waiting: Ints
    due: Times  # when that one is looked at again; infinity: never
    place: Numbers  # its entry of `order`
    next_link: Ints  # a tournament tree: node k is the link of nodes 2 k and 2 k + 1 that is due first, then by `place`
    latest: Ints  # by path of several turns, as numbered by `Paths.path`: the last message that was ready; -1: none


def new_queues(paths: Paths, links: int) -> Queues:
    """No message is ready yet."""
    messages, several, leaves = len(paths.turns), (paths.turns > 1).any(), 1 << (links - 1).bit_length()
    begins = [np.arange(0, leaves, leaves >> k) for k in range(leaves.bit_length())]  # of the leaves of nodes, by level
    return Queues(
        turn=np.zeros(int(paths.turns[paths.turns > 1].sum(dtype=np.int64))),
        ready=np.zeros(1, np.int64),
        order=np.zeros(messages, np.int32),
        turns_left=paths.turns.copy() if several else paths.turns,
        behind=np.full(messages if several else 0, -1, np.int32),
        next_waiting=np.zeros(messages, np.int32),
        free_at=np.zeros(links),
        waiting=np.full(links, -1, np.int32),
        last_waiting=np.full(links, -1, np.int32),
        due=np.full(leaves, np.inf),
        place=np.zeros(leaves, np.int64),
        next_link=np.concatenate([[0], *begins]).astype(np.int32),
        latest=np.full(int(paths.path.max(initial=-1)) + 1, -1, np.int32),
    )


@kernel
def set_due(link: int, now: float, queues: Queues) -> None:
    """Note when the first message that waits at a link is looked at again."""
    due, place, next_link, message = queues.due, queues.place, queues.next_link, queues.waiting[link]
    due[link] = inf
    if message >= 0:
        due[link], place[link] = max(queues.free_at[link], now), queues.order[message]
    node = len(due) + link
    while node > 1:
        node //= 2
        best, other = next_link[2 * node], next_link[2 * node + 1]
        if due[other] < due[best] or (due[other] == due[best] and place[other] < place[best]):
            best = other
        if next_link[node] == best and best != link:
            return
        next_link[node] = best


@kernel
def queue(message: int, link: int, now: float, queues: Queues) -> None:
    """Let a message wait at a link, behind those that were ready before it."""
    order, following, waiting, last_waiting = queues.order, queues.next_waiting, queues.waiting, queues.last_waiting
    if not order[message]:
        queues.ready[0] += 1
        order[message] = queues.ready[0]
    first = waiting[link]
    if first < 0 or order[first] > order[message]:
        following[message], waiting[link] = first, message
        set_due(link, now, queues)
    else:
        before = last_waiting[link] if order[last_waiting[link]] < order[message] else first
        while following[before] >= 0 and order[following[before]] < order[message]:
            before = following[before]
        following[message], following[before] = following[before], message
    if following[message] < 0:
        last_waiting[link] = message


@kernel
def take_turn(message: int, now: float, paths: Paths, queues: Queues) -> bool:
    """Start a message, or its next turn, if its path is free; else it waits. Returns whether its last turn starts."""
    begin, end, left = paths.first[message], paths.first[message + 1], queues.turns_left
    last, free_at, link = -1, queues.free_at, paths.link  # last: of the links of the path, the last to become free
    for k in range(begin, end):
        if free_at[link[k]] > now and (last < 0 or free_at[link[k]] >= free_at[last]):
            last = int(link[k])
    if last >= 0:
        queue(message, last, now, queues)
        return False
    for k in range(begin, end):
        free_at[link[k]] = now + paths.hold[k]
        if last < 0 or free_at[link[k]] >= free_at[last]:
            last = int(link[k])
    if not len(queues.latest) or paths.turns[message] == 1:
        return True
    turns = paths.turns[message]
    queues.turn[paths.first_turn[message] + turns - left[message]] = now
    left[message] -= 1
    following = message if left[message] else queues.behind[message]
    if following >= 0:
        queues.order[following] = 0
        queue(following, last, now, queues)
    return bool(left[message] == 0)


@kernel
def make_ready(message: int, now: float, paths: Paths, queues: Queues) -> bool:
    """A message is ready: as `take_turn`, unless it has to wait behind another of its path."""
    if len(queues.latest) and paths.turns[message] > 1:
        before = queues.latest[paths.path[message]]
        queues.latest[paths.path[message]] = message
        if before >= 0 and queues.turns_left[before]:
            queues.behind[before] = message
            return False
    return take_turn(message, now, paths, queues)
