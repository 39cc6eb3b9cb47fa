"""Models that tests run: each function takes the number of stages, as `--model models_for_tests:NAME` asks for."""

from __future__ import annotations

import functools
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpirun import Input, Model, Value, split_layers
from mpirun.examples import gpt, mlp, seq2seq
from mpirun.model.parallel_layers import UNSLICED, ColumnParallelLinear, RowParallelLinear, Slice, SlicedDim, skip

WIDTH = 128  # of mlp.tiny


def with_stage(stages: int, index: int, stage: Callable[[], nn.Module]) -> Model:
    """mlp.tiny with one stage replaced."""
    model = mlp.tiny(stages)
    entries = list(model.stages)
    entries[index] = stage
    return model._replace(stages=entries)


def changed(count: int, /, make: Callable[[int], Model] = mlp.tiny, **fields: Any) -> Model:
    """mlp.tiny, or another model, with other fields."""
    return make(count)._replace(**fields)


# GPTs with little to compute, up to 8 stages

gpt_tiny = partial(gpt.gpt, blocks=6, width=16, heads=4, length=16, sequences=2)
gpt_tied = partial(gpt_tiny, tied=True)
tied_of_four = partial(gpt_tied, blocks=2)  # layers
gpt_tensor = partial(gpt.gpt, blocks=3, width=16, heads=4, length=16, sequences=2, halves=True)
halves_of_a_block = partial(gpt_tensor, blocks=1)  # 4 layers


@functools.cache
def small_seq2seq(stages: int) -> Model:
    """An encoder and a decoder of two layers each, traced."""
    return seq2seq.seq2seq(stages, layers=2, width=16, heads=2, length=8, sequences=2)


# Stages of a DAG


class Encoder(nn.Module):
    """(samples, 16) bytes -> (samples, 64)."""

    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, 8)
        self.linear = nn.Linear(128, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.byte(tokens).flatten(1)))


class Mix(nn.Module):
    """Several (samples, 64) -> (samples, out), each input through a linear layer of its own."""

    def __init__(self, inputs: int, out: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(64, out) for _ in range(inputs))

    def forward(self, *inputs: Tensor) -> Tensor:
        parts = [linear(x) for linear, x in zip(self.linears, inputs, strict=True)]
        return nnf.gelu(sum(parts[1:], parts[0]))


