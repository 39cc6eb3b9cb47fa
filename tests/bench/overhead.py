"""make bench-run: what the interpreter adds to each instruction, beyond the bare mpi4py call.

Two ranks, 1F1B of 64 microbatches, computation removed: forwards and backwards
return tensors made before. Microseconds per instruction, medians over all
instructions of an opcode and over steps; waiting for messages is taken off.
"""

from __future__ import annotations

import atexit
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpi4py import MPI
from ranks import mpi, schedgen

HERE = Path(__file__).parent
QUICK = "--quick" in sys.argv
STEPS, LAPS, MICROBATCHES = (2, 20, 4) if QUICK else (40, 2000, 64)


def measure(schedule: str) -> None:
    import torch

    from mpirun.cli.options import run_options
    from mpirun.cli.run import Run
    from mpirun.comm.message import mpi_buffer
    from mpirun.engine.core.stage import SavedForward
    from schedgen.ir.instructions import Op

    comm = MPI.COMM_WORLD
    arguments = [schedule, "--model", "cases:overhead", "--threads", "1", "--timeout", "0"]
    run = Run(comm, run_options(comm, arguments))
    interpreter = run.session.interpreter
    for stage in interpreter.stages.values():
        loss = not interpreter.header.graph.consumers[stage.index]
        output = torch.zeros(()) if loss else torch.zeros(stage.shape.outputs[0].size)
        leaf = torch.zeros(interpreter.context.slots.shapes[0].outputs[0].size, requires_grad=True)
        leaf.grad = torch.zeros_like(leaf)
        outputs = ([output], SavedForward([leaf], [None]))
        stage.forward = lambda *arguments, outputs=outputs: outputs
        stage.backward = lambda saved, gradient: None
    spent: dict[int, list[float]] = defaultdict(list)

    def timed(op: int, act: Callable[[], None]) -> Callable[[], None]:
        def instruction() -> None:
            waited, begin = interpreter.transport.waited, time.perf_counter()
            act()
            spent[op].append(time.perf_counter() - begin - (interpreter.transport.waited - waited))

        return instruction

    interpreter.context.losses |= dict.fromkeys(range(interpreter.header.microbatches), torch.zeros(()))
    for pending in interpreter.context.pending.values():
        pending.loss_gradient = torch.ones(())
    interpreter.code = [timed(i.op, act) for i, act in zip(run.session.instructions, interpreter.code, strict=True)]
    plain = timed(-1, lambda: None)
    for step in range(STEPS):
        interpreter.run(step)
        for _ in range(100):
            plain()
    tensor = torch.zeros(interpreter.context.slots.shapes[0].outputs[0].size)
    buffer = mpi_buffer(tensor)
    receive = comm.Recv_init(buffer, MPI.PROC_NULL)
    atexit.register(receive.Free)

    def bare(call: Callable[[], object], clean: Callable[[], object] = lambda: None) -> float:
        laps = []
        for _ in range(LAPS):
            begin = time.perf_counter()
            call()
            laps.append(time.perf_counter() - begin)
            clean()
        return 1e6 * statistics.median(laps)

    nothing = 1e6 * statistics.median(spent.pop(-1))
    calls = {
        Op.SEND: ("Isend", sending(comm, buffer)),
        Op.RECV: ("Start", bare(receive.Start, receive.Wait)),
        Op.FREE: ("Test", bare(comm.Isend(buffer, MPI.PROC_NULL).Test)),
    }
    rows = comm.gather({op: 1e6 * statistics.median(laps) - nothing for op, laps in spent.items()})
    if rows is None:
        return
    print(f"microseconds an instruction, computation removed (the clock's own {nothing:.2f} taken off)")
    for op in sorted({op for row in rows for op in row}):
        each = "  ".join(f"{row[op]:6.2f}" if op in row else "     -" for row in rows)
        name, call = calls.get(Op(op), ("", 0.0))
        print(f"  {Op(op).name:10} rank 0, 1: {each}" + (f"   mpi4py's {name}: {call:.2f}" if name else ""), flush=True)


def sending(comm: MPI.Intracomm, buffer: list[Any]) -> float:
    """Microseconds of an Isend of such a message to a receive that is posted already."""
    laps = []
    into = [bytearray(len(buffer[0])), *buffer[1:]]
    for _ in range(LAPS):
        receive = comm.Irecv(into, 1 - comm.rank)
        comm.Barrier()
        begin = time.perf_counter()
        send = comm.Isend(buffer, 1 - comm.rank)
        laps.append(time.perf_counter() - begin)
        send.Wait()
        receive.Wait()
    return 1e6 * statistics.median(laps)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        schedule = str(Path(folder) / "schedule.json")
        sizes = ["--stages", 2, "--microbatches", MICROBATCHES, "--workers", 2]
        schedgen("compile", "1f1b", *sizes, "-o", schedule)
        subprocess.run(
            [*mpi(2), "-m", "mpi4py", str(HERE / "overhead.py"), *sys.argv[1:], schedule], check=True, cwd=HERE
        )


if __name__ == "__main__":
    measure(sys.argv[-1]) if sys.argv[-1].endswith(".json") else main()
