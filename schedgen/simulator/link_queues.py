"""Messages at links, as `execution.py` moves them: which start, which wait, and where.

A ready message starts if all links of its path are free. Else it waits at the last of them to become free; messages
wait there in the order in which they were ready. A message of several turns occupies its path for one of them, and is
then the last that was ready; after its last turn the next message of the same path is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedgen.simulator.network import Paths
from schedgen.util.arrays import Ints, Numbers, Small, Times
from schedgen.util.heap import set_leaf
from schedgen.util.jit import kernel


class Queues(NamedTuple):
    """Messages at links. SENDs are numbered by row and, after all rows, the parts of sums."""

    turn: Times  # by turn, as numbered by `Paths.first_turn`: when it began
    ready: Numbers  # shape (1,): the next of `order`
    # By message.
    order: Numbers  # in which they were ready, or had their last turn
    turns_left: Small
    behind: Ints  # the next message of the same path, which begins when this one has no turns left; -1: none
    next_waiting: Ints  # the next message that waits at the same link; -1: none
    # By link.
    free_at: Times
    waiting: Ints  # the first message that waits; -1: none
    last_waiting: Ints
    latest: Ints  # by path of several turns, as numbered by `Paths.path`: the last message that was ready; -1: none


def new_queues(paths: Paths, links: int) -> Queues:
    """No message is ready yet."""
    messages = len(paths.turns)
    return Queues(
        turn=np.zeros(int(paths.turns[paths.turns > 1].sum(dtype=np.int64))),
        ready=np.zeros(1, np.int64),
        order=np.zeros(messages, np.int64),
        turns_left=paths.turns.copy(),
        behind=np.full(messages, -1, np.int32),
        next_waiting=np.full(messages, -1, np.int32),
        free_at=np.zeros(links),
        waiting=np.full(links, -1, np.int32),
        last_waiting=np.full(links, -1, np.int32),
        latest=np.full(int(paths.path.max(initial=-1)) + 1, -1, np.int32),
    )


@kernel
def put_last(message: int, queues: Queues) -> None:
    """The message is ready, behind all that are."""
    queues.order[message] = queues.ready[0]
    queues.ready[0] += 1


@kernel
def queue(message: int, link: int, queues: Queues, tree: Times) -> None:
    """Let a message wait at a link, behind those that were ready before it."""
    order, following, waiting, last_waiting = queues.order, queues.next_waiting, queues.waiting, queues.last_waiting
    first = waiting[link]
    if first < 0:
        set_leaf(tree, len(tree) // 2 + link, queues.free_at[link])
        waiting[link] = last_waiting[link] = message
        following[message] = -1
    elif order[first] > order[message]:
        following[message], waiting[link] = first, message
    else:
        before = last_waiting[link]
        if order[before] < order[message]:
            last_waiting[link], following[message] = message, -1
        else:
            before = first
            while order[following[before]] < order[message]:
                before = following[before]
            following[message] = following[before]
        following[before] = message


@kernel
def take_turn(message: int, now: float, paths: Paths, queues: Queues, tree: Times) -> bool:
    """Start a message, or its next turn, if its path is free; else it waits. Returns whether its last turn starts."""
    begin, end, turns, left = paths.first[message], paths.first[message + 1], paths.turns[message], queues.turns_left
    last, free_at, link = -1, queues.free_at, paths.link  # last: of the links of the path, the last to become free
    for k in range(begin, end):
        if free_at[link[k]] > now and (last < 0 or free_at[link[k]] >= free_at[last]):
            last = int(link[k])
    if last >= 0:
        queue(message, last, queues, tree)
        return False
    for k in range(begin, end):
        free_at[link[k]] = now + paths.hold[k]
        if last < 0 or free_at[link[k]] >= free_at[last]:
            last = int(link[k])
    if turns == 1:
        return True
    queues.turn[paths.first_turn[message] + turns - left[message]] = now
    left[message] -= 1
    following = message if left[message] else queues.behind[message]
    if following >= 0:
        put_last(following, queues)
        queue(following, last, queues, tree)
    return bool(left[message] == 0)


@kernel
def make_ready(message: int, now: float, paths: Paths, queues: Queues, tree: Times) -> bool:
    """A message is ready: as `take_turn`, unless it has to wait behind another of its path."""
    if paths.turns[message] > 1:
        before = queues.latest[paths.path[message]]
        queues.latest[paths.path[message]] = message
        if before >= 0 and queues.turns_left[before]:
            queues.behind[before] = message
            return False
    put_last(message, queues)
    return take_turn(message, now, paths, queues, tree)
