"""The machine that a schedule is simulated on: its links, the bytes of buffers, the time of a STEP.

`parse_profile` reads the durations of jobs and a `Machine` from one JSON object, as `mpirun profile` writes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from schedgen.ir.cost import DIRECTION, MOST_AMOUNT, REDO, Amount, by_stage, is_amount
from schedgen.ir.header import Header
from schedgen.ir.instructions import DIRECTIONS
from schedgen.ir.stage_graph import StageGraph
from schedgen.ir.version_1 import from_version_1
from schedgen.simulator.machine_file import network_of
from schedgen.simulator.network import Level, Network
from schedgen.util.arrays import Floats, Times
from schedgen.util.errors import RefusedFile, clip, number_of
from schedgen.util.files import read_json


class Machine(NamedTuple):
    """Links and sizes. Time is in the unit of the jobs' durations; a message takes alpha + beta * bytes.

    Every rank has one link out and one link in, and a link carries one message at a time. With alpha and beta both
    zero messages take no time and wait for no receive or link. An amount is one number for all stages, or one a stage.
    If devices are `joined` by a network, alpha and beta are the least of its levels: bounds use them, `simulate` all.
    """

    alpha: float = 0.0  # time per message
    beta: float = 0.0  # time per byte
    activation: Amount = 1  # bytes of x.s.b, and of g.s.b
    weight: Amount = 1  # bytes of w.s, and of dw.s
    saved: Amount = 1  # bytes a forward keeps for its backward
    half: Amount = 0  # bytes a BWD_I keeps in addition for its BWD_W; below 0 if it frees part of `saved`
    workspace: Amount | Mapping[str, Amount] = 0  # bytes a job takes only while it runs; or by direction
    owned: Amount | None = None  # bytes an owner holds for a stage throughout; None: its weights, no optimizer state
    step: Amount = 0  # time a STEP takes
    # The part of a job's time that its layers do not take: a stage of several layers has it once. Or by direction.
    overhead: Amount | Mapping[str, Amount] = 0
    edge_activation: Amount | None = None  # bytes of x.s.b.c where outputs are per consumer, by edge; None: x.s.b's
    tied: Floats | None = None  # bytes of the parameters that a tie's stages share, by tie; None: not known
    freed: Amount | None = None  # bytes of `saved` that a BWD_I frees, counted in `half`; None: those below 0 of `half`
    joined: Network | None = None  # None: all ranks have links alike

    @property
    def network(self) -> Network:
        """The network that joins the ranks."""
        return self.joined or Network((Level("network", 0, self.alpha, self.beta),))

    def on(self, network: Network) -> Machine:
        """The machine with this network in place of its own."""
        return self._replace(joined=network, alpha=network.alpha, beta=network.beta)

    def edge_bytes(self, graph: StageGraph) -> Floats:
        """Bytes of the x, and of the g, that goes along each edge, shape (edges,)."""
        producers, edges = [producer for producer, _ in graph.edges], len(graph.edges)
        sizes: Floats = by_stage(self.activation, graph.stages)[producers]
        if self.edge_activation is not None:
            sizes = np.where(graph.is_per_consumer[producers], by_stage(self.edge_activation, edges), sizes)
        return sizes

    def step_times(self, header: Header) -> Times:
        """How long the STEP of each stage takes or, if its weights are divided, of one of its shards."""
        return by_stage(self.step, header.stages) / header.weight_shards.counts


# By the key of a profile's entry: the field.
PROFILE_KEYS = {"per_consumer" if name == "edge_activation" else name: name for name in Machine._fields[:-1]}
# The entries of a profile that are as large for a slice as for its stage.
_UNDIVIDED = ("activation", "alpha", "beta", "overhead")
_TIMES = ("alpha", "beta", "overhead", "step")  # the entries that are no bytes


def parse_profile(
    text: str,
    name: str,
    stages: int,
    edges: Sequence[tuple[int, int]] = (),
    header: Header | None = None,
    counted: str = "the schedule has",
    ties: int = 0,
) -> tuple[dict[str, Amount], Machine]:
    """The durations of jobs and the machine, from a JSON object: F, with B or I and W or all, and optionally keys of
    `PROFILE_KEYS`.

    Times and bytes are numbers, or lists by stage (per_consumer: by edge, tied: by tie); workspace and overhead may be
    objects that have these for some of F, B, I, W; machine has what a machine file has. Where the schedule of `header`
    has slices, lists may be by stage of the model. `edges` ascend. `ties`: how many there are, if there is no `header`;
    tied is left out if there are none. Bytes are rounded up to whole numbers.
    RefusedFile if it is not such an object, or values do not fit; `counted` begins its clause on the number of stages
    or edges.
    """
    values = read_json(from_version_1(text), name)
    given = {*values} if isinstance(values, dict) else set()
    if "machine" in given and (double := sorted(given & {"alpha", "beta"})):
        raise RefusedFile(f"{name}: machine has the links' times: leave {double[0]} out")
    if "tensor" in given and (T := values.pop("tensor")) != (header.tensor_parallel.degree if header else 1):
        raise RefusedFile(f"{name}: its stages are slices, of --tensor {clip(str(T))}: profile whole ones")
    joined = network_of(values.pop("machine"), f"{name}: machine") if "machine" in given else None
    names = tuple(dict.fromkeys(name for way in DIRECTIONS.values() if {*way} <= given for name in way))
    if not names:
        raise RefusedFile(f"{name}: should be an object with F and B, or F, I and W, or F of forwards alone")
    if header is not None:
        values = _profile_of_slices(values, header)
        ties = len(header.tied)
    if len(lone := given & {"I", "W"}) == 1:
        raise RefusedFile(f"{name}: a backward has two halves, I and W, and only {lone.pop()} is given")
    listed = values.get("tied")
    tied = ties or (len(listed) if isinstance(listed, list) else 0)
    named = clip(", ".join(f"{producer}-{consumer}" for producer, consumer in edges[:30]))
    lengths = {  # by key: the length of a list, and why
        "per_consumer": (len(edges), f"{counted} {number_of(len(edges), 'edge')}: {named}"),
        "tied": (tied, f"there {'is 1 tie' if tied == 1 else f'are {tied} ties'}"),
    }
    for key, value in values.items():
        if key not in (*names, REDO, *PROFILE_KEYS):
            raise RefusedFile(f"{name}: there is no cost '{clip(key)}'")
        length, why = lengths.get(key, (stages, f"{counted} {number_of(stages, 'stage')}"))
        is_object = isinstance(value, dict) and key in ("workspace", "overhead")
        for direction, amount in value.items() if is_object else [(None, value)]:
            if direction not in (None, *DIRECTION.values()):
                raise RefusedFile(f"{name}: {key} should have some of F, B, I and W, not '{clip(str(direction))}'")
            what = f"{name}: {key} of {direction}" if direction else f"{name}: {key}"
            amounts = _check(amount, what, length, why, single=key in ("alpha", "beta"))
            if key in names and not all(1e-12 < amount < 1e12 for amount in amounts):
                raise RefusedFile(f"{name}: {key} should be a time from 1e-12 to 1e12")
    given_fields = {
        PROFILE_KEYS[key]: value if key in _TIMES else _rounded_up(value)
        for key, value in values.items()
        if key in PROFILE_KEYS and (ties or key != "tied")
    }
    if "tied" in given_fields:
        given_fields["tied"] = by_stage(given_fields["tied"], ties)  # a number for each
    machine = Machine(**given_fields).on(joined) if joined else Machine(**given_fields)
    times: dict[str, Amount] = {key: np.array(by_stage(values[key], stages)) for key in (*names, REDO) if key in values}
    return times, machine


def by_direction(amount: Amount | Mapping[str, Amount]) -> Mapping[str, Amount]:
    """An amount by direction: as given or, where it does not depend on the direction, the same for F, B, I and W."""
    return amount if isinstance(amount, Mapping) else dict.fromkeys(DIRECTION.values(), amount)


def workspaces(machine: Machine) -> dict[str, Amount]:
    """A machine's workspace of F, B, I and W: B defaults to the larger of I and W, these to B, and others to 0."""
    given = by_direction(machine.workspace)
    halves = [given[direction] for direction in "IW" if direction in given]
    whole = given.get("B", np.max(np.broadcast_arrays(*halves), axis=0) if halves else 0)
    return {"F": 0, "B": whole, "I": whole, "W": whole} | dict(given)


