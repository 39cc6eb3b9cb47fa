"""What tests read off runs: saved weights, differences from one process."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All entries of a checkpoint, read by safetensors alone; the optimizer's have other names."""
    manifest = json.loads((folder / "manifest.json").read_text())
    values: dict[str, torch.Tensor] = {}
    for file in manifest["files"]:
        entries = load_file(folder / file["name"])
        assert sorted(entries) == sorted(file["entries"])
        assert not values.keys() & entries.keys()
        values |= entries
    return values


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two checkpoints have the same entries with the same bits."""

    def bits(value: torch.Tensor) -> tuple[torch.dtype, bytes]:
        return value.dtype, value.reshape(-1).view(torch.uint8).numpy().tobytes()

    return a.keys() == b.keys() and all(bits(a[name]) == bits(b[name]) for name in a)


GPT, MLP = "models_for_tests:gpt_tiny", "mpirun.examples.mlp:tiny"
# 2S - 1 - s is a backward's place on the way of a microbatch: the oldest microbatch first.
TWO_OWNERS = """
    def w(s, b, d):
        return b % 2, b % 4
"""
AN_OWNER_WITHOUT_JOBS = """
    def w(s, b, d):
        return b % 3, b % 2
"""
DEPTH_FIRST = """
    def n(s, b, d, *, stages):
        return b * 2 * stages + s + d * (2 * stages - 1 - 2 * s)
"""


def differences(out: str) -> dict[str, float]:
    """What --verify printed: the largest relative difference of losses, gradients, parameters and changed buffers."""
    sizes = dict(re.findall(r"^verify: (\w+) differ from one process by at most (\S+)", out, re.M))
    assert set(sizes) - {"updates", "buffers"} == {"losses", "gradients", "parameters"}, out
    return {what: float(size) for what, size in sizes.items()}


def metrics(file: Path, *names: str) -> list[tuple[float, ...]]:
    """What --metrics wrote of every step under these names, to the bit: json writes floats that read back the same."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [tuple(row[name] for name in names) for row in rows]
