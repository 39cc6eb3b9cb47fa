"""--graphs: the kernels of each job are captured once, as a graph, and replayed in every later pass through the list.

1. Passes 1 to 3 compute normally. Passes 2 and 3 also check whether every operation can be captured (`CaptureCheck`).
   If one cannot, its stage keeps computing normally, and one line says why.
2. Pass 4 captures every job of the other stages, in the order of the list, and replays it at once.
3. Later passes replay: the host launches a graph in place of its kernels.

A graph uses the addresses that its capture saw:
- Weights, their gradients and received messages lie in memory with fixed addresses: they are used in place.
- What a graph computes lies in a pool that all graphs of the rank share. Graphs that are captured later reuse the
  memory of dead tensors. Replays keep the order of the captures, so lifetimes are those of the captures: a microbatch
  in flight has memory of its own, and a rank needs no more memory than without graphs.
- Anything else (data, and values of stages that compute normally) is copied into the pool before the replay.
- A forward and the backward of its microbatch are captured as a pair: the backward frees what the forward has saved.
- A layer that draws random numbers has its own generator in each graph, which is seeded before the replay.

If a microbatch's data have another shape or padding than in the captures, all its jobs compute normally.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, UntypedStorage
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mpirun.comm.device import CudaGraph, Device
from mpirun.model.rng import LayerRng
from schedgen.ir.instructions import Instruction, Kind, Op
from schedgen.util.errors import UsageError, raised

LOOKED_AT, CAPTURED = (2, 3), 4  # passes
HOST_WAITS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
NUMBERS = (int, float, complex, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format)
PLAIN = (int, float, str, bytes, bool, type(None), torch.dtype)  # types of inputs whose values are compared
FORWARDS = (Op.FWD, Op.RECOMPUTE)


def check_nothing_offloaded(instructions: Sequence[Instruction]) -> None:
    """UsageError if what a job saves would leave meanwhile: a graph keeps it at fixed addresses of the pool."""
    if any(i.kind == Kind.SAVED for i in instructions):
        raise UsageError("graphs: what captured jobs save has fixed addresses: compile without --offload and --evict")


class JobGraphs:
    """What all graphs of a rank share, and the current pass."""

    def __init__(self, device: Device, blocks: Iterable[Tensor]) -> None:
        """`blocks`: the memory that messages are received into, the same in every pass."""
        self.device, self.passes = device, 0
        self.staying: WeakSet[UntypedStorage] = WeakSet(block.untyped_storage() for block in blocks)
        self.refused: dict[int, str] = {}  # by stage: why it is not captured
        self.seen: dict[Any, bytes] = {}  # by stage and version, opcode, form of the inputs: digest of operations
        self.as_always: set[tuple[int, int]] = set()  # stage and microbatch that compute normally in this pass

    def begin_pass(self) -> None:
        """Begin the next pass through the list."""
        self.passes += 1
        if self.passes == CAPTURED:
            self.device.release()  # else the pool cannot use memory that the allocator has cached

    @property
    def captured(self) -> bool:
        """Whether all captures are done: from then on nothing is allocated."""
        return self.passes > CAPTURED

    @property
    def looked(self) -> bool:
        """Whether this pass was the one after which all refusals are known."""
        return self.passes == LOOKED_AT[-1]

    def refusals(self) -> list[str]:
        """A line for each stage that is not captured."""
        return [
            f"graphs: stage {stage} is computed without a graph: {why}" for stage, why in sorted(self.refused.items())
        ]

    def begin_microbatch(self, i: Instruction, fits: bool) -> None:
        """Begin a forward: unless it `fits`, all jobs of its stage and microbatch in this pass compute normally."""
        self.as_always.discard((i.stage, i.mb))
        if not fits:
            self.as_always.add((i.stage, i.mb))
            if self.device.words is not None:  # computing normally allocates: the rest of the pass uses events
                self.device.finish()
                self.device.use_words(ready=False)


class Job:
    """A job of a stage and microbatch: computed normally, checked, captured, or replayed."""

    def __init__(self, graphs: JobGraphs, i: Instruction, rng: LayerRng, compute: Callable[..., Any]) -> None:
        """`rng`: of the stage's layers; `compute`: from pytrees of tensors to a pytree of contiguous tensors."""
        self.graphs, self.i, self.rng, self.compute = graphs, i, rng, compute
        self.device, self.name = graphs.device, Op(i.op).name
        self.draws: list[str] = []  # layers that draw, in the order of their forwards
        self.forms: list[Any] = []  # of its inputs in the checked passes
        self.graph: CudaGraph | None = None
        self.inputs: list[Any] = []  # by leaf: the memory that the graph reads
        self.outputs: Any = None  # the memory that the graph writes

    def __call__(self, *inputs: Any) -> Any:
        """The result of `compute`, computed normally or by a graph."""
        graphs = self.graphs
        if self.i.stage in graphs.refused or graphs.passes < LOOKED_AT[0]:
            return self.compute(*inputs)
        leaves, spec = pytree.tree_flatten(inputs)
        form = spec, [_form(leaf) for leaf in leaves]
        if graphs.passes in LOOKED_AT:
            return self._look(inputs, leaves, form)
        fits = form in self.forms and (self.graph is not None or graphs.passes == CAPTURED)
        if self.i.op == Op.FWD:
            graphs.begin_microbatch(self.i, fits)
        if (self.i.stage, self.i.mb) in graphs.as_always:
            return self.compute(*inputs)
        if not fits:
            raise RuntimeError("graphs: the inputs of this job do not fit its graph, though those of its forward did")
        if graphs.passes == CAPTURED:
            self.forms = [form]
            return self._capture(leaves, spec)
        return self._replay(leaves)

    def _look(self, inputs: Sequence[Any], leaves: Sequence[Any], form: Any) -> Any:
        i, graphs, begin = self.i, self.graphs, self.rng.begin
        self.draws = []
        self.forms.append(form)

        def noted(name: str) -> None:
            self.draws.append(name)
            begin(name)

        self.rng.begin = noted
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)] if i.op in FORWARDS else None
        with CaptureCheck(self.device, given) as check:
            outputs = self.compute(*inputs)
        self.rng.begin = begin
        odd = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, (Tensor, *PLAIN))]
        why = check.why or (f"the batch has a {odd[0]}, which is no tensor" if odd else None)
        operations = check.digest.digest()
        before = graphs.seen.setdefault((id(self.rng), i.op, str(form)), operations)
        if why is None and before != operations:
            why = "its operations change from one time to the next"
        if why is not None:
            graphs.refused.setdefault(i.stage, f"{self.name}: {why}")
        return outputs

    def _capture(self, leaves: Sequence[Any], spec: pytree.TreeSpec) -> Any:
        begin = self.rng.begin
        self.graph = graph = self.device.graph(len(self.draws))
        numbers = iter(range(len(self.draws)))
        self.rng.begin = lambda name: graph.draw(next(numbers))
        try:
            with graph.capturing():
                with _without_values():
                    read = [self._place(leaf) for leaf in leaves]
                outputs = self.compute(*pytree.tree_unflatten(read, spec))
        except Exception as error:
            raise RuntimeError(
                f"graphs: {self.name} of stage {self.i.stage} cannot be captured: {raised(error)}"
            ) from error
        finally:
            self.rng.begin = begin
        tensors = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]
        self.graphs.staying.update(x.untyped_storage() for x in tensors)
        # Tensors that do not own the memory: it returns to the pool when those above die.
        self.inputs = [self.device.at(x) if isinstance(x, Tensor) else x for x in read]
        self.outputs = pytree.tree_map_only(Tensor, self.device.at, outputs)
        self._replay(leaves)
        return outputs

    def _place(self, leaf: Any) -> Any:
        """Where the graph reads an input: in place if its address is fixed, else from memory of the pool."""
        if not isinstance(leaf, Tensor) or leaf.untyped_storage() in self.graphs.staying:
            return leaf
        return torch.empty_like(leaf)

    def _replay(self, leaves: Sequence[Any]) -> Any:
        for place, leaf in zip(self.inputs, leaves, strict=True):
            if isinstance(leaf, Tensor) and leaf.data_ptr() != place.data_ptr():
                place.copy_(leaf)
        assert self.graph is not None
        self.graph.replay([self.rng.seed(name) for name in self.draws])
        return self.outputs


