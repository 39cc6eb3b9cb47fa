"""MPI calls during computations: large messages move only while some thread is inside MPI.

Between instructions the interpreter calls MPI anyway. During a long computation nobody does. If the list then has
messages in flight that take a significant share of the computation:
- hooks at the ends of layers, forward and backward, about one for every millisecond, call MPI;
- if single layers take long, a thread calls MPI every millisecond instead.
By measurement, either hides nearly all of a transfer. Either costs up to 5 % of the computation if every core has a
rank, so a computation that begins with no message in flight is left alone. MPI's own progress threads cost a whole
core. Messages of GPU memory have a thread anyway (`gpu_transport`), and need neither.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from mpi4py import MPI
from torch import Tensor, nn
from torch.fx import GraphModule

from mpirun.comm.device import Device
from mpirun.comm.waiting import sleeping_barrier

PERIOD = 1e-3  # seconds between two calls
LONG = 2e-3  # seconds: shorter computations need no call
RATE, SHARE = 2e9, 0.05  # messages that take a smaller share of a computation, at this rate (bytes/s), are left alone


def needs_calls(seconds: float, size: int) -> bool:
    """Whether to call MPI during a computation that takes `seconds`, with `size` bytes in flight."""
    return seconds > LONG and size / RATE > SHARE * seconds


class MessageProgress:
    """A rank's hooks in layers, and its thread, which starts when it is first needed."""

    def __init__(self, comm: MPI.Intracomm, poll: Callable[[], None], device: Device | None = None) -> None:
        """`poll`: what the hooks call; `device`: of the computations, None: the CPU. Collective.

        The thread has a communicator of its own.
        """
        self.poll, self.last_poll, self.device = poll, 0.0, device or Device()
        # A GPU's backwards run in a thread of autograd's.
        self.hooks_allowed = self.device.kind == "cpu" or MPI.Query_thread() >= MPI.THREAD_SERIALIZED
        self.layers: dict[nn.Module, list[nn.Module]] = {}
        self.threads_allowed = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        sleeping_barrier(comm)
        self.comm = comm.Dup()
        self.computing = False
        self.gate = threading.Lock()  # while it is locked the thread sleeps
        self.gate.acquire()
        self.thread: threading.Thread | None = None
        self.over = False

    # At the ends of layers

    def layer_count(self, module: nn.Module) -> int:
        """How many layers a module has, at whose ends hooks can be."""
        return len(self._layers(module))

    def with_hooks(
        self, act: Callable[[], object], module: nn.Module, seconds: float, backward: bool
    ) -> Callable[[], object]:
        """`act`, a forward of `module`, with polls at the ends of layers; `backward`: the polls are in its backward.

        `seconds`: how long the forward or the backward takes. There is about one hook for every `PERIOD`.
        """
        if backward and not self.hooks_allowed:
            return act
        found = self._layers(module)
        chosen = found[:: max(1, int(len(found) * PERIOD / seconds))]

        def after(layer: nn.Module, arguments: Any, output: Any) -> None:
            if not backward:
                self._poll_if_due()
            elif isinstance(output, Tensor) and output.grad_fn is not None:
                output.grad_fn.register_prehook(self._poll_if_due)

        def act_with_hooks() -> None:
            handles = [layer.register_forward_hook(after) for layer in chosen]
            try:
                act()
            finally:
                for handle in handles:
                    handle.remove()

        return act_with_hooks

    def _layers(self, module: nn.Module) -> list[nn.Module]:
        if module not in self.layers:
            self.layers[module] = layers(module)
        return self.layers[module]

    def _poll_if_due(self, _: Any = None) -> None:
        now = time.perf_counter()
        if now - self.last_poll > PERIOD:
            self.poll()
            self.last_poll = now

    def free(self) -> None:
        """End the thread, and free its communicator; no computation may follow. Collective."""
        self.over = True
        if self.thread is not None:
            self._open()
            self.thread.join()
        self.comm.Free()

    # In a thread

    def with_thread(self, act: Callable[[], object]) -> Callable[[], object]:
        """`act`, during which the thread calls MPI; `act` unchanged if MPI does not allow several threads."""
        if not self.threads_allowed:
            return act
        if self.thread is None:
            self.thread = threading.Thread(target=self._run, name="mpi-progress", daemon=True)
            self.thread.start()

        def act_with_thread() -> None:
            self.computing = True
            self._open()
            try:
                act()
            finally:
                self.computing = False

        return act_with_thread

    def _open(self) -> None:
        if self.gate.locked():  # else the thread has not yet passed the gate since it was last opened
            self.gate.release()

    def _run(self) -> None:
        self.device.use_in_thread()
        while not self.over:
            self.gate.acquire()
            while self.computing:
                time.sleep(PERIOD)
                if self.computing:
                    self.comm.Iprobe(MPI.ANY_SOURCE)


def layers(module: nn.Module) -> list[nn.Module]:
    """The submodules without children; a module that torch.compile made, or a traced graph, is one layer."""
    children = list(module.children())
    if not children or hasattr(module, "_orig_mod") or isinstance(module, GraphModule):
        return [module]
    return [layer for child in children for layer in layers(child)]
