"""Starting orders of the search: those of all built-in schemes that place every job as the searched scheme does."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedgen.compiler.options import Options
from schedgen.compiler.order import order
from schedgen.compiler.place import PlacedScheme, place
from schedgen.compiler.refine import refine
from schedgen.ir.cost import durations
from schedgen.ir.instructions import B, F
from schedgen.ir.weight_versions import FLUSH
from schedgen.planner.order_search.compiled_orders import order_costs
from schedgen.planner.order_search.problem import OrderProblem, order_of
from schedgen.planner.order_search.question import Question
from schedgen.schemes import SCHEMES, load
from schedgen.schemes.scheme import Scheme, Sizes
from schedgen.util.arrays import Numbers
from schedgen.util.errors import UsageError


class Start(NamedTuple):
    """An order from which to start."""

    scheme: Scheme  # the scheme that has this order
    order: Numbers


def starts(question: Question, problem: OrderProblem, placed: PlacedScheme) -> list[Start]:
    """The orders of the scheme itself and of the built-in ones."""
    own, sizes, costs, orders = question.scheme, question.sizes, order_costs(question), []
    for scheme in (own, *_built_in(sizes)):
        try:
            scheme = _of_model(scheme, own)
            other = refine(place(scheme, sizes, Options(cost=dict(durations(costs, 3 if scheme.split else 2)))))
            if np.array_equal(other.compute[[F, B]], placed.compute[[F, B]]):
                orders.append(Start(scheme, order_of(problem, _starts(other, len(placed.compute)))))
        except UsageError:  # such as one that needs another number of microbatches
            continue
    return orders


def _of_model(scheme: Scheme, own: Scheme) -> Scheme:
    """A scheme for the model of the scheme `own`: with its edges and layers."""
    layers = {name: value for name, value in own.parameters.items() if name == "layers"}
    parameters = {**scheme.parameters, **layers}
    return scheme._replace(edges=own.edges, per_consumer=own.per_consumer, parameters=parameters)


def _built_in(sizes: Sizes) -> list[Scheme]:
    """All built-in schemes that fit these sizes and update weights once a step."""
    schemes = []
    for name in SCHEMES:
        try:
            schemes.append(load(name, sizes))
        except UsageError:
            continue
    return [scheme for scheme in schemes if scheme.updates == FLUSH]


def _starts(placed: PlacedScheme, directions: int) -> Numbers:
    """A number for every job that grows with time on a worker; a whole backward becomes an I and then its W."""
    time = order(placed).reshape(placed.compute.shape)
    whole = placed.unsplit_backward if len(time) == 3 else np.ones(time.shape[1:], bool)
    if directions == 3:
        behind = np.where(whole, time[B], time[-1])
        time = np.stack([time[F], time[B], behind])
    place = np.argsort(np.argsort(time.ravel(), kind="stable"), kind="stable").reshape(time.shape)
    numbers: Numbers = (2 * place).astype(np.int64)
    if directions == 3:
        numbers[2] = np.where(whole, numbers[1] + 1, numbers[2])
    return numbers.ravel()
