"""Adapters on a frozen GPT-2, trained by Engines on four ranks: one launch of
`train_adapters.py FOLDER SCHEME ...`.

The base is bfloat16, the adapters are float32. Only blocks 1 and 3 have some, so that of the four stages two train
nothing: one before all adapters, and one between them that passes gradients on. The embedding is tied, and frozen too.

Rank 0 writes FOLDER/found.json: the results, and those of training in torch alone. The schedules are in FOLDER.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from mpi4py import MPI
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import mpirun
from mpirun.checkpoint.pretrained import Pretrained
from mpirun.data.loader import Loader
from mpirun.model.split.split_result import Cut
from mpirun.training.engine import Engine

FOLDER, SCHEMES = Path(sys.argv[1]), sys.argv[2:]
OTHER = {"1f1b": "fsdp", "fsdp": "1f1b"}
STAGES, MICROBATCHES, SAMPLES, STEPS, SAVED = 4, 4, 2, 4, 2
WORDS, LENGTH, RANK, ADAPTED, CLIP = 64, 8, 4, (1, 3), 0.01
TEXT = torch.randint(WORDS, (STEPS * MICROBATCHES * SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(3))
DATA = [({"input_ids": piece[:-1]}, piece[1:]) for piece in TEXT]


class Adapted(nn.Module):
    """A layer and a low-rank term beside it, which begins as zero."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(inputs, RANK, bias=False), nn.Linear(RANK, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.up(self.down(x.float()))
        return self.base(x) + added.to(x.dtype)


def network() -> nn.Module:
    """The model, the same on every rank."""
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=STAGES, n_head=2, use_cache=False, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    net: nn.Module = transformers.GPT2LMHeadModel(config).to(torch.bfloat16).requires_grad_(False)
    for number in ADAPTED:
        attention = net.transformer.h[number].attn
        attention.c_attn = Adapted(attention.c_attn, 16, 48)
        attention.c_proj = Adapted(attention.c_proj, 16, 16)
    return net


def loss(output: Any, target: Tensor) -> Tensor:
    """The cross-entropy of the next token."""
    return cross_entropy(output.logits.float().flatten(0, 1), target.flatten())


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Keeps two tensors of state."""
    return torch.optim.AdamW(parameters, 1e-2)


def engine(scheme: str, cut: Cut, verify: bool) -> Engine:
    """An Engine on a schedule in FOLDER."""
    return mpirun.Engine(
        str(FOLDER / f"{scheme}.json"), cut, loss=loss, optimizer=lambda named: optimizer([p.parameter for p in named]),
        clip=CLIP, canonical=True, verify=verify, timeout=0,
    )  # fmt: skip


def train(run: Engine, loader: Loader, folder: Path | None = None) -> list[Any]:
    """Train until STEPS steps are done; return the loss and the norm of each. `folder`: to save to on the way."""
    numbers = []
    for batch in loader:
        result = run.step(batch)
        numbers.append([result.loss, result.grad_norm])
        if folder is not None and run.steps == SAVED:
            run.save(folder, data=loader)
        if run.steps == STEPS:
            break
    return numbers


def trained(scheme: str, other: str) -> dict[str, Any]:
    """The results of training under a scheme, whose checkpoint is then resumed under the other one."""
    points = [f"transformer.h.{number}" for number in range(1, STAGES)]
    cut = mpirun.split(network(), {"input_ids": torch.zeros(SAMPLES, LENGTH, dtype=torch.long)}, points=points)
    run, out = engine(scheme, cut, True), io.StringIO()
    loader = run.loader(DATA, SAMPLES)
    numbers = train(run, loader, FOLDER / f"saved-{scheme}")
    with contextlib.redirect_stdout(out):
        verified = run.verify()
    run.export(FOLDER / scheme)
    session = run.session
    assert session is not None
    names = [list(shape.parameter_names) for shape in session.setup.shapes]
    run.close()

    run = engine(other, cut, False)
    loader = run.loader(DATA, SAMPLES)
    run.resume(FOLDER / f"saved-{scheme}", data=loader)
    resumed = train(run, loader)
    run.export(FOLDER / f"resumed-{scheme}")
    run.close()
    return {"numbers": numbers, "resumed": resumed, "verified": [verified, out.getvalue()], "names": names}


def plain() -> tuple[nn.Module, list[Any]]:
    """The network trained in torch alone, and the same numbers."""
    net, numbers = network(), []
    parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
    steps = optimizer(parameters)
    for step in range(STEPS):
        losses = []
        for pieces in TEXT.view(STEPS, MICROBATCHES, SAMPLES, -1)[step]:
            losses.append(loss(net(input_ids=pieces[:, :-1]), pieces[:, 1:]) / MICROBATCHES)
            losses[-1].backward()
        norm = nn.utils.clip_grad_norm_(parameters, CLIP)
        steps.step()
        steps.zero_grad()
        numbers.append([float(sum(x.detach() for x in losses)), float(norm)])
    return net, numbers


def compare(exported: Path, expected: nn.Module) -> dict[str, Any]:
    """Load an export into a new network: whether frozen parameters are the same, how far trained ones are off.

    `lacks`: the names that the export does not have.
    """
    net, saved = network(), Pretrained(exported)
    missing, unexpected = net.load_state_dict(saved(saved.names), strict=False)
    assert not unexpected
    pairs = [(p, q.detach()) for p, q in zip(net.parameters(), expected.parameters(), strict=True)]
    return {
        "lacks": missing,
        "frozen": all(torch.equal(p, q) for p, q in pairs if not p.requires_grad),
        "off": max(float((p.detach() - q).abs().max()) for p, q in pairs if p.requires_grad),
    }


if __name__ == "__main__":
    found: dict[str, Any] = {scheme: trained(scheme, OTHER[scheme]) for scheme in SCHEMES}
    if MPI.COMM_WORLD.rank == 0:
        net, found["plain"] = plain()
        for folder in (*SCHEMES, *(f"resumed-{scheme}" for scheme in SCHEMES)):
            found[f"exported {folder}"] = compare(FOLDER / folder, net)
        (FOLDER / "found.json").write_text(json.dumps(found))
