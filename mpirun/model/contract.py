"""The contract between a model's author and mpirun: `Model`, with its stages, a loss, and how a microbatch is made.

`--model MODULE:FUNCTION` names a function that takes the number of stages and returns a `Model`. Nothing in it knows
about ranks, steps or seeds. `load_model.py` calls the function, `build_stage.py` makes a stage's module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from mpirun.data.microbatches import MakeBatch, Pair, input_and_target
from mpirun.model.dataflow import Input, Reads, Value, model_graph
from mpirun.model.parallel_layers import UNSLICED, Slice
from schedgen.ir.graph_file import ModelGraph

Layers = Mapping[str, Callable[[], nn.Module]]
StageEntry = Layers | Callable[[], nn.Module] | nn.Module
Weights = Callable[[Collection[str]], Mapping[str, Tensor]]  # names -> values of those that exist


class Origin(NamedTuple):
    """What is known of a model that is, or was cut from, one module: `bare_model`, `split`, `split_sequential` set it.

    named       whether the model was cut from a module. Parameters and buffers then have their names there, for every
                cut. A buffer, or a frozen parameter, has the same value in all stages that have it.
    aliases     by a parameter's or buffer's name in the module, its other names there: weights may have any of them.
    pair        collated samples of a loader -> (input, target); stages count the leaves of this input.
    traced      whether stages are for microbatches of one shape, or of one for each of `buckets`.
    buckets     the sizes that it was traced on.
    join        (stages, numbers) -> the fields stages, tied and reads of a Model whose stage k joins the next
                numbers[k] of these stages; UsageError if they are not the stages that were cut. None: only stages that
                are given by their layers can be joined.
    rebuild     the last stage's output -> the module's own; None: they are the same.
    unused      by name, the module's parameters and saved buffers that are in no stage, since its forward does not use
                them.
    call        (module, *leaves of the input) -> the tensors of its output, where a bare module is the one stage: it
                takes microbatches of any shapes. None: stages are called with what they read.
    """

    named: bool = False
    aliases: Mapping[str, Sequence[str]] = {}
    pair: Pair = input_and_target
    traced: bool = False
    buckets: tuple[int, ...] = ()
    join: Callable[[Sequence[StageEntry], Sequence[int]], Mapping[str, Any]] | None = None
    rebuild: Callable[[Any], Any] | None = None
    unused: Mapping[str, Tensor] = {}
    call: Callable[..., list[Tensor]] | None = None


class Model(NamedTuple):
    """What a model function returns.

    stages           one entry per stage: a mapping from names of layers to functions that build them, a function that
                     builds the stage's module, or the module itself. Prefer layers: they run one after the other, and
                     weights and dropout are seeded by their names, so that these do not depend on the cut into stages.
                     forward takes the sources in `reads` and returns one tensor, or a tuple of them; its shapes are
                     the same for every microbatch. Trained parameters may have several types, and no hooks.
                     mpirun/docs/contract.md says what a forward may do. A module that is given is trained itself.
    loss             (output of the last stage, target) -> scalar, a mean over the microbatch, or (scalar, metrics by
                     name). The gradient is the mean over microbatches. The output is a tuple if the stage returns one.
    batch            (text, rng) -> (input, target) of one microbatch, each a tensor or any pytree of them. `text` is a
                     uint8 tensor, shape (bytes,); `rng`, a numpy Generator, is seeded by the run's seed, the step and
                     the microbatch. None: a script gives the data.
    length           how many bytes of text `batch` needs at least.
    tied             shared parameters: for each, where it occurs, as (stage, name). All copies get the value of the
                     first, and the sum of the gradients of all; all are trained, or all frozen. Modules that share a
                     parameter are tied without this.
    reads            by stage: what each argument of its forward is, a Value (output k of an earlier stage) or an Input
                     (leaf k of the input; the entries of dicts are in the order that they have in the first
                     microbatch). None: all outputs of its producers in the schedule or, without producers, all leaves;
                     they are separate arguments, or one tuple if forward does not take that many.
    loss_of          "microbatch", or "minibatch": loss takes the outputs and targets of all microbatches, concatenated
                     along dimension 0. The schedule must then have all forwards of the last stage before its first
                     backward, as gpipe has.
    sliced          stages that are sums over slices (see mpirun.model.parallel_layers), never the last. A function
                     that builds such a stage or its layer is called with `slice` if it has a parameter of this name,
                     and without it for the whole layer. Such stages have no parameter hooks and draw no random numbers.
    weights          names in the whole model -> values of those that it has, such as checkpoint.pretrained.Pretrained.
                     A stage asks for its own parameters and buffers; those without a value keep the one they are built
                     with, with a warning, or are refused if they have none.
    origin           set by `split` and `split_sequential`.
    tensor_parallel  T, set by mpirun: stage s of the function becomes stages T s to T s + T - 1, which are slices if
                     `sliced` has s, else replicas.
    """

    stages: Sequence[StageEntry]
    loss: Callable[[Any, Any], Tensor]
    batch: MakeBatch | None = None
    length: int = 1
    tied: Sequence[Sequence[tuple[int, str]]] = ()
    reads: Reads | None = None
    loss_of: str = "microbatch"
    sliced: Collection[int] = ()
    weights: Weights | None = None
    origin: Origin = Origin()
    tensor_parallel: int = 1

    def resolved_reads(self, producers: Sequence[Sequence[int]], leaves: int) -> Reads:
        """`reads` or, if it is None, its default for these producers of each stage and this number of input leaves.

        The default has the first output of each producer; `all_outputs` adds the others, once their number is known.
        """
        if self.reads is not None:
            return self.reads
        inputs = [Input(index) for index in range(leaves)]
        return [[Value(p, 0) for p in stages] or inputs for stages in producers]

    def graph(self) -> ModelGraph:
        """What a schedule must know of the stages, which are a chain if `reads` is None."""
        reads = self.resolved_reads([[stage - 1] if stage else [] for stage in range(len(self.stages))], 1)
        return model_graph(reads, self.tied, self.sliced)

    def model_stage(self, stage: int) -> int:
        """The function's stage that a stage is a slice or a replica of; without slices the stage itself."""
        return stage // self.tensor_parallel

    def slice_of(self, stage: int) -> Slice:
        """Which slice of the function's stage a stage is; UNSLICED if that stage is not sliced."""
        sliced = self.model_stage(stage) in self.sliced
        return Slice(stage % self.tensor_parallel, self.tensor_parallel) if sliced else UNSLICED

    def is_first_slice(self, stage: int) -> bool:
        """Whether a stage is the first slice or replica of one of the function's stages, or that stage itself."""
        return stage % self.tensor_parallel == 0

    def is_replica(self, stage: int) -> bool:
        """Whether a stage computes the same as the stage before it, on another rank."""
        return not self.is_first_slice(stage) and self.model_stage(stage) not in self.sliced

    def ties_slices(self, tie: Sequence[tuple[int, str]]) -> bool:
        """Whether the copies that a tie joins are in the slices of one stage, each of which has the whole parameter."""
        stages = {stage for stage, _ in tie}
        return len(stages) > len(set(map(self.model_stage, stages))) == 1

    def tied_to_earlier(self, stage: int, names: Iterable[str]) -> set[str]:
        """Of the parameters of a stage, those that an earlier stage has too."""
        if self.is_replica(stage):
            return set(names)
        ties = [tie for tie in self.tied if min(place for place, _ in tie) < stage]
        return {name for tie in ties for place, name in tie if place == stage}

    def entry_name(self, stage: int, name: str) -> str:
        """The name of a stage's parameter or buffer in the whole model; if it is tied, the name of the tie's first.

        If a stage is given by its layers, or cut from a module, names do not depend on how it is cut into stages.
        """
        for tie in self.tied:
            if (stage, name) in tie:
                stage, name = tie[0]
        name = name.replace("_orig_mod.", "")  # which torch.compile adds
        if self.origin.named or isinstance(self.stages[stage], Mapping):
            return name
        return f"stage{self.model_stage(stage)}.{name}"
