"""torch's own pipeline schedules, and the CSV they write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.pipelining import schedules


class TorchStage:
    """As much of torch's stage as its schedules ask for before they run."""

    is_first = is_last = has_backward = True
    group = submod = None

    def __init__(self, ranks: int, index: int, stages: int) -> None:
        """Stage `index` of `stages` on rank 0; torch's names."""
        self.group_rank, self.group_size, self.stage_index, self.num_stages = 0, ranks, index, stages
        self.stage_index_to_group_rank: dict[int, int] = {}


def schedule(name: str, ranks: int, microbatches: int) -> Any:
    """torch's schedule of class `name`, with two stages per rank."""
    stages = [TorchStage(ranks, index, 2 * ranks) for index in range(2)]
    return getattr(schedules, name)(stages, microbatches, loss_fn=lambda *_: None)


def dump(name: str, ranks: int, microbatches: int, folder: Path, form: str = "compute_comms") -> Path:
    """The CSV file that torch writes of that schedule."""
    path = folder / f"{name}.csv"
    schedule(name, ranks, microbatches)._dump_csv(path, format=form)
    return path


def deferred_receives(source: Path, path: Path) -> Path:
    """A CSV of lists like those in `source`, with every RECV directly before its job, written to `path`."""
    lists = [line.split(",") for line in source.read_text().splitlines()]
    for cells in lists:
        for recv in [cell for cell in cells if "RECV_" in cell]:
            cells.remove(recv)
            cells.insert(cells.index(recv.replace("RECV_", "")), recv)
    path.write_text("\n".join(",".join(cells) for cells in lists) + "\n")
    return path