class Skip(Mix):
    """As Mix, and its first input is used once more, in a skip connection."""

    def forward(self, *inputs: Tensor) -> Tensor:
        return inputs[0].repeat(1, self.linears[0].out_features // 64) + super().forward(*inputs)


# Encoders 0 and 1; 2 reads both; 3 reads 0 and 2. With skips, these use the output of 0 twice each.
joined = partial(changed, stages=[Encoder, Encoder, lambda: Mix(2, 64), lambda: Mix(2, 256)])
joined_with_skips = partial(changed, stages=[Encoder, Encoder, lambda: Skip(2, 64), lambda: Skip(2, 256)])
# Encoder 0; 1 and 2 read it; 3 reads 0, 1 and 2: a gradient arrives from three consumers.
fan = partial(changed, stages=[Encoder, lambda: Mix(1, 64), lambda: Mix(1, 64), lambda: Mix(3, 256)])


class Several(Encoder):
    """Bytes -> numbers, a skip connection of half their width, how often each byte occurs, and the scale itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(64))

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        x = super().forward(tokens)
        return x * self.scale, x[:, :32].bfloat16(), nnf.one_hot(tokens, 256).sum(1), self.scale


class Measured(Mix):
    """As Mix, and the mean of what it returns: a tensor without dimensions."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        x = super().forward(*inputs)
        return x, x.mean()


class Skipped(nn.Module):
    """A vector, the skip connection and bytes -> another vector, and the first one unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64 + 32 + 16, 64)

    def forward(self, x: Tensor, skip: Tensor, tokens: Tensor) -> list[Tensor]:
        return [torch.tanh(self.linear(torch.cat([x, skip.float(), tokens / 256], 1))), x]


class End(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 256)

    def forward(self, x: Tensor, before: Tensor, counts: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        scale, skip, mean = others
        return self.linear(x + before * scale + skip.repeat(1, 2) + mean), counts


def several(stages: int) -> Model:
    """Four stages with several outputs each, of several types, that go to different consumers; a loss of two."""

    def loss(outputs: tuple[Tensor, Tensor], target: dict[str, Tensor]) -> Tensor:
        scores, counts = outputs
        return nnf.cross_entropy(scores + counts / 16, target["next"])

    plain = mlp.tiny(1)

    def batch(text: Tensor, rng: np.random.Generator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        x, y = plain.batch(text, rng)
        return {"tokens": x}, {"next": y}

    return Model(
        [Several, lambda: Measured(1, 64), Skipped, End], loss, batch, plain.length,
        reads=[
            [Input(0)],
            [Value(0, 0)],
            [Value(1, 0), Value(0, 1), Input(0)],
            [Value(2, 0), Value(2, 1), Value(0, 2), Value(0, 3), Value(0, 1), Value(1, 1)],
        ],
    )  # fmt: skip


def tuples(stages: int) -> Model:
    """Without `reads`: stages return tuples, which layers take as one argument, and a module as several."""

    class Begin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.byte = nn.Embedding(256, 8)

        def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.byte(tokens).flatten(1), tokens, self.byte(tokens[:, 0])

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(128, 64)

        def forward(self, everything: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            x, tokens, skip = everything
            return torch.tanh(self.linear(x)), tokens, skip

    class Together(nn.Module):
        def forward(self, x: Tensor, tokens: Tensor, skip: Tensor) -> tuple[Tensor, ...]:
            return torch.cat([x, skip, tokens[:, :8] / 256], 1), skip

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(88, 256)

        def forward(self, *both: Tensor) -> Tensor:
            return self.linear(torch.cat(both, 1))

    entries = [Begin, {"layer": Layer, "act": nn.Identity}, Together, Last]
    return mlp.tiny(stages)._replace(stages=entries)


# The last stage reads one of its producer's two outputs.
unread = partial(
    changed,
    stages=[Encoder, lambda: Mix(1, 64), lambda: Measured(1, 64), lambda: Mix(1, 256)],
    reads=[[Input(0)], *([Value(stage, 0)] for stage in range(3))],
)


def contrastive(stages: int) -> Model:
    """Two towers, of 16 bytes and the 16 after them, whose loss compares every sample of the minibatch with all."""

    def batch(text: Tensor, rng: np.random.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        starts = torch.from_numpy(rng.integers(0, len(text) - 32, 8))
        pieces = text[starts[:, None] + torch.arange(32)].long()
        return (pieces[:, :16], pieces[:, 16:]), torch.zeros(8)

    def loss(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        a, b = (nnf.normalize(x, dim=1) for x in outputs)
        assert len(a) == len(target)
        return nnf.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            return self.linear(a), b

    return Model(
        [Encoder, Encoder, lambda: Mix(1, 64), Pair], loss, batch, 32,
        reads=[[Input(0)], [Input(1)], [Value(1, 0)], [Value(0, 0), Value(2, 0)]], loss_of="minibatch",
    )  # fmt: skip


# Stages with peculiar parameters


class Odd(nn.Module):
    """A frozen, an unused and an empty parameter, and a matrix used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.once = nn.Linear(WIDTH, WIDTH, bias=False)
        self.twice = nn.Linear(WIDTH, WIDTH, bias=False)
        self.twice.weight = self.once.weight
        self.frozen = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.empty = nn.Parameter(torch.ones(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen * self.twice(torch.tanh(self.once(x)))


def peculiar(stages: int) -> Model:
    """Modules as stages: an embedding with a sparse gradient, one without parameters, one with odd ones, the scores."""
    first = mlp.Embedding(WIDTH)
    first.byte.sparse = True
    return mlp.tiny(stages)._replace(stages=[first, nn.Tanh(), Odd(), nn.Linear(WIDTH, 256)])


class Shift(nn.Module):
    """Adds a parameter: the gradient of its input is that of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


def shifts(stages: int) -> Model:
    """An embedding, stages that pass their gradients on, and the scores."""
    ends = (lambda: mlp.Embedding(WIDTH), lambda: nn.Linear(WIDTH, 256))
    return mlp.tiny(stages)._replace(stages=[ends[0], *[Shift] * (stages - 2), ends[1]])


def all_frozen(stages: int) -> Model:
    """As `peculiar`, but no parameter needs a gradient."""
    model = peculiar(stages)
    return model._replace(stages=[stage.requires_grad_(False) for stage in model.stages])


def in_type(model: Model, dtype: torch.dtype) -> Model:
    """With all layers converted."""
    return model._replace(
        stages=[{name: lambda make=make: make().to(dtype) for name, make in stage.items()} for stage in model.stages]
    )


def bf16(stages: int) -> Model:
    """mlp.tiny in bfloat16; the loss in float32."""
    model = in_type(mlp.tiny(stages), torch.bfloat16)
    return model._replace(loss=lambda scores, target: nnf.cross_entropy(scores.float(), target))


def f64(stages: int) -> Model:
    """mlp.tiny in float64."""
    return in_type(mlp.tiny(stages), torch.float64)


class FourTypes(nn.Module):
    """float32, bfloat16, float64 and complex64 in turns; a matrix of an odd size, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 33, dtype=torch.bfloat16)
        self.scale = nn.Parameter(1 + torch.rand(WIDTH, dtype=torch.float64))
        self.nothing = nn.Parameter(torch.zeros(0, dtype=torch.bfloat16))
        self.phase = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.down = nn.Linear(33, WIDTH, bias=False, dtype=torch.bfloat16)
        self.shift = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(nnf.gelu(self.up(self.norm(x).bfloat16())))
        return x + (y * self.scale).float() * self.phase.abs().mean() + self.shift


def four_types(stages: int) -> Model:
    """mlp.tiny with fewer layers, and parameters of four types in every stage; up to 8 stages."""
    model = mlp.mlp(stages, hidden=6, width=WIDTH, samples=16)
    return model._replace(
        stages=[
            {name: FourTypes if name.startswith("layer") else make for name, make in stage.items()}
            for stage in model.stages
        ]
    )


def four_types_tied(stages: int) -> Model:
    """The first and the last stage share parameters of two types."""
    model = four_types(stages)
    names = ("norm.weight", "up.weight", "shift")
    return model._replace(tied=[[(0, f"layer0.{name}"), (stages - 1, f"layer5.{name}")] for name in names])


def batch_normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())


def spectrally_normed() -> nn.Module:
    """A linear layer whose weight is divided by a norm that every forward estimates anew."""
    return nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


normed = partial(with_stage, index=1, stage=batch_normed)
spectral = partial(with_stage, index=1, stage=spectrally_normed)


class Checkpointed(mlp.Layer):
    """A hidden layer of mlp.tiny that is recomputed in its backward, by torch's checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


checkpointed = partial(with_stage, index=1, stage=partial(Checkpointed, WIDTH))


def ends_in_norms(stages: int) -> Model:
    """mlp.tiny with a linear layer and a LayerNorm at the end of every stage but the last."""
    model = mlp.tiny(stages)
    for number, layers in enumerate(model.stages[:-1]):
        layers |= {f"up{number}": partial(nn.Linear, WIDTH, WIDTH), f"norm{number}": partial(nn.LayerNorm, WIDTH)}
    return model


class Turned(nn.Linear):
    """Its output is not contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).t()


