"""Trees along which several owners of a stage sum its gradient by messages.

The gradient is cut into parts, and each part has a tree of its own. Sums go up the tree, and the root, which then has
the total, sends it down. Every tree is over all owners, so one kind of messages serves all of these:

ring       R parts for R owners. The tree of part k is a chain in the order of the ranks that ends at owner k, so all
           links carry 2 (R - 1) / R of the gradient, the least that is possible, in 2 (R - 1) steps.
           [Patarasuk and Yuan 2009, Bandwidth optimal all-reduce]
tree       one part; each owner has at most `fan_out` branches: few messages, few steps, uneven links
two-level  For D owners on the host that has most, D parts or two. On every host one owner gathers a part from the
           others; these owners are a tree with at most as many branches as there are parts. The trees begin at
           different hosts, so that a host has branches in one of them, and all cards carry about 2 (H - 1) / H of the
           gradient for H hosts, the least that is possible [after Sanders, Speck and Traeff 2009, Two-tree algorithms].
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from schedgen.util.arrays import Ints, Numbers

ALLREDUCE, RING, TREE, TWO_LEVEL = SUMS = ("allreduce", "ring", "tree", "two-level")


def sum_trees(sums: str, hosts: Ints, fan_out: int) -> Numbers:
    """The owner above each owner in the tree of each part, -1 at its root; shape (parts, owners).

    sums   one of SUMS; with ALLREDUCE there are no trees, and so no parts
    hosts  by owner, in the order of ranks: the number of its host
    """
    owners = np.arange(len(hosts))
    if sums == ALLREDUCE:
        return np.zeros((0, len(hosts)), np.int64)
    if sums == TREE:
        return _heap(owners, fan_out)[None]
    if sums == RING:
        return np.where(np.eye(len(hosts), dtype=bool), -1, (owners + 1) % len(hosts))
    members = [np.flatnonzero(hosts == host) for host in np.unique(hosts)]
    parts = max(2, *map(len, members))
    trees = np.empty((parts, len(hosts)), np.int64)
    for part, tree in enumerate(trees):
        gathering = [on_host[part % len(on_host)] for on_host in members]
        for owner, on_host in zip(gathering, members, strict=True):
            tree[on_host] = owner
        first = part * len(members) // parts
        order = gathering[first:] + gathering[:first]
        tree[order] = _heap(order, parts)
    return trees


def _heap(owners: Sequence[int] | Numbers, fan_out: int) -> Numbers:
    """The owner above each of `owners`, where the branches of the i-th are the (fan_out * i + 1)-th and following."""
    above = (np.arange(len(owners)) - 1) // fan_out
    return np.where(above < 0, -1, np.array(owners)[above])
