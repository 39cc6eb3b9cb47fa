"""The graph file: what a schedule must know of a model. `mpirun graph` writes it, and `--graph` reads it.

schedgen/docs/reference.md, "The graph file", explains its keys.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from schedgen.ir.limits import MOST_LAYERS, MOST_STAGES
from schedgen.ir.stage_graph import check_edges, check_per_consumer
from schedgen.ir.version_1 import from_version_1
from schedgen.util.errors import RefusedFile, UsageError, clip, number_of
from schedgen.util.files import AnyPath, display_name, read_json, read_text


@dataclass(frozen=True)
class ModelGraph:
    """The content of a graph file: a model's stages, their edges, and what else a schedule must know of them."""

    stages: int
    edges: tuple[tuple[int, int], ...] | None = None  # (producer, consumer), ascending
    per_consumer: tuple[int, ...] = ()
    tied: tuple[tuple[int, ...], ...] = ()
    replicated: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()  # one number a stage, or none

    def text(self) -> str:
        """The text of the file, a key a line."""
        lines = (f' "{key}": {json.dumps(value)}' for key, value in vars(self).items() if value not in (None, ()))
        return "{\n" + ",\n".join(lines) + "\n}\n"


def read_graph_file(name: AnyPath | None) -> ModelGraph | None:
    """The graph in the file `name`, as `read_graph`; None if no file is given."""
    return None if name is None else read_graph(read_text(name), display_name(name))


def read_graph(text: str, name: str) -> ModelGraph:
    """The graph in a file's text. Raises RefusedFile if it is not a graph file, UsageError if its values do not fit.

    `name`: what error messages call the file.
    """
    values = read_json(from_version_1(text), name)
    optional = ("edges", "per_consumer", "tied", "replicated", "layers")
    if not isinstance(values, dict) or not {"stages"} <= values.keys() <= {"stages", *optional}:
        raise RefusedFile(f"{name}: should be an object with stages, and perhaps {', '.join(optional)}")
    stages = values["stages"]
    if type(stages) is not int or not 1 <= stages <= MOST_STAGES:
        raise UsageError(f"{name}: stages should be a whole number of at least 1, not {clip(repr(stages))}")
    edges, per_consumer, tied, replicated, layers = (values.get(key, []) for key in optional)
    lists = [*_lists(edges), *_lists(tied), per_consumer, replicated]
    if not all(isinstance(entry, list) and all(type(stage) is int for stage in entry) for entry in lists):
        raise UsageError(
            f"{name}: edges and tied should be lists of lists of stages, per_consumer and replicated lists of stages"
        )
    if unknown := [stage for entry in lists for stage in entry if not 0 <= stage < stages]:
        raise UsageError(f"{name}: it names stage {clip(str(unknown[0]))}, which is not in 0..{stages - 1}")
    if not isinstance(layers, list) or not all(type(count) is int and 1 <= count < MOST_LAYERS for count in layers):
        raise UsageError(f"{name}: layers should be a list of whole numbers of at least 1")
    if len(layers) not in (0, stages):
        raise UsageError(f"{name}: layers has {number_of(len(layers), 'number')}, but there are {stages} stages")
    try:
        edges = check_edges(edges, stages) if "edges" in values else None
        per_consumer = check_per_consumer(per_consumer, edges or ())
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None
    return ModelGraph(stages, edges, per_consumer, tuple(map(tuple, tied)), tuple(replicated), tuple(layers))


def _lists(value: Any) -> list[Any]:
    """The entries of a list; any other value becomes the only entry, which the caller refuses as not a list."""
    return value if isinstance(value, list) else [value]