class TurnedBack(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.t())


# Four stages; the second returns a transposed view.
_turned = [partial(kind, WIDTH, WIDTH) for kind in (Turned, TurnedBack)]
strided = partial(changed, stages=[lambda: mlp.Embedding(WIDTH), *_turned, lambda: nn.Linear(WIDTH, 256)])


# Random numbers


class Dropped(mlp.Layer):
    """A hidden layer of mlp.tiny with dropout."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(super().forward(x))


class Attentive(nn.Module):
    """Attention between 4 parts of a vector, with dropout inside, beside a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, 1, 4, WIDTH // 4).unbind(1)
        return x + nnf.scaled_dot_product_attention(q, k, v, dropout_p=0.3).reshape(x.shape)


def dropping_layers() -> dict[str, Callable[[], nn.Module]]:
    layers: dict[str, Callable[[], nn.Module]] = {"embedding": lambda: mlp.Embedding(WIDTH)}
    layers |= {f"layer{i}": (Dropped, lambda: mlp.Layer(WIDTH), Attentive)[i % 3] for i in range(8)}
    layers["score"] = lambda: nn.Linear(WIDTH, 256)
    return layers


def dropping(stages: int) -> Model:
    """Ten layers, some of which draw random numbers."""
    return mlp.tiny(1)._replace(stages=split_layers(dropping_layers(), stages))


