"""The command line's options for a model and its run, read by `engine.setup`. Does not import torch, which is slow."""

from __future__ import annotations

from dataclasses import dataclass

DEVICES = ("auto", "cpu", "cuda")
GPU_MESSAGES = ("auto", "direct", "host")
ON_NAN = ("stop", "skip")


@dataclass(frozen=True)
class SetupOptions:
    """Options with the names and defaults of those of `python -m mpirun`, whose help explains them."""

    model: str  # MODULE:FUNCTION
    seed: int = 0
    text: str | None = None  # None: the sources of the standard library
    steps: int = 20
    optimizer: str = "adamw"
    lr: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.01
    lr_schedule: str = "constant"
    warmup: int = 0  # steps
    clip: float | None = None  # None: no limit
    accumulate: int = 1
    canonical: bool = False
    autocast: str | None = None
    on_nan: str = "stop"
    device: str = "auto"
    gpu_messages: str = "auto"
    stream_words: bool = False
    graphs: bool = False
    threads: int = 0  # 0: a rank's share of the cores
