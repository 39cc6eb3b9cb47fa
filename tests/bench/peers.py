"""One rank of `make bench-run`, of mpirun and of a peer: `mpiexec -n 2 python -m mpi4py peers.py PEER SCHEDULE ...`.

The peer and mpirun train the same model on the same microbatches, with the
same optimizer and one thread, in the same processes and in turns, step by
step: other load on the machine affects both. Rank 0 writes the seconds of
every step and the losses of the first ones. Each peer is set up as its
documentation advises for speed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from floor import Floor, Training, data_parallel
from mpi4py import MPI
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mpirun.cli.options import read_options
from mpirun.cli.run import Run
from mpirun.comm.fail_together import from_rank_0
from mpirun.data.microbatches import Microbatches, training_text
from mpirun.data.values import to_device
from mpirun.examples.gpt import Block
from mpirun.model.build_stage import build_stage
from mpirun.model.contract import Model
from mpirun.model.load_model import load_model

WARM = 4  # steps before the timed ones: graphs are captured in the fourth
Step = Callable[[int], Sequence[Tensor]]  # the number of a step -> losses of the microbatches this rank saw


class Task:
    """What all peers are given."""

    def __init__(
        self, comm: MPI.Intracomm, options: argparse.Namespace, text: str | None = None, device: str = "cpu"
    ) -> None:
        self.comm, self.rank, self.ranks = comm, comm.rank, comm.size
        self.stages: int = options.stages
        self.microbatches: int = options.microbatches
        self.seed: int = options.seed
        self.device = torch.device(device)
        self.model: Model = load_model(options.model, self.stages, self.seed)
        self.text = torch.frombuffer(
            bytearray(from_rank_0(comm, lambda: training_text(text, self.model.length))), dtype=torch.uint8
        )
        self.owned = 0  # bytes of weights that the peer's rank owns, where they are sharded

    def stage(self, index: int) -> nn.Module:
        return build_stage(self.model, index, self.seed).to(self.device)

    def whole(self) -> nn.Sequential:
        return nn.Sequential(*(self.stage(index) for index in range(self.stages)))

    def batch(self, step: int, mb: int) -> tuple[Tensor, Tensor]:
        (data,), target, *_ = Microbatches(self.model.batch, self.text, self.seed, 1)(step, mb)
        return to_device((data, target), self.device)

    def finish(self) -> None:
        """Wait for a GPU's kernels."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.01, fused=True)

    def training(self, module: nn.Module) -> Training:
        return Training(self.comm, module, self.optimizer(module), self.batch, self.model.loss, self.microbatches)


def one_f_one_b(task: Task) -> Step:
    """torch.distributed.pipelining, which does not return outputs: that would cost a copy of each."""
    from torch.distributed.pipelining import PipelineStage, schedules

    module = task.stage(task.rank)
    stage = PipelineStage(module, task.rank, task.stages, task.device)
    schedule = schedules.Schedule1F1B(stage, task.microbatches, loss_fn=task.model.loss)
    optimizer = task.optimizer(module)

    def part(step: int, which: int) -> Tensor:
        return torch.cat([task.batch(step, mb)[which] for mb in range(task.microbatches)])

    def run(step: int) -> Sequence[Tensor]:
        losses: list[Tensor] = []
        optimizer.zero_grad()
        data = [part(step, 0)] if stage.is_first else []
        last = {"target": part(step, 1), "losses": losses} if stage.is_last else {}
        schedule.step(*data, **last, return_outputs=False)
        optimizer.step()
        return [loss.detach() for loss in losses]

    return run


def ddp(task: Task) -> Step:
    """DistributedDataParallel, which communicates during the last backward of a step only."""
    module = DistributedDataParallel(task.whole(), gradient_as_bucket_view=True)
    optimizer = task.optimizer(module)
    *first, last = range(task.rank, task.microbatches, task.ranks)
    share = torch.tensor(1 / (len(first) + 1))  # the gradient is the mean over the microbatches

    def one(step: int, mb: int) -> Tensor:
        data, target = task.batch(step, mb)
        loss = task.model.loss(module(data), target)
        loss.backward(share)
        return loss.detach()

    def run(step: int) -> Sequence[Tensor]:
        optimizer.zero_grad()
        with module.no_sync():
            losses = [one(step, mb) for mb in first]
        losses.append(one(step, last))
        optimizer.step()
        return losses

    return run


