"""What a stage's forward does besides computing outputs: draw random numbers, and write to tensors that it is given.

And whether its eval() reads its parameters.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from mpirun.data.load_ahead import arguments_of, draws
from mpirun.model.rng import layers_of

BATCH_NORM_WRITES = frozenset({"running_mean", "running_var"})  # written in training, whatever the schema says
OVERWRITES = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_"})  # without reading
OWN_GENERATOR = "a torch.Generator of its own"


def memory(x: Tensor) -> Any:
    """A tensor's storage, or itself if not strided. Views share its `_cdata`, which is unique while it is alive."""
    return x.untyped_storage() if x.layout == torch.strided else x


class ForwardWatch(TorchDispatchMode):
    """While it is active, records the layers that draw, in `random_layers`, and the memory written to, in `written`.

    `origins` has, by memory, the buffers on whose values before the forward its values depend. `draws` has, by name of
    generators other than torch's default ones that it draws from, their states after it or, for torch's, before each
    draw. A fake tensor's draw does not advance torch's generators: the watch does.
    Only writes by torch operations are seen, not those through NumPy views.
    """

    def __init__(self, module: nn.Module, layers: Sequence[str]) -> None:
        """`layers`: names of the module's layers; empty: its `RandomOp`s or, if it has none, the module itself."""
        super().__init__()
        self.module = module
        self.held = [memory(x) for x in (*module.buffers(), *module.parameters())]
        self.buffers = {name: _place(x) for name, x in module.named_buffers()}
        self.parameters = {name: (x, _place(x)) for name, x in module.named_parameters()}
        self.drawn = False  # by the layer whose forward is running
        self.random_layers: list[str] = []
        self.draws: dict[str, Any] = {}
        self.generators: dict[int, tuple[torch.Generator, Tensor]] = {}  # by `_cdata`, each with its first state
        self.written: set[int] = set()  # the `_cdata` of memory
        self.origins: WeakKeyDictionary[Any, frozenset[str]] = WeakKeyDictionary()
        for name, x in module.named_buffers():
            self.origins[memory(x)] = self._origins_of(x) | {name}
        self.layers = layers_of(module, layers)
        for name in self.layers:
            layer = module.get_submodule(name) if name else module
            layer.register_forward_pre_hook(lambda *_: setattr(self, "drawn", False))
            layer.register_forward_hook(lambda *_, name=name: self.random_layers.append(name) if self.drawn else None)

    def __enter__(self) -> ForwardWatch:
        """Remember the states of Python's and NumPy's generators."""
        self.before = _states()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Record those that have changed, and give torch's generators the states before the first draws."""
        super().__exit__(*error)
        with _disable_current_modes():
            for generator, state in self.generators.values():
                generator.set_state(state)
        self.after = _states()
        self.draws |= {name: state for name, state in self.after.items() if state != self.before[name]}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; record whether it draws, and where it writes."""
        kwargs, written = kwargs or {}, _may_write_to(func)
        if written or torch.Tag.nondeterministic_seeded in func.tags:
            values = arguments_of(func, args, kwargs)
            self.drawn |= draws(func, values)
            generator = values.get("generator")
            if generator is not None and generator._cdata not in _default_generators():
                self._draw(generator)
            for name in written if values.get("training", True) else written - BATCH_NORM_WRITES:
                self.written |= {memory(x)._cdata for x in tree_leaves(values[name]) if isinstance(x, Tensor)}
        result = func(*args, **kwargs)
        if self.origins:
            self._follow(func, args, kwargs, result)
        return result

    def _draw(self, generator: Any) -> None:
        """Record the state of a torch.Generator, and advance it."""
        with _disable_current_modes():
            state = generator.get_state()
            self.generators.setdefault(generator._cdata, (generator, state))
            self.draws.setdefault(OWN_GENERATOR, []).append(state.numpy().tobytes())
            _advance(generator)

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record the origins of what an operation has made or changed; a BatchNorm in training only changes buffers."""
        arguments = func._schema.arguments
        given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
        unread = {argument.name for argument in arguments if argument.is_out}
        unread |= {"self"} if func._schema.name.rpartition("::")[2] in OVERWRITES else set()
        unread |= BATCH_NORM_WRITES if given.get("training", True) else set()
        found = self._origins_of([x for name, x in given.items() if name not in unread])
        changed = [given[name] for name in _may_write_to(func) - BATCH_NORM_WRITES if name in given]
        for x in _tensors([result, changed]):
            is_whole = x.layout == torch.strided and x.nbytes == memory(x).nbytes()
            self.origins[memory(x)] = found if is_whole else found | self._origins_of(x)

    def _origins_of(self, values: Any) -> frozenset[str]:
        return frozenset[str]().union(*(self.origins.get(memory(x), ()) for x in _tensors(values)))

    def draws_anew(self, forward: Callable[[], object]) -> tuple[str, ...]:
        """The names in `draws`, except those of generators that each forward seeds, of which a second one tells."""
        if not self.draws:
            return ()
        again, states = ForwardWatch(self.module, ()), (random.getstate(), np.random.get_state())
        with _disable_current_modes():
            for generator, _ in self.generators.values():
                _advance(generator)
        try:
            with again:
                forward()
        except Exception:  # such as that of a module that counts its forwards
            return tuple(self.draws)
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            with _disable_current_modes():
                for generator, state in self.generators.values():
                    generator.set_state(state)
        drawn_again = again.after | again.draws
        return tuple(name for name, drawn in self.draws.items() if drawn_again.get(name) != drawn)

    def carried_buffers(self, outputs: Sequence[Tensor]) -> list[str]:
        """The changed buffers on whose values before the forward its outputs depend, as with spectral norm."""
        origins = self._origins_of(outputs)
        return [name for name in self.changed_buffers() if name in origins]

    def has_written_to(self, x: object) -> bool:
        """Whether `x` is a tensor whose memory has been written to."""
        return isinstance(x, Tensor) and memory(x)._cdata in self.written

    def changed_buffers(self) -> list[str]:
        """The module's buffers that have been changed, replaced, added or removed."""
        before, after = self.buffers, {name: _place(x) for name, x in self.module.named_buffers()}
        return [n for n in {**before, **after} if before.get(n) != after.get(n) or before[n][0] in self.written]

    def replaced_parameters(self) -> list[str]:
        """The module's parameters that have been replaced or removed, or whose memory has been replaced."""
        after = dict(self.module.named_parameters())
        return [n for n, (x, place) in self.parameters.items() if after.get(n) is not x or _place(x) != place]


