"""An emulated GPU in CPU memory, whose kernels run late: a value that is read too early is NaN.

- Every aten op on its tensors is launched into the current stream (late_streams.py). Until the stream comes to it, all
  bits of its outputs are ones: NaN in any floating type, -1 in integers. So is memory that nothing has written.
- Tensors of the device and of the host do not mix in one op, except in copies and for host tensors without dimensions.
  Copies from and to pinned memory run late; others, `item` and the like make the host wait; `numpy` is refused.
- Backwards run in a thread of their own, as autograd's do on a GPU, in the stream of their caller.

A tensor is on the device if its storage is marked so; to torch itself it is on the CPU. MPI reads and writes its memory
at any time, as it does a GPU's.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
from collections.abc import Callable, Iterator
from functools import cache
from queue import SimpleQueue
from types import ModuleType
from typing import Any, ClassVar
from unittest import mock

import torch
from late_graphs import LateGraph, Pool, bytes_at, recorded
from late_streams import COMPUTE, Event, Streams, WordOperations
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

from mpirun.comm.device import Device
from mpirun.comm.stream_words import Number, StreamWords

aten = torch.ops.aten
COPIES = (aten.copy_.default, aten._to_copy.default)
NO_VALUES = (
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default,
    aten.new_empty_strided.default,
)  # fmt: skip
ON_DEVICE, PINNED = "on_late_device", "pinned"  # attributes of storages
ONES = 255

LATE = "late"  # torch's type of device


@cache
def register() -> None:
    """Register the device type with torch. Not where there is a real GPU: torch would pin memory for this one."""
    module = ModuleType(f"torch.{LATE}")  # torch asks it
    vars(module).update(is_available=lambda: False, _is_in_bad_fork=lambda: False, manual_seed_all=lambda seed: None)
    torch.utils.rename_privateuse1_backend(LATE)
    torch._register_device_module(LATE, module)


def is_late(x: Tensor, what: str = ON_DEVICE) -> bool:
    """Whether a tensor is on the device, or, with `what`, in memory marked so."""
    return type(x) in (Tensor, torch.nn.Parameter) and hasattr(x.untyped_storage(), what)


def marked(x: Tensor, what: str = ON_DEVICE) -> Tensor:
    """The same tensor, with its storage marked as `what`."""
    setattr(x.untyped_storage(), what, True)
    return x


def poisoned(x: Tensor) -> Tensor:
    """The tensor, which has no values yet and shares memory with no other, with all bits set (bool: True)."""
    if type(x) is Tensor:  # a fake one has no memory
        storage = x.untyped_storage()
        ctypes.memset(storage.data_ptr(), 1 if x.dtype == torch.bool else ONES, storage.nbytes())
    return x


@contextlib.contextmanager
def as_a_kernel() -> Iterator[None]:
    """A context in which ops are neither launched nor seen by autograd."""
    seen = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    with (
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._ExcludeDispatchKeyGuard(seen),
        torch.no_grad(),
    ):
        yield


class Launches(TorchDispatchMode):
    """Launches every op on tensors of the device."""

    like: ClassVar[dict[Any, Any]] = {}  # by op and arguments without values: outputs on the meta device

    def __init__(self, streams: Streams, pool: Pool) -> None:
        super().__init__()
        self.streams, self.pool = streams, pool
        self.deterministic = False  # memory without values is filled, as in torch's mode of that name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self.launch(func, args, dict(kwargs or {}))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it is faster

    def launch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if is_view(func):
            return func(*args, **kwargs)
        to_device = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == LATE
        tensors = [x for x in leaves((*args, *kwargs.values())) if isinstance(x, Tensor)]
        late = [x for x in tensors if is_late(x)]
        if not late and not to_device:
            return func(*args, **kwargs)
        if to_device:
            kwargs["device"] = torch.device("cpu")
        if func in COPIES and (len(late) < len(tensors) or to_device):
            return self.copy(func, args, kwargs)
        if func in NO_VALUES:
            made = func(*args, **kwargs)
            made = self.without_values(made) if self.streams.captures else marked(poisoned(made))
            if self.deterministic and torch.utils.deterministic.fill_uninitialized_memory:
                self.run_late(aten.fill_.Scalar, (made, math.nan if made.is_floating_point() else 1), {}, made)
            return made
        for x in tensors:
            if not is_late(x) and x.dim():
                raise RuntimeError(f"{func} of tensors on the device and in the host's memory")
        # A number of the host is read when the kernel is launched.
        if len(late) < len(tensors):
            args = mapped(lambda x: x if is_late(x) else x.clone(), args)
        if not gives_tensors(func):
            return self.at_once(func, args, kwargs)
        try:
            outputs = self.outputs(func, args, kwargs)
        except (NotImplementedError, RuntimeError):  # its shape depends on values
            return self.at_once(func, args, kwargs)
        self.run_late(func, args, kwargs, outputs)
        return outputs

    def run_late(self, *kernel: Any) -> None:
        """Launch a kernel (function, args, kwargs, outputs); in a capture it keeps the addresses of its tensors."""
        if self.streams.captures:
            self.streams.launch(recorded(compute, kernel, self.pool, is_late))
            return
        # A kernel keeps the memory that it was launched with: an optimizer's parameter may point to another version of
        # its weights before the kernel runs. And autograd reuses a gradient's memory only if nothing else refers to the
        # tensor. A mode is called below autograd and is inactive meanwhile: nothing sees that these are detached.
        func, args, kwargs, outputs = mapped(Tensor.detach, kernel)
        kwargs = {name: mapped(Tensor.detach, x) for name, x in kwargs.items()}
        self.streams.launch(lambda: compute(func, args, kwargs, outputs))

    def without_values(self, like: Tensor) -> Tensor:
        """An uninitialized tensor on the device; in a capture one of the pool."""
        if not self.streams.captures:
            return without_values(like)
        with as_a_kernel():
            return marked(self.pool.make(like))

    def at_once(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op whose result the host waits for."""
        self.streams.host_waits(str(func))
        with as_a_kernel():
            return mapped(marked, func(*args, **kwargs))

    def outputs(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an op returns before it has run: arguments that it changes, and tensors without values."""
        changed = changed_arguments(func)
        aliases = [
            None if place is None else kwargs.get(place[1], args[place[0]] if place[0] < len(args) else None)
            for place in changed
        ]
        if all(alias is not None for alias in aliases):
            return None if not aliases else aliases[0] if len(aliases) == 1 else tuple(aliases)
        key = func, *(like_key(x) for x in leaves((*args, *kwargs.values())))
        if key not in self.like:
            like_args, like_kwargs = mapped(on_meta, args), {name: mapped(on_meta, x) for name, x in kwargs.items()}
            if "device" in kwargs:
                like_kwargs["device"] = torch.device("meta")
            with as_a_kernel():
                self.like[key] = func(*like_args, **like_kwargs)
        made = mapped(self.without_values, self.like[key])
        if len(changed) == 1:
            return made
        return tuple(new if alias is None else alias for new, alias in zip(made, aliases, strict=True))

    def copy(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """A copy between the host's memory and the device's, or to the device of a tensor that is already on it."""
        source = args[1] if func is aten.copy_.default else args[0]
        late = kwargs.pop("non_blocking", len(args) > 2 and args[2])
        if func is aten.copy_.default:
            target = args[0]
        elif is_late(source) and kwargs.get("dtype", source.dtype) == source.dtype:
            return source.detach()
        else:
            like = on_meta(source).to(dtype=kwargs.get("dtype"), memory_format=kwargs.get("memory_format"))
            target = self.without_values(like)
        host = target if is_late(source) else source
        if source.numel() and not (late and is_late(host, PINNED)):
            self.streams.host_waits("a copy that is not of pinned memory")
            late = False
        run = aten.copy_.default, (target, source), {}, target
        if late:
            # What is launched before and still reads the host's memory reads it as it is.
            reads = vars(host.untyped_storage()).setdefault("reads", [])
            if not is_late(target) and not reads:
                target.view(-1).view(torch.uint8).fill_(ONES)
            if is_late(target):
                reads.append(target)
            self.run_late(*run)
            if is_late(target):
                self.streams.launch(reads.pop)
        else:
            with as_a_kernel():
                compute(*run)
        return target


def compute(func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
    """Compute an op, into outputs that were made before."""
    results = func(*args, **kwargs)
    for output, result in zip(leaves((outputs,)), leaves((results,)), strict=True):
        if isinstance(output, Tensor) and output is not result:
            output.copy_(result)


def leaves(values: Any) -> Iterator[Any]:
    """The arguments or results of an op, those in lists one by one."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same nested arguments or results, with `change` applied to the tensors."""
    if isinstance(value, list | tuple):
        return type(value)(mapped(change, x) for x in value)
    return change(value) if isinstance(value, Tensor) else value


@cache
def is_view(func: Any) -> bool:
    schema = func._schema
    return not schema.is_mutable and any(result.alias_info is not None for result in schema.returns)


@cache
def gives_tensors(func: Any) -> bool:
    return all("Tensor" in str(result.type) for result in func._schema.returns)


@cache
def changed_arguments(func: Any) -> list[tuple[int, str] | None]:
    """For each result of an op: index and name of the argument that it is, changed in place; None: a new tensor."""
    changed = {
        frozenset(argument.alias_info.before_set): (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    returns = func._schema.returns
    return [result.alias_info and changed[frozenset(result.alias_info.before_set)] for result in returns]


def like_key(x: Any) -> Any:
    """What an output's shape may depend on."""
    return (x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else (type(x), str(x))


def on_meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")


def without_values(like: Tensor) -> Tensor:
    return marked(poisoned(torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)))


class Calls(TorchFunctionMode):
    """Functions that torch answers without an op, as if on the CPU, answered for the device."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self.streams = streams
        self.answers: dict[Any, Callable[..., Any]] = {
            Tensor.device.__get__: lambda x: torch.device(LATE, 0),
            Tensor.numpy: self.refuse,
            Tensor.__array__: self.refuse,
            Tensor.tolist: lambda x: self.on_host(x, "tolist").tolist(),
            Tensor.cpu: lambda x: self.on_host(x, "cpu"),
            Tensor.to: self.to,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.pin_memory:
            with torch._C.DisableTorchFunction():
                return marked(args[0].clone(), PINNED)
        if func in self.answers and is_late(args[0]):
            return self.answers[func](*args, **kwargs)
        return func(*args, **kwargs)

    def refuse(self, x: Tensor, *_: Any, **__: Any) -> None:
        raise TypeError("a tensor of the device has no numpy array: copy it to the host's memory first")

    def on_host(self, x: Tensor, what: str) -> Tensor:
        self.streams.host_waits(what)
        with as_a_kernel():
            return x.clone()

    def to(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        wanted = kwargs.get("device", args[0] if args else None)
        if isinstance(wanted, str | torch.device) and torch.device(wanted).type == "cpu":
            x = self.on_host(x, "to")
        with torch._C.DisableTorchFunction():
            return x.to(*args, **kwargs)


class Late(Device):
    """The device, on which tensors can be computed inside `working`."""

    kind: ClassVar[str] = LATE
    has_graphs = True

    def __init__(self, direct: bool, seed: int = 0, words: bool = False) -> None:
        """`direct`: MPI takes its memory; `seed`: of when kernels run; `words`: stream words in place of events."""
        super().__init__()
        register()
        self.torch, self.direct, self.streams = torch.device(LATE, 0), direct, Streams(seed, as_a_kernel)
        self.pool = Pool()
        self.all_words = StreamWords(self.host, WordOperations(self.streams)) if words else None
        self.launches, self.calls = Launches(self.streams, self.pool), Calls(self.streams)

    @contextlib.contextmanager
    def working(self, stream: str = COMPUTE) -> Iterator[None]:
        """A context in which this thread launches kernels on the device, and another thread its backwards."""
        engine = torch.autograd.Variable._execution_engine
        backwards = BackwardThread(engine, self)
        going_on = self.streams.going_on() if self.all_words else contextlib.nullcontext()  # words are not polled
        engine_patched = mock.patch.object(torch.autograd.Variable, "_execution_engine", backwards)
        with engine_patched, self.in_thread(stream), going_on:
            yield
            self.finish()
        backwards.calls.put(None)

    @contextlib.contextmanager
    def in_thread(self, stream: str) -> Iterator[None]:
        """A context in which this thread launches kernels on the device."""
        with self.launches, self.calls, self.streams.using(stream):
            yield

    def use_in_thread(self) -> None:
        """Launch this thread's kernels on the device, until the thread ends."""
        self.launches.__enter__()
        self.calls.__enter__()

    def be_deterministic(self) -> None:
        """Fill memory without values, if torch does so in its deterministic mode."""
        self.launches.deterministic = True

    def mark(self) -> Event | Number:
        """An event in the current stream, or a word that it writes."""
        return self.streams.record() if self.words is None else self.words.mark()

    def copies(self, out: bool) -> contextlib.AbstractContextManager[None]:
        """One stream for each direction."""
        return self.streams.using("copies out" if out else "copies in")

    def sums(self) -> contextlib.AbstractContextManager[None]:
        """A stream of their own."""
        return self.streams.using("sums")

    def host(self, size: int) -> Tensor:
        """Memory that is pinned as far as the device is concerned."""
        with as_a_kernel():
            return marked(poisoned(torch.empty(size, dtype=torch.uint8)), PINNED)

    def seed(self, value: int) -> None:
        """Its kernels draw from the CPU's generator, when they run."""
        self.streams.refuse_in_capture("a seed")
        self.streams.launch(lambda: torch.default_generator.manual_seed(value))

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the device, though torch takes it for the CPU's."""
        return is_late(tensor)

    def graph(self, draws: int) -> LateGraph:
        """A graph that is captured into the pool."""
        return LateGraph(self.streams, self.pool, draws)

    def _memory(self, address: int, size: int) -> Tensor:
        with as_a_kernel():
            return marked(bytes_at(address, size))

    def finish(self) -> None:
        """Run all launched kernels."""
        self.streams.host_waits("finish")


class BackwardThread:
    """Autograd's engine, in a thread of its own."""

    def __init__(self, engine: Any, device: Late) -> None:
        self.engine, self.device = engine, device
        self.calls: SimpleQueue[Any] = SimpleQueue()
        self.results: SimpleQueue[Any] = SimpleQueue()
        self.thread = threading.Thread(target=self.run, name="late-autograd", daemon=True)
        self.thread.start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """As the engine's, in the caller's stream."""
        if threading.current_thread() is self.thread:
            return self.engine.run_backward(*args, **kwargs)
        modes = _get_current_dispatch_mode_stack()
        others = modes[modes.index(self.device.launches) + 1 :]  # autograd's threads have the caller's modes
        self.calls.put((self.device.streams.current, others, args, kwargs))
        result, error = self.results.get().pop()
        if error is not None:
            raise error
        return result

    def run(self) -> None:
        while (call := self.calls.get()) is not None:
            stream, modes, args, kwargs = call
            result, error = None, None
            with self.device.in_thread(stream), contextlib.ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode)
                try:
                    result = self.engine.run_backward(*args, **kwargs)
                except BaseException as raised:
                    error = raised
            answer = [(result, error)]
            del call, modes, args, kwargs, result, error
            self.results.put(answer)  # nothing is freed here once the caller continues: it pops the list
