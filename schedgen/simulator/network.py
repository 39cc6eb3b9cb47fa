"""The network that joins a machine's devices: what a message occupies on its way, and what a sum does.

A network has levels, the innermost first: devices of a host, hosts of a rack, racks. Rank r runs on device r. A message
goes by the innermost level whose groups have both its ranks. It occupies its sender's link out and its receiver's link
in for beta x bytes and, for every level up to its own that has a card, the card out of the sender's group and the card
in of the receiver's group below that level, for card x bytes; a long one in turns. It has arrived alpha after these.

An OFFLOAD and a RELOAD occupy the way out, or in, of a link between devices and the memory of their host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schedgen.util.arrays import AnyInts, Ints, Numbers, Small, Times
from schedgen.util.errors import UsageError, number_of

Alpha = float | tuple[tuple[float, float], ...]
TURNS = 8  # of the longest message that crosses a card
HOST = -1  # in place of a rank, as the end of a copy: the memory of the other end's host


class Level(NamedTuple):
    """How messages travel between ranks that share a group of this level and none below."""

    name: str
    devices: int | tuple[int, ...]  # of its groups, in the order of ranks: of each, or of every one; 0: one has all
    alpha: Alpha  # time per message; or by size: bytes from which it is so, and it
    beta: float  # time per byte
    card: float = 0.0  # time per byte that leaves, or enters, a group of the level below; 0: its links share nothing

    @property
    def alphas(self) -> tuple[tuple[float, float], ...]:
        """Bytes and the alpha of messages of at least so many, ascending from 0."""
        return self.alpha if isinstance(self.alpha, tuple) else ((0.0, self.alpha),)

    def latency(self, size: NDArray[Any]) -> Times:
        """The alpha of messages of these bytes."""
        begins, alphas = np.array(self.alphas).T
        found: Times = alphas[np.searchsorted(begins, size, side="right") - 1]
        return found


class HostLink(NamedTuple):
    """The link between devices and the memory of their host. It has two ways, and each carries one copy at a time."""

    alpha: float = 0.0  # time per copy
    beta: float = 0.0  # time per byte
    devices: int = 1  # that share a link, and the memory behind it, in the order of ranks
    memory: float = math.inf  # bytes for the devices of a link, together

    @property
    def is_known(self) -> bool:
        """Whether it is said what the link carries."""
        return self.alpha > 0 or self.beta > 0


class Network(NamedTuple):
    """Levels, the innermost first, and the devices."""

    levels: tuple[Level, ...]
    speed: float | tuple[float, ...] = 1.0  # of each device, at most 1: a job takes its duration divided by this
    memory: float | tuple[float, ...] = math.inf  # bytes of each device
    host: HostLink = HostLink()

    @property
    def alpha(self) -> float:
        """The least alpha of a message."""
        return min(alpha for level in self.levels for _, alpha in level.alphas)

    @property
    def beta(self) -> float:
        """The least beta of a message."""
        return min(level.beta for level in self.levels)

    @property
    def is_free(self) -> bool:
        """Whether messages and copies take no time, and wait for no receive or link."""
        times = [time for each in self.levels for time in (each.beta, each.card, *(alpha for _, alpha in each.alphas))]
        return not (self.host.is_known or any(times))

    @property
    def devices(self) -> int | None:
        """How many devices there are; None: as many as a schedule needs."""
        return min(self.counts.values(), default=None)

    @property
    def counts(self) -> dict[str, int]:
        """How many devices there are according to each list that has an entry for every one or for every group."""
        sums = {f"level '{each.name}'": sum(each.devices) for each in self.levels if isinstance(each.devices, tuple)}
        if isinstance(last := self.levels[-1].devices, int) and last:
            sums[f"level '{self.levels[-1].name}'"] = last
        lists = {"speed": self.speed, "memory": self.memory}
        return sums | {name: len(each) for name, each in lists.items() if isinstance(each, tuple)}

    def least_memory(self, workers: int) -> float:
        """The bytes of the smallest of these workers' devices; infinity where the machine does not say."""
        return float(self.by_rank(self.memory, workers).min())

    def slowest(self, workers: int) -> float:
        """The largest time per byte of a message between two of these workers."""
        links = Links(self, workers)
        used = links.level(np.arange(workers), np.zeros(workers, np.int64)).max() + 1
        return max(max(level.beta, level.card) for level in self.levels[:used])

    def slowed(self, times: Sequence[tuple[int, float]], workers: int) -> Network:
        """The network with ranks that take so many times as long; UsageError if there is no such rank."""
        speed = self.by_rank(self.speed, workers)
        for number, (rank, factor) in enumerate(times):
            if rank >= workers or rank in dict(times[:number]):
                why = f"there are ranks 0 to {workers - 1}" if rank >= workers else f"rank {rank} is given twice"
                raise UsageError(f"--slow {rank}={factor:g}: {why}")
            speed[rank] /= factor
        return self._replace(speed=tuple(speed.tolist()))

    def check(self, workers: int) -> None:
        """UsageError if a schedule of this many workers does not fit."""
        if self.devices is not None and workers > self.devices:
            raise UsageError(
                f"the machine has {number_of(self.devices, 'device')}, but there are {number_of(workers, 'worker')}"
            )

    def hosts(self, workers: int) -> Ints:
        """By rank, the number of its group of the innermost level; UsageError if there are too few devices."""
        self.check(workers)
        hosts: Ints = self.groups(workers)[0]
        return hosts

    def by_rank(self, amount: float | tuple[float, ...], workers: int) -> Times:
        """An amount of each device as an array, shape (workers,); UsageError if there are too few devices."""
        self.check(workers)
        return np.array(amount[:workers]) if isinstance(amount, tuple) else np.full(workers, float(amount))

    def groups(self, workers: int) -> Ints:
        """By level and rank: the number of its group."""
        groups = np.zeros((len(self.levels), workers), np.int32)
        for row, level in zip(groups, self.levels, strict=True):
            if isinstance(level.devices, tuple):
                row[:] = np.searchsorted([*accumulate(level.devices)], np.arange(workers), side="right")
            elif level.devices:
                row[:] = np.arange(workers) // level.devices
        return groups