def leaves_of_graph(outputs: Iterable[Tensor]) -> list[Tensor]:
    """The tensors whose `grad` a backward from these outputs would add to."""
    nodes = [x.grad_fn for x in outputs if x.grad_fn is not None]
    seen, leaves = set(nodes), []
    while nodes:
        node: Any = nodes.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.append(leaf)
        new = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= new
        nodes += new
    return leaves


class ReadWatch(TorchDispatchMode):
    """While it is active, records in `read` whether an operation has one of these tensors, or a view of one.

    Views count, too: a module may keep one from its first eval(), but an evaluation's weights may be elsewhere later.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """`tensors`: those to watch."""
        super().__init__()
        self.held, self.read = [memory(x) for x in tensors], False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; record whether it has a watched tensor."""
        kwargs, watched = kwargs or {}, {x._cdata for x in self.held}
        has = (isinstance(x, Tensor) and memory(x)._cdata in watched for x in tree_leaves((args, kwargs)))
        self.read |= func is not torch.ops.prim.device.default and any(has)  # fake tensors dispatch `x.is_cuda`
        return func(*args, **kwargs)


def _states() -> dict[str, Any]:
    """The states of generators that torch does not know."""
    kind, keys, *rest = np.random.get_state()
    return {"Python's random": random.getstate(), "numpy.random": (kind, np.asarray(keys).tobytes(), *rest)}


def _advance(generator: torch.Generator) -> None:
    torch.empty(1, device=generator.device).uniform_(generator=generator)


def _default_generators() -> set[int]:
    """The `_cdata` of torch's default generators."""
    generators: tuple[Any, ...] = (torch.default_generator, *torch.cuda.default_generators)
    return {generator._cdata for generator in generators}


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _place(x: Tensor) -> tuple[Any, ...]:
    """The `_cdata` of a tensor's memory, and where its elements lie in this memory."""
    strided = x.layout == torch.strided and not x.is_nested
    return memory(x)._cdata, *((x.shape, x.stride(), x.storage_offset()) if strided else ())


@cache
def _may_write_to(operation: Any) -> frozenset[str]:
    """The names of the arguments that an operation may write to."""
    return frozenset(
        argument.name
        for argument in operation._schema.arguments
        if argument.name in BATCH_NORM_WRITES or (argument.alias_info is not None and argument.alias_info.is_write)
    )
