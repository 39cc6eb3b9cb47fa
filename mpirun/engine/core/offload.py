"""OFFLOAD, FREE and RELOAD of what a forward saves: its tensors leave the device for host memory, and come back.

While the forward runs, autograd hands over every tensor that it saves [torch.autograd.graph.saved_tensors_hooks], and
keeps a `SavedView` in its place: a view of a `SavedStorage`, which is one however many tensors of it are saved. What
the rank holds anyway stays where it is: weights, buffers, inputs from other stages. The storages of a job lie one
after the other in its slot of host memory. To another rank and back, by SEND and RECV, each is a message of its own.

On a GPU each copy is launched into its direction's stream, and waits there for the kernels launched before it. Kernels
launched after the FREE, or from the backward on, wait for the copy; the host waits for none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mpirun.comm.device import Device, Mark
from mpirun.engine.core.buffers import LocalBuffer
from mpirun.engine.core.context import Act, Context, in_order
from mpirun.engine.core.stage import address
from schedgen.ir.instructions import Instruction, Kind, Op


class HostSlot:
    """A slot of host memory, as large as what has been offloaded into it at the most."""

    __slots__ = ("memory", "read")

    def __init__(self) -> None:
        self.memory: Tensor | None = None  # shape (bytes,)
        self.read: Mark | None = None  # after the last copy from it

    def room(self, device: Device, size: int) -> Tensor:
        """The slot's memory, which has at least so many bytes; what it held is lost."""
        if self.memory is None or len(self.memory) < size:
            self.memory = device.host(size)
        return self.memory


