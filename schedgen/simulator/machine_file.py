"""A machine file: the network that a JSON object describes, or what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from schedgen.ir.cost import is_amount
from schedgen.ir.limits import MOST_WORKERS
from schedgen.simulator.network import HostLink, Level, Network
from schedgen.util.errors import RefusedFile, clip
from schedgen.util.files import AnyPath, display_name, read_json, read_text

LEVEL_FORM = (
    '{"name": text, "devices": number or list, "alpha": time or [[bytes, time], ...], "beta": time, "card": time}'
)
KEYS = ("levels", "speed", "memory", "host")
MOST_LEVELS = 16


def read_network(file: AnyPath) -> Network:
    """The network that a machine file describes; RefusedFile if it describes none, OSError if it cannot be opened."""
    name = display_name(file)
    return network_of(read_json(read_text(file), name), name)


def network_of(values: Any, name: str) -> Network:
    """The network that a JSON value describes; RefusedFile, which begins with `name`, if it describes none."""
    _refuse_unknown(values, KEYS, name)
    listed = values.get("levels") if isinstance(values, dict) else None
    if not isinstance(listed, list) or not 0 < len(listed) <= MOST_LEVELS:
        raise RefusedFile(f"{name}: a machine is an object with a list of levels and perhaps {', '.join(KEYS[1:])}")
    levels = tuple(_level(each, f"{name}: level {k}", k, k == len(listed) - 1) for k, each in enumerate(listed))
    speed, memory = (
        _amounts(values[key], f"{name}: {key}", most) if key in values else most
        for key, most in (("speed", 1.0), ("memory", math.inf))
    )
    network = Network(levels, speed, memory, _host(values.get("host", {}), f"{name}: host"))
    if len({*(counts := network.counts).values()}) > 1:
        said = ", ".join(f"{count} by {what}" for what, count in counts.items())
        raise RefusedFile(f"{name}: the numbers of devices differ: {said}")
    # Every group of a level is some groups of the level below, and one of them is several. No host link leaves a host.
    count = network.devices or 2 * max(each.devices for each in network.levels if isinstance(each.devices, int))
    ends = np.diff(network.groups(count), axis=1) > 0
    for (below, level), (inner, outer) in zip(pairwise(levels), pairwise(ends), strict=True):
        if (outer & ~inner).any():
            raise RefusedFile(f"{name}: the groups of level '{level.name}' divide some of level '{below.name}'")
        if (outer == inner).all():
            raise RefusedFile(f"{name}: no message uses level '{level.name}': it joins no two groups of '{below.name}'")
    if (ends[0] & (np.arange(1, count) % network.host.devices > 0)).any():
        raise RefusedFile(f"{name}: host: {network.host.devices} devices that share a link lie in several hosts")
    return network


def _refuse_unknown(values: Any, known: Sequence[str], where: str) -> None:
    if isinstance(values, dict) and (unknown := [key for key in values if key not in known]):
        raise RefusedFile(f"{where}: there is no '{clip(unknown[0])}', only {', '.join(known)}")


def _level(values: Any, where: str, number: int, is_last: bool) -> Level:
    _refuse_unknown(values, Level._fields, where)
    given = {"devices": 0, "card": 0, **values} if isinstance(values, dict) else {}
    devices, alpha = given.get("devices"), given.get("alpha")
    counts: list[Any] = devices if isinstance(devices, list) and devices else [devices]
    right = given.keys() == {*Level._fields} and isinstance(given["name"], str) and _are_alphas(alpha)
    right = right and is_amount(given["beta"]) and is_amount(given["card"])
    right = right and (devices == 0 or all(map(_is_count, counts))) and sum(counts) <= MOST_WORKERS
    for wrong, words in (
        (not right, f"should be {LEVEL_FORM}, with times of at least 0 and up to {MOST_WORKERS} devices"),
        (right and given["card"] and not number, "the innermost level has no card: a card joins groups below it"),
        (right and not devices and not is_last, "devices is missing: how many a group of this level has"),
        (len(counts) > 1 and is_last, "the last level joins all devices: give their number, or leave devices out"),
    ):
        if wrong:
            raise RefusedFile(f"{where}: {words}")
    return Level(
        clip(given["name"]),
        tuple(counts) if isinstance(devices, list) else int(devices or 0),
        tuple((float(size), float(time)) for size, time in alpha) if isinstance(alpha, list) else float(alpha or 0),
        float(given["beta"]),
        float(given["card"]),
    )


def _host(values: Any, where: str) -> HostLink:
    """The link to the host's memory that a JSON value describes; RefusedFile if it describes none."""
    _refuse_unknown(values, HostLink._fields, where)
    host = HostLink(**values) if isinstance(values, dict) else None
    if host is None or not (_is_count(host.devices) and all(map(is_amount, values.values())) and host.memory):
        raise RefusedFile(
            f"{where} should have some of {', '.join(HostLink._fields)}: numbers, none below 0, memory above"
        )
    return host


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MOST_WORKERS


def _are_alphas(value: Any) -> bool:
    """Whether a value is a time, or a list of [bytes, time] that ascends from 0 bytes."""
    if not isinstance(value, list) or not all(isinstance(each, list) and len(each) == 2 for each in value):
        return is_amount(value)
    begins = [begin for begin, _ in value]
    is_valid = all(is_amount(number) for each in value for number in each)
    return bool(value) and is_valid and begins[0] == 0 and begins == sorted({*begins})


def _amounts(value: Any, where: str, most: float) -> float | tuple[float, ...]:
    amounts = value if isinstance(value, list) and value else [value]
    if not all(is_amount(amount) and 1e-12 <= amount <= most for amount in amounts):
        limit = "" if math.isinf(most) else f" and at most {most:g}"
        raise RefusedFile(f"{where} should be a number above 0{limit}, or a list of one for every device")
    return tuple(map(float, amounts)) if isinstance(value, list) else float(value)
