"""Fine-tune a causal language model of the transformers library, which lies in a directory, on a text.

    mpiexec -n 4 python -m mpirun.examples.finetune_lm MODEL TEXT SCHEDULE TUNED

MODEL is a directory with config.json, the tokenizer and safetensors; SCHEDULE is a file of schedgen, or the name of a
scheme. After each epoch it evaluates on the last tenth of the text. It saves checkpoints; started again, it resumes
from the newest. The tuned model goes to the directory TUNED, which from_pretrained loads.
"""

import argparse
from collections.abc import Sequence
from math import cos, pi
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import mpirun

LENGTH, EPOCHS, RATE, EVERY = 32, 2, 1e-3, 5


class Pieces(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Consecutive pieces of LENGTH tokens."""

    def __init__(self, tokens: torch.Tensor) -> None:
        """`tokens`: shape (n,)."""
        self.pieces = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)

    def __len__(self) -> int:
        """How many pieces there are."""
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """What the model's forward takes, by name."""
        return {"input_ids": self.pieces[index]}


def loss(output: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The next token's cross-entropy, and how often the likeliest token is right."""
    scores, targets = output.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten()
    return cross_entropy(scores, targets), {"accuracy": (scores.argmax(-1) == targets).float().mean()}


def optimizer(named: Sequence[mpirun.NamedParameter]) -> torch.optim.Optimizer:
    """AdamW; matrices decay, biases and norms do not."""
    decays, rest = ([p.parameter for p in named if (len(p.shape) > 1) == matrix] for matrix in (True, False))
    return torch.optim.AdamW([{"params": decays, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}])


def main(model: str, text: str, schedule: str, tuned: str, **options: Any) -> None:
    """Train, evaluate, save, export. `options`: more arguments of the Engine."""
    tokens = AutoTokenizer.from_pretrained(model)(Path(text).read_text(), return_tensors="pt").input_ids[0]
    cut = len(tokens) * 9 // 10
    with torch.device("meta"):  # each rank reads only what it holds
        net = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model, use_cache=False))
    example = {"input_ids": torch.zeros(2, LENGTH, dtype=torch.long)}
    run = mpirun.Engine(
        schedule, mpirun.split(net, example, stages=4), stages=4, microbatches=8, loss=loss, optimizer=optimizer,
        lr=lambda step: RATE * (1 + cos(pi * step / steps)) / 2, clip=1.0, weights=model, **options,
    )  # fmt: skip
    loader = run.loader(Pieces(tokens[:cut]), microbatch_size=2, shuffle=True)
    validation = run.loader(Pieces(tokens[cut:]), microbatch_size=2)
    steps = EPOCHS * len(loader)
    run.resume(f"{tuned}-checkpoints", data=loader)
    while run.steps < steps:
        for batch in loader:
            result = run.step(batch)
            if run.steps % EVERY == 0 or run.steps == steps:
                run.save(f"{tuned}-checkpoints", data=loader)
        found = run.evaluate(validation)
        if run.rank == 0:
            print(f"step {run.steps}: loss {result.loss:.4f}, validation {found.loss:.4f}, {found.metrics}", flush=True)
    run.export(tuned)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "text", "schedule", "tuned"):
        parser.add_argument(name)
    main(**vars(parser.parse_args()))