class DroppedByHost(mlp.Layer):
    """A hidden layer of mlp.tiny that scales by numbers which the CPU draws, on whichever device the layer is."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.rand(WIDTH).to(x.device)


dropping_by_host = partial(with_stage, index=1, stage=partial(DroppedByHost, WIDTH))


def dropping_function(stages: int) -> Model:
    """As `dropping`, but the second stage is given as a function."""
    model = dropping(stages)
    return model._replace(stages=[model.stages[0], lambda: nn.Sequential(Dropped(), Dropped()), *model.stages[2:]])


class Everywhere(mlp.Embedding):
    """Attention that is neither causal nor has dropout."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = super().forward(tokens)[None]
        return nnf.scaled_dot_product_attention(x, x, x)[0]


def attends_everywhere(stages: int) -> Model:
    return mlp.tiny(1)._replace(stages=[lambda: Everywhere(WIDTH), lambda: nn.Linear(WIDTH, 256)])


# Trouble in the middle of the second step: stage 2's 13th forward, with 8 microbatches a step


class Trouble(nn.Module):
    """A linear layer that does `act` at its 13th forward; the time is noted in TROUBLE_AT, if that is set."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.act = act
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        if self.forwards == 13:
            if file := os.environ.get("TROUBLE_AT"):
                Path(file).write_text(repr(time.time()))
            self.act()
        return self.linear(x)


def troubled(act: Callable[[], object]) -> Callable[[int], Model]:
    """mlp.tiny with such a third stage."""
    return partial(with_stage, index=2, stage=lambda: Trouble(act))


def _raise() -> None:
    raise RuntimeError("thirteen is unlucky")


def _interrupt() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    os.kill(os.getpid(), signal.SIGINT)


raises_in_stage = troubled(_raise)
exits_in_stage = troubled(lambda: sys.exit("thirteen is enough"))
killed_in_stage = troubled(lambda: os.kill(os.getpid(), signal.SIGKILL))
interrupted_in_stage = troubled(_interrupt)
out_of_memory_in_stage = troubled(lambda: torch.empty(2**50))
out_of_gpu_memory_in_stage = troubled(lambda: torch.empty(2**50, device="cuda"))
# Only the kernel notices this index, when it runs.
bad_index_in_stage = troubled(lambda: torch.zeros(3, device="cuda")[torch.full((1,), 7).cuda()])
stopped_in_stage = troubled(lambda: os.kill(os.getpid(), signal.SIGSTOP))
asked_to_leave_in_stage = troubled(lambda: os.kill(os.getpid(), signal.SIGTERM))


# Numbers that are not finite, in the second step


class Unsound(nn.Module):
    """A linear layer whose output, or only its gradient, is multiplied at its 13th forward."""

    def __init__(self, by: float, gradient: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.by, self.gradient = by, gradient

    def forward(self, x: Tensor) -> Tensor:
        self.forwards = getattr(self, "forwards", 0) + 1
        output = self.linear(x)
        if self.forwards == 13:
            if self.gradient:
                output.register_hook(lambda gradient: gradient * self.by)
            else:
                output = output * self.by
        return output


nan_loss = partial(with_stage, index=2, stage=partial(Unsound, math.nan, gradient=False))
infinite_gradient = partial(with_stage, index=2, stage=partial(Unsound, math.inf, gradient=True))


class Noise(nn.Linear):
    """Random numbers that no seed reaches."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + os.urandom(1)[0] / 256)