def fsdp(task: Task) -> Step:
    """FSDP2 by blocks; gradients are reduced with the last microbatch of a step only."""
    from torch.distributed.fsdp import fully_shard

    module = task.whole()
    for block in [part for part in module.modules() if isinstance(part, Block)]:
        fully_shard(block, reshard_after_forward=True)
    root = fully_shard(module, reshard_after_forward=False)  # of the root's own weights: they are needed again at once
    task.owned = sum(one.to_local().nbytes for one in module.parameters())  # type: ignore[attr-defined]
    optimizer = task.optimizer(module)
    mine = range(task.rank, task.microbatches, task.ranks)
    share = torch.tensor(1 / len(mine))

    def run(step: int) -> Sequence[Tensor]:
        optimizer.zero_grad()
        losses = []
        for mb in mine:
            is_last = mb == mine[-1]
            root.set_requires_gradient_sync(is_last)
            data, target = task.batch(step, mb)
            loss = task.model.loss(module(data), target)
            loss.backward(share)
            losses.append(loss.detach())
        optimizer.step()
        return losses

    return run


PEERS: dict[str, Callable[[Task], Step]] = {
    "1f1b": one_f_one_b,
    "ddp": ddp,
    "fsdp": fsdp,
    "floor": lambda task: Floor(task.training(task.stage(task.rank))).step,
    "flat": lambda task: data_parallel(task.training(task.whole())),  # on one rank, the plain loop
}
BY_HAND = ("floor", "flat")  # these need no process group of torch's


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("schedule", help="the schedule that mpirun executes")
    parser.add_argument("--model", required=True)
    parser.add_argument("--stages", type=int, required=True, help="stages of the peer")
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: the loops by hand on one rank")
    parser.add_argument("--graphs", action="store_true", help="mpirun replays its jobs as graphs")
    parser.add_argument("--meet", type=Path, required=True, help="a file by which torch's ranks find each other")
    options = parser.parse_args()
    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    task = Task(comm, options, device=options.device)
    if options.peer not in BY_HAND:
        dist.init_process_group("gloo", f"file://{options.meet.resolve()}", rank=comm.rank, world_size=comm.size)
    theirs = PEERS[options.peer](task)
    common = ["--model", options.model, "--seed", str(options.seed), "--steps", str(options.steps + WARM)]
    arguments = [options.schedule, *common, "--threads", "1", "--timeout", "0", "--device", options.device]
    arguments += ["--graphs"] * options.graphs
    ours = Run(comm, read_options(comm, "", arguments)).session.interpreter
    laps: dict[str, list[float]] = {"ours": [], "theirs": []}
    losses: dict[str, list[float]] = {"ours": [], "theirs": []}

    def lap(side: str, act: Callable[[], Sequence[float | Tensor]]) -> None:
        comm.Barrier()
        begin = time.perf_counter()
        found = act()
        task.finish()
        laps[side].append(time.perf_counter() - begin)
        if side == "theirs":  # every rank has some
            found = [loss for part in comm.allgather([float(loss) for loss in found]) for loss in part]
        assert len(found) == task.microbatches
        losses[side].append(float(sum(found)) / len(found))

    for number in range(options.steps + WARM):
        turns = {"ours": lambda: ours.run(number).losses, "theirs": lambda: theirs(number)}
        for side in sorted(turns, reverse=bool(number % 2)):  # the sides go first in turn
            lap(side, turns[side])
    mine = sum(part.nbytes for stage in ours.stages.values() for part in stage.owned.values())
    owned = {side: comm.allgather(size) for side, size in (("ours", mine), ("theirs", task.owned))}
    if comm.rank == 0:
        found = {
            side: {"seconds": laps[side][WARM:], "losses": losses[side][:WARM], "weights": owned[side]} for side in laps
        }
        print(json.dumps(found))
    comm.Barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
