"""Host memory that ranks need to start from weights on disk: a GPT made on the meta device, on 4 ranks.

    python tests/bench/meta_start.py [--quick]

Before and after the stages are built, a rank reads its peak memory (ru_maxrss, which includes pages of mapped files).
The difference should be the weights of its stages, their gradient buffers, and about the largest tensor, not the whole
model. The model has 400 million parameters, with --quick 2 million.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as nnf
from ranks import mpi, schedgen
from safetensors.torch import save_file
from torch import Tensor, nn

HERE = Path(__file__).parent
RANKS, LENGTH = 4, 8
SIZES = {"full": (24, 1024, 50257), "quick": (4, 128, 4000), "tiny": (4, 64, 100)}  # blocks, width, words


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: (sequences, length, width)."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        x = x + self.out(nnf.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(nnf.gelu(self.up(self.norm2(x))))


def net(size: str) -> nn.Sequential:
    """The model, without values."""
    blocks, width, words = SIZES[size]
    with torch.device("meta"):
        head = nn.Linear(width, words, bias=False)
        return nn.Sequential(nn.Embedding(words, width), *(Block(width) for _ in range(blocks)), head)


def write_weights(directory: Path, size: str) -> None:
    """A file for each child, as large models have several."""
    for number, child in enumerate(net(size)):
        values = {f"{number}.{name}": torch.randn(value.shape) for name, value in child.state_dict().items()}
        save_file(values, directory / f"{number:02d}.safetensors")


def measure(schedule: str, folder: Path, size: str) -> None:
    """One rank's start; rank 0 prints what all found, in JSON."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    started = start(comm, schedule, folder, "tiny")  # imports what Python imports on first use
    before = peak_bytes()
    started = start(comm, schedule, folder, size)
    parameters = [p for stage in started.stages.values() for p in stage.module.parameters()]
    gradients = [started.context.grad_buffers.of_stage(index).total for index in started.stages]
    found = {
        "peak": peak_bytes() - before,
        "weights": sum(p.nbytes for p in parameters),
        "gradients": sum(total.nbytes for total in gradients),
        "largest": max(p.nbytes for p in parameters),
    }
    by_rank = comm.gather(found)
    if by_rank is not None:
        print(json.dumps(by_rank))


def start(comm: Any, schedule: str, folder: Path, size: str) -> Any:
    """The interpreter, built as the command builds it."""
    import mpirun
    from mpirun.checkpoint.pretrained import Pretrained

    def model(stages: int) -> mpirun.Model:
        return mpirun.split_sequential(net(size), stages).model(
            lambda output, target: output.logsumexp(-1).mean(),
            lambda text, rng: (text[None, :LENGTH].long() % SIZES[size][2], None),
            LENGTH,
            weights=Pretrained(folder / size),
        )

    run = mpirun.Engine(schedule, model, comm=comm, threads=1, device="cpu", timeout=0)
    return run.checkpoints.session.interpreter


def peak_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(size: str) -> None:
    """Write weights, start 4 ranks, print a table."""
    with tempfile.TemporaryDirectory() as folder:
        schedule = Path(folder, "1f1b.json")
        for kind in ("tiny", size):
            Path(folder, kind).mkdir()
            write_weights(Path(folder, kind), kind)
        schedgen("compile", "1f1b", "--stages", RANKS, "--microbatches", 4, "-o", schedule)
        environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
        command = [*mpi(RANKS), __file__, "rank", str(schedule), folder, size]
        out = subprocess.run(command, check=True, env=environment, capture_output=True, text=True).stdout
        whole = sum(path.stat().st_size for path in Path(folder, size).iterdir())
    print(f"the whole model: {whole / 2**20:.0f} MiB")
    print("rank  peak more than before  weights  gradients  largest tensor  peak / (weights + gradients + largest)")
    for number, found in enumerate(json.loads(out.splitlines()[-1])):
        peak, *held = (found[key] / 2**20 for key in ("peak", "weights", "gradients", "largest"))
        weights, gradients, largest = held
        print(f"{number:4} {peak:18.0f} MiB {weights:8.0f} {gradients:10.0f} {largest:15.0f}  {peak / sum(held):.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        measure(sys.argv[2], Path(sys.argv[3]), sys.argv[4])
    else:
        main("quick" if "--quick" in sys.argv else "full")
