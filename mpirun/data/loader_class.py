"""Which loader reads a dataset."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset

from mpirun.data.loader import Loader
from mpirun.data.numbered_loader import FunctionLoader, MapLoader
from mpirun.data.stream_loader import StreamLoader
from schedgen.util.errors import UsageError


def loader_class(dataset: Any) -> type[Loader]:
    """The class for a map-style dataset, a torch IterableDataset, or a function; UsageError if it is none of these."""
    if isinstance(dataset, IterableDataset):
        return StreamLoader
    if hasattr(dataset, "__getitem__"):
        return MapLoader
    if callable(dataset):
        return FunctionLoader
    raise UsageError(
        f"a {type(dataset).__name__} is no dataset: give one with __len__ and __getitem__, a torch IterableDataset, or "
        "a function make(step, microbatch, rng)"
    )
