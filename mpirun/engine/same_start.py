"""Checks that ranks start from the same values: a script may draw different ones on each rank."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from typing import NamedTuple

from mpi4py import MPI
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from mpirun.comm.fail_together import Stop, first_difference
from mpirun.data.values import digest_of, raw_bytes
from mpirun.engine.core.stage import LocalStage
from mpirun.model.contract import Model
from mpirun.model.module_tensors import given_modules, own_tensors
from schedgen.ir.header import Header
from schedgen.util.errors import UsageError

# Modules that runs of this process were given: whether this rank owned their stage in the last of them.
_GIVEN: MutableMapping[nn.Module, bool] = WeakIdKeyDictionary()

# Parameters that a run of this process trains on other ranks: here they keep the values that they had. The run, while
# it is open; None: it has ended.
_ELSEWHERE: MutableMapping[Tensor, object] = WeakIdKeyDictionary()


class Values(NamedTuple):
    """What must be the same on all ranks with a stage: a tied parameter (under the tie's first name), all trained
    parameters, or all else.
    """

    stage: int  # of the model's
    slice: int
    what: str


def value_digests(model: Model, index: int, module: nn.Module, owned: bool) -> dict[Values, str]:
    """Digests of a stage's values. Only a rank that owns some part of its weights has trained parameters."""

    def values(stage: int, what: str) -> Values:
        return Values(model.model_stage(stage), model.slice_of(stage).index, what)

    tensors = own_tensors(module)
    others = {name: tensor for name, tensor in tensors.items() if not tensor.requires_grad}
    digests = {values(index, "frozen parameters or buffers"): _digest(others)}
    if owned:
        trained = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
        digests[values(index, "parameters")] = _digest(trained)
        for first, *more in model.tied:
            for _, name in (place for place in (first, *more) if place[0] == index):
                digests[values(*first)] = _digest({first[1]: module.get_parameter(name)})
    return digests


def given_digests(model: Model, header: Header, rank: int) -> dict[Values, str]:
    """Digests of the trained parameters of the modules that a script gave, also of stages that this rank does not hold.

    Those whose values weights may replace, stages that functions build, and stages that all ranks own, whose built
    values are compared, have none; nor have modules of an earlier run of this process on ranks that own their stage in
    neither run: the ranks that owned it then have the trained values, and those that own it now begin with theirs.
    """
    digests = dict[Values, str]()
    for index, entry in enumerate(model.stages):
        modules = [module for _, module in given_modules(entry)]
        named = [item for prefix, module in given_modules(entry) for item in module.named_parameters(prefix)]
        owned = rank in header.owners[index]
        counts = owned or all(_GIVEN.get(module, True) for module in modules)
        _GIVEN.update(dict.fromkeys(modules, owned))
        trained = {name: x for name, x in named if x.requires_grad and not x.is_meta}
        several = model.weights is None and model.is_first_slice(index) and len(header.owners[index]) < header.workers
        if several and counts and trained:
            digests[Values(model.model_stage(index), 0, "parameters")] = _digest(trained)
    return digests


def check_unwritten(comm: MPI.Intracomm, stages: Iterable[LocalStage]) -> None:
    """Stop if the script has written to a parameter of a module of which ranks own shards. Collective."""
    written = [
        stage.index
        for stage in stages
        if stage.owns_separate_shards and [parameter._version for parameter, _ in stage.first] != stage.writes
    ]
    first = comm.allreduce(min(written, default=math.inf), MPI.MIN)  # in every step: `together` takes ten times as long
    if first < math.inf:
        raise Stop(
            f"the script has written to a parameter of stage {first}, which ranks have in shards, where this would be "
            "lost: load values with run.load_state_dict, or train without shards"
        )


def hold(stages: Iterable[LocalStage]) -> None:
    """A checkpoint has given this rank's stages all their values, which runs that have ended change no more."""
    for stage in stages:
        for parameter in stage.module.parameters():
            if _ELSEWHERE.get(parameter, stage) is None:
                del _ELSEWHERE[parameter]


def begun(run: object, model: Model, header: Header, rank: int, left_out: Collection[str]) -> Callable[[], None]:
    """A run trains the modules of a script, but not what its optimizers have `left_out`.

    The function that is returned says that it has ended: what others compute with is compared when they begin.
    """
    here, there = list[Tensor](), list[Tensor]()
    for index, entry in enumerate(model.stages):
        for prefix, module in given_modules(entry):
            named = [(name, x) for name, x in module.named_parameters(prefix) if x.requires_grad and not x.is_meta]
            trained = [x for name, x in named if model.entry_name(index, name) not in left_out]
            (here if rank in header.owners[index] else there).extend(trained)
    own = set(map(id, here))  # stages of several ranks may share a parameter
    _ELSEWHERE.update((x, run) for x in there if id(x) not in own)
    return lambda: _ELSEWHERE.update([(x, None) for x, by in _ELSEWHERE.items() if by is run])


def check_held(stages: Iterable[LocalStage], known: int, run: object) -> int:
    """UsageError if one of a run's stages here has parameters that another run trains on other ranks alone.

    They are frozen, or the other run has not ended. Returns how many parameters are trained on other ranks; nothing is
    looked at if they are as many as `known`.
    """
    held = ((x, stage) for stage in stages for x in stage.module.parameters() if x in _ELSEWHERE)
    if len(_ELSEWHERE) != known and any(
        # What is trained and not owned here is fetched in every step.
        not x.requires_grad or (stage.owned and _ELSEWHERE[x] not in (None, run))
        for x, stage in held
    ):
        raise UsageError(
            "this Engine has parameters that another Engine trains, and this rank has not their values: give both "
            "Engines the scheme ddp"
        )
    return len(_ELSEWHERE)


def check_same_start(comm: MPI.Intracomm, own: Mapping[Values, str]) -> None:
    """Stop if ranks have different values of a stage. Collective."""
    if (difference := first_difference(comm, own)) is not None:
        values, one, other, *_ = difference
        raise Stop(
            f"ranks {one} and {other} begin with different values of stage {values.stage}, {values.what}: the code "
            "that makes them should draw the same numbers on every rank, as after torch.manual_seed with the same "
            "number of threads; modules that an earlier Engine has trained have their values on its owners' ranks: "
            "save and resume",
        )


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """A digest of names and values. A whole stage's values go through CRC-32: three times as fast as SHA-256."""
    return digest_of(part for name, x in sorted(tensors.items()) for part in (name, x.dtype, x.shape, _crc(x)))


def _crc(x: Tensor) -> int:
    return zlib.crc32(raw_bytes(x).data)