class SavedStorage:
    """Memory that only the graph of one forward holds."""

    __slots__ = ("__weakref__", "bytes", "seen", "size")

    def __init__(self, x: Tensor) -> None:
        self.size = x.untyped_storage().nbytes()
        whole = x.detach().as_strided((self.size // x.itemsize,), (1,), 0)
        # Shape (size,), on the device; None: it is on the host only.
        self.bytes: Tensor | None = whole.view(torch.uint8)
        self.seen: list[tuple[Tensor, int]] = []  # until it first leaves: saved tensors in it, and their versions

    @property
    def on_device(self) -> Tensor:
        """Its bytes on the device, where they must be."""
        assert self.bytes is not None
        return self.bytes


class SavedView(NamedTuple):
    """A saved tensor as a view of its storage."""

    storage: SavedStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """The tensor; its storage must be on the device."""
        return self.storage.on_device.view(self.dtype).as_strided(self.size, self.stride, self.offset)


class Copies:
    """Copies between a device and the memory of its host."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.copied: Mark | None = None  # after the last copies

    @contextlib.contextmanager
    def launched(self, out: bool, after: Mark | None = None) -> Iterator[None]:
        """Inside, copies to the host (`out`) or from it are launched, behind the kernels so far and `after`."""
        # Their memory is allocated outside: on a GPU it belongs to the stream in which it is allocated.
        mark = self.device.mark()
        with self.device.copies(out):
            for awaited in (mark, after):
                if awaited is not None:
                    awaited.arrive()
            yield
            self.copied = self.device.mark()

    def wait(self) -> None:
        """Let kernels launched from now on wait for the copies."""
        if self.copied is not None:
            self.copied.arrive()


class SavedTensors(Copies):
    """What one forward saves. The graph holds it: what the graph drops, as after BWD_I, is dropped here."""

    def __init__(self, device: Device, module: nn.Module, held: Any, data: Any) -> None:
        """`held`: a pytree, of inputs from other stages; `data`: the microbatch's, which the graph alone may hold."""
        parts = [x for x in pytree.tree_leaves(data) if isinstance(x, Tensor)]
        # Those that are no part of something larger, such as all data, leave the device.
        parts = [x for x in parts if x.layout != torch.strided or x.untyped_storage().nbytes() != x.nbytes]
        stays = (*module.parameters(), *module.buffers(), *pytree.tree_leaves(held), *parts)
        super().__init__(device)
        self.stays = {address(x) for x in stays if isinstance(x, Tensor)}
        self.storages: WeakValueDictionary[int, SavedStorage] = WeakValueDictionary()  # by address
        self.slot = HostSlot()
        self.away: list[SavedStorage] = []  # from OFFLOAD or SEND to RELOAD or RECV
        self.places: list[Tensor] = []  # of these in the slot, from OFFLOAD to RELOAD

    def hooks(self) -> contextlib.AbstractContextManager[object]:
        """Inside, autograd saves tensors here."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, x: Tensor) -> Tensor | SavedView:
        alias = x.detach()
        if not self._leaves(x):
            return alias
        storage = self.storages.get(place := address(x))
        if storage is None:
            storage = self.storages[place] = SavedStorage(x)
        storage.seen.append((alias, alias._version))
        return SavedView(storage, x.dtype, x.size(), x.stride(), int(x.storage_offset()))

    def _leaves(self, x: Tensor) -> bool:
        """Whether a saved tensor leaves the device: it has plain memory there, which is not the rank's anyway."""
        if type(x) not in (Tensor, nn.Parameter) or x.layout != torch.strided or not self.device.has(x):
            return False
        size = x.untyped_storage().nbytes()
        return bool(size) and not size % x.itemsize and address(x) not in self.stays and not (x.is_conj() or x.is_neg())

    def offload(self, slot: HostSlot) -> None:
        """Start copying all storages to the slot."""
        self.wait()
        ends = [*accumulate((storage.size for storage in self._leaving()), initial=0)]
        memory, self.slot = slot.room(self.device, ends[-1]), slot
        self.places = [memory[begin:end] for begin, end in pairwise(ends)]
        with self.launched(out=True, after=slot.read):
            for storage, place in zip(self.away, self.places, strict=True):
                place.copy_(storage.on_device, non_blocking=True)

    def lend(self, sizes: Sequence[int], stage: int) -> list[Tensor]:
        """All storages, for another rank; RuntimeError if it expects other sizes."""
        if [storage.size for storage in self._leaving()] != sizes:
            raise RuntimeError(f"stage {stage} saves other sizes than when it was tried: compile without --evict")
        return [storage.on_device for storage in self.away]

    def _leaving(self) -> list[SavedStorage]:
        self.away = list(self.storages.values())
        for storage in self.away:
            if any(x._version != version for x, version in storage.seen):
                raise RuntimeError("a tensor that the forward has saved for its backward was changed in place later")
            storage.seen.clear()
        return self.away

    def free(self) -> None:
        """End the copies on the device, for kernels launched from now on."""
        self.wait()
        self.away = list(self.storages.values())
        for storage in self.away:
            storage.bytes = None

    def reload(self) -> None:
        """Start copying all storages back into new memory of the device."""
        memory = [torch.empty_like(place, device=self.device.torch) for place in self.places]
        with self.launched(out=False):
            for new, place in zip(memory, self.places, strict=True):
                new.copy_(place, non_blocking=True)
        self.slot.read = self.copied
        self.places.clear()
        self.take_back(memory)

    def take_back(self, memory: Sequence[Tensor]) -> None:
        """All storages are in this memory, where they arrive."""
        for storage, new in zip(self.away, memory, strict=True):
            storage.bytes = new
        self.away.clear()


def _unpack(saved: Tensor | SavedView) -> Tensor:
    return saved.tensor() if isinstance(saved, SavedView) else saved


class Offloads:
    """Prepares OFFLOAD and RELOAD, or SEND and RECV, the FREE between them, and the wait of the backward after them."""

    def __init__(self, context: Context) -> None:
        self.context, self.buffers = context, context.buffers
        self.slots = [HostSlot() for _ in range(max(context.slots.host_slot, default=-1) + 1)]

    def offload(self, row: int, i: Instruction) -> Act:
        """OFFLOAD: start copying what the forward has saved, or the state of an optimizer, to host memory."""
        if i.kind == Kind.OPT:
            return self.context.optimizer.on_host[i.stage, i.shard].offload
        pending, slot = self.context.pending_of(i), self.slots[self.context.slots.host_slot[row]]
        return lambda: pending.tensors.offload(slot)

    def free(self, row: int, i: Instruction) -> Act:
        """FREE of what has been copied, or sent: it is in host memory only, or on another rank."""
        if i.kind == Kind.OPT:
            return self.context.optimizer.on_host[i.stage, i.shard].free
        pending, settle = self.context.pending_of(i), partial(self._settle, self.buffers.named_by(i))
        is_own = (i.stage, i.mb) in self.context.offloaded
        return in_order(settle, lambda: pending.tensors.free()) if is_own else settle

    def send(self, row: int, i: Instruction) -> Act:
        """SEND: start sending what a forward has saved, of this rank or of another."""
        context, buffer, pending = self.context, self.buffers.named_by(i), self.context.pending_of(i)
        sizes, is_own = context.saved_sizes[i.stage], (i.stage, i.mb) in context.lent

        def act() -> None:
            held = self.buffers.wait_value(buffer)
            for part in pending.tensors.lend(sizes, i.stage) if is_own else held:
                buffer.sends.append((context.transport.send(part, i.to, i.kind), row))

        return act

    def recv(self, row: int, i: Instruction) -> Act:
        """RECV: start receiving it into new memory."""
        context, buffer, pending = self.context, self.buffers.named_by(i), self.context.pending_of(i)
        sizes, is_own = context.saved_sizes[i.stage], (i.stage, i.mb) in context.lent

        def act() -> None:
            buffer.value = [torch.empty(size, dtype=torch.uint8, device=context.device.torch) for size in sizes]
            dones = [context.transport.receive_once(part, i.source, i.kind) for part in buffer.value]
            buffer.arriving, buffer.receive_row = (lambda: all(done() for done in dones)), row
            if is_own:
                pending.tensors.take_back(buffer.value)

        return act

    def reload(self, row: int, i: Instruction) -> Act:
        """RELOAD: start copying it back."""
        if i.kind == Kind.OPT:
            return self.context.optimizer.on_host[i.stage, i.shard].reload
        pending = self.context.pending_of(i)
        return lambda: pending.tensors.reload()

    def waiting_acts(self, instructions: Sequence[Instruction]) -> Iterator[tuple[int, Act]]:
        """The rows of backwards that need what a RELOAD or RECV brings back, each with the act that waits for it."""
        away: set[tuple[int, int]] = set()
        for row, i in enumerate(instructions):
            if i.op in (Op.RELOAD, Op.RECV, Op.SEND) and i.kind == Kind.SAVED:
                away.add((i.stage, i.mb))
            elif i.op in (Op.BWD, Op.BWD_I, Op.BWD_W) and (i.stage, i.mb) in away:
                away.discard((i.stage, i.mb))
                pending = self.context.pending_of(i)
                settle = partial(self._settle, self.buffers.get(Kind.SAVED, i.stage, i.mb))
                yield row, in_order(settle, lambda pending=pending: pending.tensors.wait())  # type: ignore[misc]

    def _settle(self, buffer: LocalBuffer) -> None:
        self.buffers.wait_value(buffer)
        self.buffers.wait_sent(buffer)
        buffer.value = None