class Paths(NamedTuple):
    """What messages occupy: message k is on `link[first[k] : first[k + 1]]`, each for `hold` in each of its turns."""

    first: Ints
    link: Ints
    hold: Times
    turns: Small = np.ones(0, np.int8)  # by message: a power of two
    first_turn: Numbers = np.zeros(0, np.int64)  # by message: of those with several, which are numbered
    path: Ints = np.zeros(0, np.int32)  # by message: of those with several turns, which links they occupy, as a number

    def from_last_turn(self, lasts: Times) -> Times:
        """How long rows take; of messages, from the beginning of their last turn."""
        rest, shared = lasts.copy(), np.flatnonzero(self.turns[: len(lasts)] > 1)
        longest = np.maximum.reduceat(np.append(self.hold, 0.0), self.first[:-1]) if len(shared) else self.hold
        rest[shared] -= (self.turns[shared] - 1) * longest[shared]
        return rest


class Sums(NamedTuple):
    """Sums over groups of ranks, each divided into one part for every link and card that it occupies."""

    first: Numbers  # by collective: its first part, and the end
    collective: Ints  # by part
    latency: Times  # by collective: from the end of its last part until it is done


class LinkUse(NamedTuple):
    """When links and cards are occupied: arrays with an entry for each message, or sum, on each; by link and start."""

    names: list[str]  # of the links that are used
    link: Numbers  # an index of names
    row: Numbers  # of the program: the SEND, or an ALLREDUCE of the sum
    start: Times
    length: Times


class SumOfAByte(NamedTuple):
    """What a sum over a group of ranks occupies for each byte that is summed."""

    link: Ints
    hold: Times
    furthest: Level | None  # that of the two members that are furthest apart; None: there is one member
    members: int
    exchange: float  # how long a sum of a few numbers takes: a round of messages for each doubling of members

    def latency(self, size: float) -> float:
        """From the end of the last part of a sum of `size` bytes until it is done: pieces arrive, and then totals."""
        return 2 * float(self.furthest.latency(np.array(size / self.members))) if self.furthest and size else 0.0