noisy = partial(with_stage, index=2, stage=partial(Noise, WIDTH, WIDTH))


# Users' mistakes


def raises(stages: int) -> Model:
    raise ValueError("no such luck")


not_a_function = 3
returns_a_list = lambda stages: [stages]  # noqa: E731
one_stage_more = lambda stages: mlp.tiny(stages + 1)  # noqa: E731
# mlp.tiny with another last stage: its input is half as wide as its producer's output; it returns a tuple in a tuple;
# is no module; is built on the meta device.
narrow = partial(with_stage, index=-1, stage=partial(nn.Linear, WIDTH // 2, 256))
recurrent = partial(with_stage, index=-1, stage=partial(nn.LSTM, WIDTH, 256))
no_module = partial(with_stage, index=-1, stage=lambda: lambda x: x)
without_values = partial(with_stage, index=-1, stage=partial(nn.Linear, WIDTH, 256, device="meta"))


# Stages with more than parameters

TABLE = torch.arange(6.0).view(2, 3).t()  # not contiguous


class Tabled(mlp.Layer):
    """A layer with a buffer that other layers share."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.register_buffer("table", TABLE)


class Stateful(Tabled):
    """Its extra state is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 0}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def _with(first_name: str, second_name: str, layer: Callable[[], nn.Module]) -> Model:
    """Two stages; the arguments are the names of the two middle layers, and the second of them."""
    first = {"embedding": lambda: mlp.Embedding(WIDTH), first_name: Tabled}
    return mlp.tiny(2)._replace(stages=[first, {second_name: layer, "score": lambda: nn.Linear(WIDTH, 256)}])


def buffers_shared(stages: int) -> Model:
    return _with("one", "two", Tabled)


def buffers_named_alike(stages: int) -> Model:
    class Alike(nn.Module):
        """One more layer of that name, without parameters."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", TABLE)

        def forward(self, x: Tensor) -> Tensor:
            return x

    return _with("one", "one", Alike)


def buffers_not_tensors(stages: int) -> Model:
    return _with("one", "two", Stateful)


# Mistakes in what stages read


_CHAIN = [[Input(0)], [Value(0, 0)], [Value(1, 0)]]
reads_too_few = partial(changed, reads=_CHAIN)
stage_2_unread = partial(changed, reads=[*_CHAIN, [Value(1, 0)]])


def _reading(stages: int, first: object, second: object) -> Model:
    return mlp.tiny(stages)._replace(reads=[first, second, *([Value(s, 0)] for s in range(1, stages - 1))])


reads_later = partial(_reading, first=[Input(0)], second=[Value(2, 0)])
reads_a_number = partial(_reading, first=[Input(0)], second=[0])
reads_no_output = partial(_reading, first=[Input(0)], second=[Value(0, 3)])
reads_no_leaf = partial(_reading, first=[Input(2)], second=[Value(0, 0)])


# Stages in tensor slices


def _numbers(text: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(rng.normal(size=(8, 16))).float(), torch.from_numpy(rng.normal(size=(8, 12))).float()


def _pair(stages: int, dtype: torch.dtype = torch.float32) -> list[Any]:
    """A linear layer cut by its outputs and one cut by its inputs, and a last stage that does nothing."""

    def up(slice: Slice = UNSLICED) -> nn.Module:
        return ColumnParallelLinear(16, 48, slice).to(dtype)

    def down(slice: Slice = UNSLICED) -> nn.Module:
        return RowParallelLinear(48, 12, slice).to(dtype)

    return [{"up": up, "relu": nn.ReLU, "down": down}, {"last": nn.Identity}]


def pair(stages: int) -> Model:
    return Model(_pair(stages), nnf.mse_loss, _numbers, sliced=[0])


def pair_bf16(stages: int) -> Model:
    """As `pair`, with sums in bf16."""

    def batch(text: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        x, y = _numbers(text, rng)
        return x.bfloat16(), y.bfloat16()

    return Model(_pair(stages, torch.bfloat16), nnf.mse_loss, batch, sliced=[0])


class Gained(ColumnParallelLinear):
    """Its weight is frozen, and a buffer is cut in the same way."""

    def __init__(self, slice: Slice = UNSLICED) -> None:
        super().__init__(16, 48, slice)
        self.weight.requires_grad_(False)
        self.register_buffer("gain", torch.linspace(1, 2, 48 // slice.count))
        self.sliced_dims |= {"gain": SlicedDim(0)}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


def partly_frozen(stages: int) -> Model:
    """As `pair`, with a frozen weight."""
    (split, last) = _pair(stages)
    return Model([{**split, "up": Gained}, last], nnf.mse_loss, _numbers, sliced=[0])


class Dropping(nn.Module):
    """A stage of one unnamed layer, whose dropout is seeded by the stage."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return nnf.dropout(self.linear(x), 0.3, self.training) * self.scale


class Shifted(nn.Module):
    """A sliced stage of one layer. Its slices share a parameter, and a skip connection reads the input again."""

    def __init__(self, slice: Slice = UNSLICED) -> None:
        super().__init__()
        self.slice = slice
        self.shift = nn.Parameter(torch.randn(16))
        self.up = ColumnParallelLinear(16, 8, slice)
        self.down = RowParallelLinear(8, 16, slice)

    def forward(self, x: Tensor) -> Tensor:
        return skip(x, self.down(torch.tanh(self.up(x + self.shift))), self.slice)


class Both(nn.Linear):
    """A layer of two inputs."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x * y)


def slices_of_a_dag(stages: int) -> Model:
    """Stage 0 has dropout; 1 and 2, both sliced, read it; 3 reads 1 and 2."""
    return Model([Dropping, Shifted, Shifted, lambda: Both(16, 12)], nnf.mse_loss, _numbers, sliced=[1, 2])


def drops_in_slices(stages: int) -> Model:
    model = pair(stages)
    return model._replace(stages=[{**model.stages[0], "drop": lambda: nn.Dropout(0.5)}, model.stages[1]])


of_pair = partial(changed, make=pair)
splits_the_last = partial(of_pair, sliced=[1])
splits_a_module = partial(of_pair, stages=[nn.Linear(16, 12), nn.Identity()])
splits_unevenly = partial(of_pair, stages=[lambda slice=UNSLICED: RowParallelLinear(17, 12, slice), nn.Identity()])
splits_what_is_tied = partial(of_pair, tied=[[(0, "down.bias"), (1, "last.bias")]])
splits_for_a_minibatch_loss = partial(of_pair, loss_of="minibatch")


class Recurrent(nn.LSTM):
    """An LSTM over the samples of a microbatch, which asks for cuDNN's layout of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        self.flatten_parameters()
        return super().forward(x)[0]


lstm = partial(with_stage, index=1, stage=partial(Recurrent, WIDTH, WIDTH))
