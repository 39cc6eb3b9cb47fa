"""Why a job cannot continue: which rank the others wait for, or which scripts call different methods of the Engine."""

from __future__ import annotations

import itertools

from mpirun.watchdog.rank_state import State


def different_calls(states: list[State]) -> str | None:
    """A sentence about two ranks whose scripts call different methods though all must call the same; None: no such two.

    Ranks that have made the same number of calls must have made the same last call, at any time: one look is enough.
    """
    first: dict[int, State] = {}  # by number of calls
    for state in states:
        other = first.setdefault(state["calls"], state)
        if other["call"] != state["call"]:
            one, two = (
                f"rank {x['rank']} on {x['host']} " + ("has ended" if x["call"] == "close" else f"calls {x['call']}")
                for x in (other, state)
            )
            return f"{one}, but {two}: all ranks call the methods of an Engine, in the same order"
    return None


def explain_hang(states: list[State]) -> str:
    """A sentence: which rank all others wait for, directly or not, or the cycle in which ranks wait for each other."""
    by_rank = {state["rank"]: state for state in states}

    def next_of(rank: int) -> int | None:
        """The rank that a rank waits for; in a sum, the first rank that has not reached the sum."""
        peer = by_rank[rank]["peer"]
        if peer != -1:
            return peer
        late = [state["rank"] for state in states if state["peer"] != -1]
        return min(late, default=None)

    stopped = [state["rank"] for state in states if state["process"] in ("stopped", "gone")]
    waiting = [rank for rank in by_rank if by_rank[rank]["peer"] is not None]
    if stopped:  # a rank may wait and be stopped
        path = stopped[:1]
    elif not waiting:
        busy = [f"rank {x['rank']} on {x['host']} is {x['process']}" for x in states if x["process"] != "asleep"]
        return ", ".join(["no rank shows what it waits for", *busy])
    else:
        path = [min(waiting)]
        while (peer := next_of(path[-1])) is not None:
            if peer in path:
                circle = [*path[path.index(peer) :], peer]
                return ", ".join(f"rank {a} waits for rank {b}" for a, b in itertools.pairwise(circle))
            if peer not in by_rank:
                return f"rank {path[-1]} waits for rank {peer}, whose host does not answer"
            path.append(peer)
    last = by_rank[path[-1]]
    if last["peer"] == -1:
        return "every rank waits for others"
    return f"rank {last['rank']} on {last['host']} is {last['process']}, and others wait for it"
