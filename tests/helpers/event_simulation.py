"""A second simulation, written for clarity: at every moment it looks at all messages and ranks there are."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from schedgen.analysis import analyse
from schedgen.ir.cost import DIRECTION, by_stage, durations, redo_duration
from schedgen.ir.effects import COPIES
from schedgen.ir.instructions import Kind, Op
from schedgen.simulator.buffer_sizes import buffer_sizes, message_bytes, summed_bytes
from schedgen.simulator.simulate import MESSAGES


def level_of(network, a, b):
    """The innermost level that has both ranks in a group, and their groups below every level up to it."""
    for k, level in enumerate(network.levels):
        groups = [group_of(level, rank) for rank in (a, b)]
        if groups[0] == groups[1]:
            return k
    raise AssertionError("the outermost level has all ranks")


def group_of(level, rank):
    if not level.devices:
        return 0
    if isinstance(level.devices, int):
        return rank // level.devices
    ends = np.cumsum(level.devices)
    return int(np.argmax(ends > rank))


def path(network, a, b, size):
    """What a message occupies: {link: time}."""
    reached = level_of(network, a, b)
    links = {("out", a): network.levels[reached].beta * size, ("in", b): network.levels[reached].beta * size}
    for k in range(1, reached + 1):
        if card := network.levels[k].card:
            below = network.levels[k - 1]
            links["out", k, group_of(below, a)] = links["in", k, group_of(below, b)] = card * size
    return {link: time for link, time in links.items() if time > 0}


def on_card(links):
    """How long a message crosses cards and what is on the way to them; 0: it crosses none."""
    return max(links.values()) if any(len(link) == 3 and link[0] != "host" for link in links) else 0.0


class Message:
    def __init__(self, links, alpha=0.0, collective=None, row=None, longest=0.0):
        """In as many turns as it needs for none to be longer than an eighth of the longest message."""
        self.links, self.alpha, self.collective, self.row, self.turns = links, alpha, collective, row, 1
        while on_card(links) / self.turns > longest / 8:
            self.turns *= 2
        self.links = {link: time / self.turns for link, time in links.items()}


class Sum:
    def __init__(self, members):
        self.left, self.open, self.done, self.last = members, 0, None, 0.0


def simulate(program, cost, machine):
    """(start of every row, arrival of every message and copy)."""
    header, table, network = program.header, program.rows, machine.network
    waits, lifetimes, messages = analyse(program).waits, analyse(program).lifetimes, analyse(program).messages
    sizes = buffer_sizes(machine, header.stages, len(header.graph.edges))
    sends = program.rows_of(*MESSAGES)
    bytes = dict(zip(sends.tolist(), message_bytes(program, sizes, sends).tolist(), strict=True))
    partner = dict(zip(messages.sends.tolist(), messages.receives.tolist(), strict=True))
    sender = {receive: send for send, receive in partner.items()}
    summed = summed_bytes(program, sizes)
    lengths = durations(cost, len(header.directions))
    if "I" in lengths:
        lengths["B"] = cost.get("B", lengths["I"] + lengths["W"])
    speed = network.speed if isinstance(network.speed, tuple) else (network.speed,) * header.workers
    first_of_pass = awaited_sums(program, waits)
    sums = [Sum(int(members)) for members in waits.members]
    at, clock = program.bounds[:-1].tolist(), [0.0] * header.workers
    reached, start, arrival = set(), np.zeros(len(program)), {}
    free_at, waiting, behind, now, norm = defaultdict(float), [], defaultdict(list), 0.0, []

    def of_message(send):
        return path(network, int(table.rank[send]), int(table.to[send]), bytes[send])

    def of_sum(row):
        members, links = header.groups[table.group[row]], defaultdict(float)
        for a in members:
            for b in members:
                if a != b:
                    for link, time in path(network, a, b, 2 * int(summed[row]) / len(members)).items():
                        links[link] += time
        return links

    sums_of = [{link: time} for row in program.rows_of(Op.ALLREDUCE) for link, time in of_sum(row).items()]
    longest = max(map(on_card, [*map(of_message, partner), *sums_of]), default=0.0)

    def join(message):
        """A ready message waits for its path or, if it has turns, behind the one of the same path that has some."""
        same = behind[tuple(message.links)] if message.turns > 1 else []
        same.append(message)
        if same[0] is message:
            waiting.append(message)
        offer()

    def offer():
        for message in [*waiting]:
            if all(free_at[link] <= now for link in message.links):
                waiting.remove(message)
                for link, time in message.links.items():
                    free_at[link] = now + time
                message.turns -= 1
                if message.turns:
                    waiting.append(message)
                    continue
                if message in (same := behind[tuple(message.links)]):
                    same.remove(message)
                    waiting.extend(same[:1])
                end = now + max(message.links.values(), default=0.0) + message.alpha
                if message.collective is None:
                    arrival[message.row] = end
                else:
                    of = message.collective
                    of.last, of.open = max(of.last, end), of.open - 1
                    if not of.open and not of.left:
                        of.done = of.last + of.alpha

    def duration(row, rank):
        op, stage = table.op[row], table.stage[row]
        if op == Op.STEP:
            return machine.step_times(header)[stage] / speed[rank]
        if op not in DIRECTION:
            return 0.0
        length = redo_duration(cost) if op == Op.RECOMPUTE else lengths[DIRECTION[op]]
        return by_stage(length, header.stages)[stage] / speed[rank]

    def enter(row):
        of, n = sums[waits.collective[row]], int(summed[row])
        members = header.groups[table.group[row]]
        of.left -= 1
        if of.left:
            return
        if table.op[row] == Op.NORM:
            of.done = now
            return
        links = of_sum(row)
        furthest = max((level_of(network, members[0], b) for b in members), default=0)
        alpha = network.levels[furthest].latency(np.array(n / len(members)))
        of.alpha = 2 * float(alpha) if n and len(members) > 1 else 0.0
        of.open, of.last = len(links), now
        if not links:
            of.done = now + of.alpha
        order = {"out": 0, "in": 1}
        cards = sorted((link for link in links if len(link) == 3), key=lambda link: (link[1], order[link[0]], link[2]))
        ranks = [(side, a) for side in ("out", "in") for a in members]
        for link in [*(link for link in ranks if link in links), *cards]:
            join(Message({link: links[link]}, collective=of, longest=longest))

    def ready(row, rank):
        """When a rank can start the row; inf: not known yet."""
        times, op = [clock[rank]], table.op[row]
        used = waits.sends[waits.first[program.bounds[rank]] : waits.first[row + 1]]
        times += [arrival.get(int(send), math.inf) for send in used]
        before = lifetimes.send_before[row] if op not in MESSAGES else -1
        while before >= 0:
            times.append(arrival.get(int(before), math.inf))
            before = lifetimes.send_before[before]
        if op == Op.NORM:
            others = [each.done for k, each in enumerate(sums) if k != waits.collective[row]]
            if sums[waits.collective[row]].left or None in others:
                return math.inf
            rounds = exchange(network, header.groups[table.group[row]])
            times.append(max([sums[waits.collective[row]].done, *others]) + rounds)
        exchanged = op == Op.ALLREDUCE and table.kind[row] in (Kind.X, Kind.G)
        if (exchanged or op == Op.STEP) and (k := first_of_pass[row]) >= 0:
            times.append(math.inf if sums[k].done is None else sums[k].done)
        return max(times)

    def act(rank):
        """Whether the rank could reach or start its next row now."""
        row = at[rank]
        if clock[rank] > now or row == program.bounds[rank + 1]:
            return False
        if row not in reached:
            reached.add(row)
            if table.op[row] in (Op.ALLREDUCE, Op.NORM):
                enter(row)
        if ready(row, rank) > now:
            return False
        start[row], clock[rank], at[rank] = now, now + duration(row, rank), row + 1
        if table.op[row] in COPIES:
            host, size = network.host, bytes[row]
            links = {("host", table.op[row], rank // host.devices): host.beta * size} if host.beta * size else {}
            join(Message(links, host.alpha if size else 0.0, row=row))
        send = row if row in partner else sender.get(row)
        if send is not None:
            done = [start_of < at[r] for start_of, r in ((send, table.rank[send]), (partner[send], table.to[send]))]
            if all(done):
                size = bytes[send]
                source, to = int(table.rank[send]), int(table.to[send])
                alpha = float(network.levels[level_of(network, source, to)].latency(np.array(size))) if size else 0.0
                join(Message(of_message(send), alpha, row=send, longest=longest))
        return True

    while True:
        offer()
        while any(act_all(act, rank) for rank in range(header.workers)):
            pass
        times = [*free_at.values(), *arrival.values(), *clock, *(each.done for each in sums if each.done is not None)]
        times += [
            t for r in range(header.workers) if at[r] < program.bounds[r + 1] and (t := ready(at[r], r)) < math.inf
        ]
        later = [time for time in times if time > now]
        if not later:
            break
        now = min(later)
    assert at == program.bounds[1:].tolist() and not waiting, norm
    return start, np.array([arrival[send] for send in sends.tolist()])


def act_all(act, rank):
    """Let a rank act as long as it can; whether it did."""
    return sum(iter(lambda: act(rank), False)) > 0


def exchange(network, members):
    """How long a sum of a few numbers takes."""
    time = 0.0
    for k, level in enumerate(network.levels):
        below = defaultdict(set)
        for rank in members:
            below[group_of(level, rank)].add(group_of(network.levels[k - 1], rank) if k else rank)
        time += level.latency(np.array(0.0)) * math.ceil(math.log2(max(map(len, below.values()))))
    return float(time)


def awaited_sums(program, waits):
    """By row: the sum that an exchange enters, or that the STEP of a version waits for."""
    table, found, latest = program.rows, waits.collective.copy(), {}
    for row in range(len(program)):
        key = table.rank[row], table.stage[row]
        if table.op[row] == Op.ALLREDUCE and table.kind[row] == Kind.DW:
            latest[key] = waits.collective[row]
        elif table.op[row] == Op.STEP:
            several = not program.header.has_flush and program.header.several_owners[table.stage[row]]
            found[row] = latest[key] if several else -1
    return found