def _profile_of_slices(profile: dict[str, Any], header: Header) -> dict[str, Any]:
    """A profile with lists by stage and edge of the model as one with lists by stage and edge of the schedule.

    In lists, a slice of a sliced stage gets a T-th of everything but per_consumer and `_UNDIVIDED`.
    """
    T, stages, edges = header.tensor_parallel.degree, header.model_stages, header.model_graph.edges
    if T == 1:
        return profile

    def of_slices(value: Any, divided: bool) -> Any:
        if isinstance(value, dict):
            return {key: of_slices(amount, divided) for key, amount in value.items()}
        if not isinstance(value, list) or len(value) != stages or not all(map(is_amount, value)):
            return value
        parts = [T if divided and header.tensor_parallel.sliced[stage * T] else 1 for stage in range(stages)]
        return [amount / part for amount, part in zip(value, parts, strict=True) for _ in range(T)]

    expanded = {
        key: value if key in ("per_consumer", "tied") else of_slices(value, key not in _UNDIVIDED)
        for key, value in profile.items()
        if key != "tied" or (isinstance(value, list) and len(value) == len(header.tied))  # else of whole stages
    }
    if isinstance(by_edge := profile.get("per_consumer"), list) and len(by_edge) == len(edges):
        sizes = dict(zip(edges, by_edge, strict=True))
        expanded["per_consumer"] = [sizes[producer // T, consumer // T] for producer, consumer in header.graph.edges]
    return expanded


def _rounded_up(value: Any) -> Any:
    """The bytes in a value of a profile as whole numbers."""
    if isinstance(value, dict):
        return {direction: _rounded_up(amount) for direction, amount in value.items()}
    return [math.ceil(amount) for amount in value] if isinstance(value, list) else math.ceil(value)


def _check(value: Any, what: str, count: int, counted: str, single: bool = False) -> list[float]:
    """The amounts in a value of a profile: the value itself or, unless `single`, a list of one per stage or edge."""
    amounts: list[float] = value if isinstance(value, list) else [value]
    if not all(map(is_amount, amounts)) or (single and amounts is value):
        number = f"a number of at least 0 and below {MOST_AMOUNT:g}"
        raise RefusedFile(f"{what} should be {number}{'' if single else ', or a list of them'}")
    if amounts is value and len(amounts) != count:
        raise RefusedFile(f"{what} has {number_of(len(amounts), 'number')}, but {counted}")
    return amounts