@contextlib.contextmanager
def _without_values() -> Iterator[None]:
    """Inside, torch's deterministic mode does not fill new memory with NaN: each replay would overwrite its inputs."""
    settings: Any = torch.utils.deterministic
    before, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = before


def _form(leaf: Any) -> Any:
    """What a graph relies on: shape, strides and type of a tensor, the value of anything else."""
    if isinstance(leaf, Tensor):
        return leaf.size(), leaf.stride(), leaf.dtype
    return (type(leaf), leaf) if isinstance(leaf, PLAIN) else object()


class CaptureCheck(TorchDispatchMode):
    """Checks whether a CUDA graph that replays the operations of a job would compute the same as the job.

    Cannot be captured: operations on host memory, operations whose values the host waits for, random draws in a
    backward. Can be captured, but would replay wrongly: operations that change from one run to the next, because Python
    takes another branch or passes in other numbers, and reads of tensors whose address changes. All operations are
    checked while it is active, even in autograd's threads, which run under the caller's modes.
    """

    def __init__(self, device: Device, given: Sequence[Tensor] | None) -> None:
        """`device`: where the job computes; `given`: the inputs of a forward; None for a backward."""
        super().__init__()
        self.device = device
        self.why: str | None = None  # why the job cannot be captured; None: no reason found
        self.digest = hashlib.sha256()  # of the operations, with their tensors' shapes and types and other arguments
        self.made: WeakSet[UntypedStorage] | None = None  # memory that may move between runs; None: not tracked
        if given is not None:
            self.made = WeakSet(x.untyped_storage() for x in given)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # compiled modules stay compiled under this mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and record it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        read, made = pytree.tree_leaves((args, kwargs)), pytree.tree_leaves(result)
        self.digest.update(f"{func} {[self._text(x) for x in read]}\n".encode())
        if self.made is not None:
            self.made.update(x.untyped_storage() for x in made if isinstance(x, Tensor))
        if self.why is None:
            self.why = self._why_not(func, [x for x in (*read, *made) if isinstance(x, Tensor)])
        return result

    def _why_not(self, func: Any, tensors: Sequence[Tensor]) -> str | None:
        if any(tag in func.tags for tag in HOST_WAITS):
            return f"{func} makes the host wait for values"
        # Attention's backward gets its forward's random seed: a number on the host, unless the forward is captured.
        attends = "attention" in func.name()
        if self.made is None and torch.Tag.nondeterministic_seeded in func.tags and not attends:
            return f"{func} draws random numbers in a backward"
        returns, views = func._schema.returns, not func._schema.is_mutable
        if views and any(result.alias_info is not None for result in returns):  # a view: it touches no values
            return None
        if any(x.numel() and not self.device.has(x) for x in tensors if x.dim() or not attends):
            return f"{func} is computed on the host, or from host memory"
        return None

    def _text(self, x: Any) -> str:
        """An argument as text; a tensor neither made by nor given to the job with its address, which must stay."""
        if not isinstance(x, Tensor):
            return str(x) if isinstance(x, NUMBERS) else type(x).__name__
        stays = self.made is not None and x.untyped_storage() not in self.made
        return f"{x.dtype}{tuple(x.size())}{x.stride()}" + (f" at {x.data_ptr()}" if stays else "")
