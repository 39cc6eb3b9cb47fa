"""torch's list as a projected program: its jobs and messages in their places, and what the runtime does besides.

The optimizer's step follows the list. The runtime waits for its SENDs at the end of the list, so what it has sent is
freed there, or where the list has a WAIT_SEND. What it receives is freed after its last use.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from schedgen.compiler.compile import compile
from schedgen.compiler.lower import header_of
from schedgen.compiler.options import Options
from schedgen.compiler.passes.free import free
from schedgen.compiler.passes.gradient_reduction import optimizer_step
from schedgen.compiler.place import place
from schedgen.compiler.refine import refine
from schedgen.ir.instructions import LETTER, Kind, Op
from schedgen.ir.program import Program, rows
from schedgen.schemes.torch_list import BUFFER_STAGE, GRADIENTS, OTHER_STAGE, Action, TorchList, scheme_of
from schedgen.util.arrays import Flags, Numbers

_OPS = np.array([Op.FWD, Op.BWD, Op.BWD_I, Op.BWD_W, *(Op.SEND, Op.RECV) * 2, Op.FREE, Op.FREE])  # by Action


def torch_program(torch_list: TorchList, options: Options = Options()) -> Program:  # noqa: B008  frozen
    """The projected program of a list, with its `cells`; a list without messages gets those of `compile`.

    `options`: where the list has messages, only the cost counts.
    UsageError if the list and the options do not fit together, or if jobs without messages wait for one another.
    """
    scheme, sizes = scheme_of(torch_list)
    if not torch_list.has_messages:
        program = compile(scheme, sizes, options)
        return _with_cells(program, program.is_one_of(*LETTER), torch_list.cell[torch_list.type <= Action.W])
    placed = refine(place(scheme, sizes, options))
    taken = np.flatnonzero(torch_list.type < Action.UNSHARD)
    rank, cell, type, stage, mb = (column[taken] for column in torch_list[2:7])
    kind = np.where(type <= Action.W, Kind.NONE, np.where(np.isin(type, GRADIENTS), Kind.G, Kind.X))
    is_message = np.isin(_OPS[type], (Op.SEND, Op.RECV))
    other_end = np.where(is_message, placed.compute[0, (stage + OTHER_STAGE[type]) % sizes.stages, 0], -1)
    new = rows(_OPS[type], rank, kind=kind, stage=stage + BUFFER_STAGE[type], mb=mb, operand=other_end)
    program = optimizer_step(Program(header_of(placed), new), placed).project()
    program = _with_cells(program, program.is_one_of(*LETTER, Op.SEND, Op.RECV, Op.FREE), cell)
    return free(program, sends_end_late=True)


def _with_cells(program: Program, listed: Flags, cells: Numbers) -> Program:
    """The program with the cells of the rows that are `listed`; other rows have that of the last one before them."""
    last, base = np.zeros(len(program), np.int64), program.rows.rank.astype(np.int64) * (int(cells.max()) + 1)
    last[listed] = cells
    return replace(program, cells=np.maximum.accumulate(last + base) - base)
