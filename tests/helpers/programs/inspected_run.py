"""A run of mpirun inspected from inside. It is requested by an object:

    arguments  those of mpirun; `profile` has no hash of weights
    delay      a seed of random delays: before instructions, and of the main thread after it finds a sum unfinished
    calls      "hooks" or "thread": how MPI is called during every job with messages in flight, however short
    late       computes on a late device, "direct" or "staged"; fails if any instruction but NORM waits for it
    break      on a late device: a fault of broken_order.py, in the order of transfers and kernels, or of
               broken_graphs.py
    waits      on a late device: any instruction may wait for it
    pinned     on a late device, staged: prints the bytes of host memory that messages arrive in, and of planned memory
    transport  "in-order:...": MPI delivers as that transport does
    record     a file for a `Record` of all stages; needs --verify
    owned      a file for the bytes that every rank owns in the end, as JSON
    copies     a file for the hashes of the weights that every rank owns in the end, by stage, as JSON

The result is the exit code, the stdout, and a hash of all weights in the end. The stdout includes the refusals of
graphs and, on a late device, how many graphs all ranks captured and replayed, and the bytes of each rank's pool.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from broken_graphs import BREAKS as BROKEN_GRAPHS
from broken_order import breaking
from in_order_transport import InOrderTransport
from late_device import Late
from mpi4py import MPI

from mpirun.cli.main import main
from mpirun.cli.options import read_options
from mpirun.cli.run import Run
from mpirun.comm.fail_together import Stop
from mpirun.comm.gpu_transport import QueuedTransport
from mpirun.comm.ordered_allreduce import DONE, OrderedAllreduce
from mpirun.verify.record import Record, gather_record
from schedgen.ir.instructions import Op

WORLD = MPI.COMM_WORLD


def save_record(run: Run, file: str) -> None:
    """Save what --verify compared, of all stages. Collective."""
    assert run.session.verification is not None
    record = gather_record(run.comm, run.session.header, run.session.setup.shapes, run.session.verification.record)
    if WORLD.rank == 0:
        assert isinstance(record, Record), record
        torch.save(record._asdict(), file)


def save_owned(run: Run, file: str) -> None:
    """Save, by rank, the bytes of its own weights, of their optimizer state and of their gradients. Collective."""
    interpreter = run.session.interpreter
    units = [(index, shard) for index, stage in interpreter.stages.items() for shard in stage.owned]
    tensors = {
        "weights": [interpreter.stages[stage].owned[shard] for stage, shard in units],
        "state": [value for unit in units for state in interpreter.optimizer.state(unit) for value in state.values()],
        "gradient": [interpreter.context.grad_buffers.of_unit(unit).total for unit in units],
    }
    owned = {what: sum(tensor.untyped_storage().nbytes() for tensor in some) for what, some in tensors.items()}
    if (by_rank := WORLD.gather(owned)) is not None:
        Path(file).write_text(json.dumps(by_rank))


def print_graphs(run: Run) -> None:
    """Print what is not captured and why, and how many jobs were captured and replayed. Collective."""
    graphs, device = run.session.interpreter.graphs, run.session.setup.device
    assert graphs is not None
    refusals = WORLD.allgather(graphs.refusals())
    if WORLD.rank == 0:
        print(*sorted({line for of_rank in refusals for line in of_rank}), sep="\n")
    if not isinstance(device, Late):
        return
    captures, replays = WORLD.allreduce(device.pool.captures), WORLD.allreduce(device.pool.replays)
    sizes = WORLD.allgather(sum(map(len, device.pool.blocks.values())))
    if WORLD.rank == 0:
        print(f"graphs: {captures} captured, {replays} replayed")
        print("pool:", *sizes)


def print_pinned(run: Run) -> None:
    """Print, by rank, the bytes of pinned memory that messages arrive in, and those planned for them. Collective."""
    context = run.session.interpreter.context
    assert isinstance(context.transport, QueuedTransport)
    pinned = sum(len(mirror.memory) for mirror in context.transport.mirrors.values() if mirror.memory is not None)
    by_rank = WORLD.gather((pinned, sum(map(len, context.slots.blocks))))
    if by_rank is not None:
        print(f"pinned: {json.dumps(by_rank)}")


def weights(run: Run, file: str | None) -> str:
    """A hash of the weights of all stages, on all ranks that own them; `file`: for the hash of each, by rank."""
    own = {
        f"{stage.index}/{shard}" if shard >= 0 else stage.index: bytes(weights.view(torch.uint8).cpu().numpy())
        for stage in run.session.interpreter.optimizer.stages.values()
        for shard, weights in stage.owned.items()
    }
    everything = WORLD.allgather({key: hashlib.sha256(data).hexdigest() for key, data in own.items()})
    text = json.dumps(everything, sort_keys=True)
    if file and WORLD.rank == 0:
        Path(file).write_text(text)
    return hashlib.sha256(text.encode()).hexdigest()


def delayed(act: Callable[[], None], rng: np.random.Generator) -> Callable[[], None]:
    """`act`, delayed: not at all half of the times, else by up to 3 ms, and one time in a hundred by 20 ms."""

    def run() -> None:
        if (luck := rng.random()) < 0.5:
            time.sleep(0.02 if luck < 0.01 else 0.003 * rng.random())
        act()

    return run


def slow_looks() -> contextlib.AbstractContextManager[object]:
    """A context that delays the main thread after it finds a sum unfinished, so that another thread may finish it."""

    def done(self: OrderedAllreduce) -> bool:
        found = self.phase >= DONE
        if not found and threading.current_thread() is threading.main_thread():
            time.sleep(2e-3)
        return found

    return mock.patch.object(OrderedAllreduce, "done", property(done))


@contextlib.contextmanager
def computing_late(how: str | None, break_: str | None, words: bool) -> Iterator[None]:
    """A context in which runs compute on a late device; None: they do not."""
    if how is None:
        yield
        return
    device = Late(how == "direct", WORLD.rank, words)
    choose = mock.patch("mpirun.engine.setup.choose_device", lambda *_: device)
    naps = [mock.patch(f"mpirun.comm.{where}.NAP", 1e-3) for where in ("waiting", "gpu_transport")]  # on few cores
    broken = BROKEN_GRAPHS[break_] if break_ in BROKEN_GRAPHS else breaking(break_)
    with choose, naps[0], naps[1], broken, device.working():
        yield


def without_waits(act: Callable[[], None], op: int, device: Late) -> Callable[[], None]:
    """`act`, during which the host must not wait for the device."""

    def run() -> None:
        device.streams.strict = Op(op).name
        act()
        device.streams.strict = ""

    return run


def calls_of_mpi(calls: bool) -> contextlib.ExitStack:
    """A context in which a thread calls MPI during jobs, however little there is to gain."""
    stack = contextlib.ExitStack()
    if calls:
        stack.enter_context(mock.patch("mpirun.engine.build.ENOUGH", 1))
        stack.enter_context(mock.patch("mpirun.comm.progress_thread.PERIOD", 1e-6))
        stack.enter_context(mock.patch("mpirun.comm.transport.AT_ONCE", 0))
    return stack


def delivered(transport: str | None) -> contextlib.AbstractContextManager[object]:
    """A context in which MPI delivers in order; None: it does as always."""
    if transport is None:
        return contextlib.nullcontext()
    return mock.patch("mpirun.engine.build.make_transport", partial(InOrderTransport, transport))


def execute(request: dict[str, Any]) -> tuple[int, str, str]:
    """Execute a run; return its exit code, its stdout and a hash of its weights. Collective."""
    out = io.StringIO()
    late = computing_late(request.get("late"), request.get("break"), "--stream-words" in request["arguments"])
    looks = slow_looks() if "delay" in request else contextlib.nullcontext()
    order = delivered(request.get("transport"))
    with contextlib.redirect_stdout(out), late, calls_of_mpi(request.get("calls", False)), looks, order:
        if request["arguments"][0] == "profile":
            with mock.patch("mpirun.comm.machine_speed.SIZES", [8, 2**10, 2**20]):
                return main(request["arguments"]), out.getvalue(), ""
        run = Run(WORLD, read_options(WORLD, "", request["arguments"]))
        if (seed := request.get("delay")) is not None:
            rng = np.random.default_rng([seed, WORLD.rank])
            run.session.interpreter.code = [delayed(act, rng) for act in run.session.interpreter.code]
        if isinstance(device := run.session.setup.device, Late) and not request.get("waits"):
            pairs = zip(run.session.interpreter.code, run.session.instructions, strict=True)
            run.session.interpreter.code = [
                act if i.op == Op.NORM else without_waits(act, i.op, device) for act, i in pairs
            ]
        try:
            code = run.execute()
        except Stop as stop:
            code = stop.code
            print(stop)
        except SystemExit as end:
            code = int(end.code or 0)
        if run.session.interpreter.graphs is not None:
            print_graphs(run)
        if request.get("pinned"):
            print_pinned(run)
        if file := request.get("record"):
            save_record(run, file)
        if file := request.get("owned"):
            save_owned(run, file)
        end = weights(run, request.get("copies"))
    return max(WORLD.allgather(code)), out.getvalue(), end
