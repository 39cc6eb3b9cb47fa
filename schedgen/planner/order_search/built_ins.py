"""The built-in schemes that place every job as the searched scheme does: their orders are where a search starts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from schedgen.compiler.options import Options
from schedgen.compiler.place import PlacedScheme, place
from schedgen.compiler.refine import refine
from schedgen.ir.instructions import B, F
from schedgen.ir.weight_versions import FLUSH
from schedgen.planner.order_search.question import Question
from schedgen.schemes import SCHEMES, load
from schedgen.schemes.scheme import Scheme
from schedgen.util.errors import UsageError


def same_placement(question: Question, placed: PlacedScheme) -> Iterator[Scheme]:
    """The question's scheme itself, and each built-in one with its placement, for its model and with a flush."""
    searched, sizes = question.scheme, question.sizes
    layers = {name: value for name, value in searched.parameters.items() if name == "layers"}
    yield searched
    for name in SCHEMES:
        try:
            scheme = load(name, sizes)
            parameters = {**scheme.parameters, **layers}
            scheme = scheme._replace(edges=searched.edges, per_consumer=searched.per_consumer, parameters=parameters)
            compute = refine(place(scheme, sizes, Options())).compute
        except UsageError:  # such as one for other sizes
            continue
        if scheme.updates == FLUSH and np.array_equal(compute[[F, B]], placed.compute[[F, B]]):
            yield scheme