class Links:
    """The links and cards of a network for so many ranks, numbered: ranks out, ranks in, cards out and in by level."""

    def __init__(self, network: Network, workers: int) -> None:
        network.check(workers)
        self.workers, self.levels, self.is_free = workers, network.levels, network.is_free
        self.group = network.groups(workers)
        self.beta = np.array([level.beta for level in network.levels])
        self.count = 2 * workers
        self.host, self.host_links = network.host, -(-workers // network.host.devices)
        self.cards: list[tuple[int, int, float, int]] = []  # level, first link, time per byte, groups
        for k, level in enumerate(network.levels):
            if k and level.card:
                groups = int(self.group[k - 1, -1]) + 1
                self.cards.append((k, self.count, level.card, groups))
                self.count += 2 * groups
        self.first_of_host = self.count
        self.count += 2 * self.host_links * bool(self.host.beta)

    @property
    def names(self) -> list[str]:
        """By link: whose it is and which way it goes, as in "0 out" or "host 1 in"."""
        owners = [(self.workers, "")] + [(groups, f"{self.levels[k - 1].name} ") for k, _, _, groups in self.cards]
        owners.append((self.host_links, "host memory "))
        return [f"{owner}{i} {way}" for count, owner in owners for way in ("out", "in") for i in range(count)]

    @property
    def is_uneven(self) -> bool:
        """Whether it matters which of the ranks are neighbours."""
        return len(self.levels) > 1 and int(self.group[0, -1]) > 0 and int(np.diff(self.group[0]).min()) == 0

    def level(self, source: AnyInts, to: AnyInts) -> Numbers:
        """The level by which messages go between these ranks."""
        level: Numbers = (self.group[:, source] != self.group[:, to]).sum(axis=0)
        return level

    def messages(self, source: AnyInts, to: AnyInts, size: Numbers) -> tuple[Paths, Times]:
        """The paths of messages of `size` bytes, and how long each takes where nothing else is on its path.

        One of the ends is HOST where the message is a copy to or from the memory of the host.
        """
        level, time, alpha = self.level(source, to), np.zeros(len(size)), np.zeros(len(size))
        for k, each in enumerate(self.levels):
            of = slice(None) if len(self.levels) == 1 else np.flatnonzero(level == k)
            time[of], alpha[of] = each.beta * size[of], each.latency(size[of])
        copies = np.flatnonzero(np.minimum(source, to) == HOST)
        time[copies], alpha[copies], level[copies] = 0.0, self.host.alpha, 0
        columns = [(source, time), (self.workers + to, time)]
        for k, first, card, groups in self.cards:
            below, on_card = self.group[k - 1], np.where(level >= k, card * size, 0.0)
            columns += [(first + below[source], on_card), (first + groups + below[to], on_card)]
        if len(copies):
            on_host, hold = np.maximum(source, to) // self.host.devices, np.zeros(len(size))
            hold[copies] = self.host.beta * size[copies]
            columns.append((self.first_of_host + on_host + self.host_links * (source == HOST), hold))
        links, holds = zip(*columns, strict=True)
        link, hold = np.stack(links, axis=1, dtype=np.int32).ravel(), np.stack(holds, axis=1).ravel()
        is_used = slice(None) if hold.all() else np.flatnonzero(hold)
        # Along the columns, which are few, NumPy's own sums and maxima are slow.
        used = np.concatenate([[0], sum((each > 0).astype(np.int64) for each in holds)])
        lasts = reduce(np.maximum, holds) + np.where(size > 0, alpha, 0.0)
        return Paths(np.cumsum(used), link[is_used], hold[is_used]), lasts

    def in_turns(self, paths: Paths) -> Paths:
        """The paths with turns for messages that cross a card: each of at most 1 / TURNS of the longest one's time."""
        if not self.cards:
            return paths
        count = np.diff(paths.first)
        message = np.repeat(np.arange(len(count)), count)
        longest, on_card = np.zeros((2, len(count)))
        np.maximum.at(longest, message, paths.hold)
        is_card = (paths.link >= 2 * self.workers) & (paths.link < self.first_of_host)
        on_card[message[is_card]] = longest[message[is_card]]
        if not (most := on_card.max(initial=0.0)):
            return paths
        turns = np.exp2(np.ceil(np.log2(np.maximum(TURNS * on_card / most, 1.0)))).astype(np.int8)
        first_turn = np.cumsum(np.where(turns > 1, turns, 0)) - turns
        begin, path = paths.first[:-1][turns > 1], np.full(len(count), -1, np.int32)
        second = paths.link[begin + (count[turns > 1] > 1)]  # the first two links tell the others
        path[turns > 1] = np.unique(paths.link[begin].astype(np.int64) * self.count + second, return_inverse=True)[1]
        return Paths(paths.first, paths.link, paths.hold / turns[message], turns, first_turn, path)

    def sum_of(self, members: Sequence[int]) -> SumOfAByte:
        """What a sum of one byte over these ranks occupies.

        Every member sends a part of its own summand to each other member, and then the total of its own part: of n
        bytes, 2 n / m to each of the m - 1 others.
        """
        ranks, m = np.array(members), len(members)
        near = np.array([np.bincount(group[ranks])[group[ranks]] for group in self.group])  # members in its group
        peers = np.diff(near, axis=0, prepend=1)  # by level and member: to whom its messages go by that level
        links = [ranks, self.workers + ranks]
        times = [2 / m * (self.beta[:, None] * peers).sum(axis=0)] * 2
        for k, first, card, groups in self.cards:
            count = np.bincount(self.group[k - 1, ranks], minlength=groups)
            links += [first + np.arange(groups), first + groups + np.arange(groups)]
            times += [2 / m * card * count * (m - count)] * 2
        link, hold = np.concatenate(links), np.concatenate(times)
        # The groups below each level that have members, in the group of that level that has most of them.
        below = np.concatenate([np.arange(self.workers)[None], self.group[:-1]])
        most = [
            max(len({*below[k][ranks[self.group[k, ranks] == group]]}) for group in {*self.group[k, ranks]})
            for k in range(len(self.levels))
        ]
        furthest = self.levels[np.flatnonzero(np.array(most) > 1)[-1]] if m > 1 else None
        exchange = sum(level.alphas[0][1] * math.ceil(math.log2(n)) for level, n in zip(self.levels, most, strict=True))
        return SumOfAByte(link[hold > 0].astype(np.int32), hold[hold > 0], furthest, m, float(exchange))


def topology(hosts: int, devices: int, alpha: Sequence[Alpha], beta: Sequence[float]) -> Network:
    """Hosts of so many devices; alpha and beta inside and between hosts. The card of a host has the beta between.

    Alphas are seconds and betas seconds a byte, or both in another unit: that of the costs that go with the network.
    """
    inside = Level("host", (devices,) * hosts, alpha[0], beta[0])
    return Network((inside, Level("network", 0, alpha[-1], beta[-1], beta[-1])) if hosts > 1 else (inside,))
