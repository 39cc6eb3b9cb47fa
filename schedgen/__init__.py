"""schedgen: two functions, w and n, compiled to the instruction list of every rank.

    import schedgen

    sizes = schedgen.Sizes(stages=4, microbatches=8)
    program = schedgen.compile(schedgen.load("1f1b", sizes), sizes, schedgen.Options(prefetch=0))
    schedgen.check(program)
    with open("1f1b.json", "wb") as file:
        schedgen.write(program, file)

load      the name of a scheme, or a FILE.py with w and n, to a scheme
compile   scheme, sizes and options to a program
forward_list  the forwards of any program as a program of their own, for evaluation and prediction
read      a schedule file, opened in binary mode, and its name to its program, and what is wrong with its hash
write     a program to a schedule file, opened in binary mode
check     proves a program right; returns every rank's peak memory
simulate  a program, costs and a machine to the start and end times of all instructions
stats     a program to latency, bubble, memory and messages, by name
compare   all built-in schemes of some sizes, and files of your own: their numbers side by side
plan      a profile's layers to the schedules that no other beats in both time and memory
search    the jobs of a scheme to the order that ends first, and a lower bound
read_network  a machine file to its Network
read_profile  a profile's file and a program to the costs of its jobs and a Machine
read_layers   a profile's file to the layers that `plan` takes: it reads the file itself, if it has no graph
topology  hosts of so many devices to a Network
SCHEMES   the built-in schemes, by name
Program   the instructions of all ranks, and a header
Scheme    w, n and the other settings of a scheme
Sizes     stages, microbatches, workers, ...
Options   how a scheme is compiled
Machine   links, bytes of buffers and the time of a step; `machine.on(network)` joins its devices by a network
Network, Level, HostLink  links between devices, hosts, racks, each device's speed and memory, and its host's
UsageError, RefusedFile  the errors these raise: for wrong arguments or a misfit; for a wrong file or program
F, B, I, W  the values of d that `w` and `n` receive: forward, backward, and its halves

Each is imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from schedgen.util.version import __version__

if TYPE_CHECKING:
    from schedgen.checker import check
    from schedgen.compiler.compile import compile, forward_list
    from schedgen.compiler.options import Options
    from schedgen.ir.file import read, write
    from schedgen.ir.instructions import B, F, I, W
    from schedgen.ir.program import Program
    from schedgen.planner.layer_profile import read_layers
    from schedgen.planner.order_search.search_ways import search
    from schedgen.planner.plan import plan
    from schedgen.planner.stage_costs import read_profile
    from schedgen.report.compare import compare
    from schedgen.schemes import SCHEMES, load
    from schedgen.schemes.scheme import Scheme, Sizes
    from schedgen.simulator.machine import Machine
    from schedgen.simulator.machine_file import read_network
    from schedgen.simulator.network import HostLink, Level, Network, topology
    from schedgen.simulator.simulate import simulate
    from schedgen.simulator.stats import stats
    from schedgen.util.errors import RefusedFile, UsageError

__all__ = [
    "SCHEMES", "B", "F", "HostLink", "I", "Level", "Machine", "Network", "Options", "Program", "RefusedFile", "Scheme",
    "Sizes", "UsageError", "W", "__version__", "check", "compare", "compile", "forward_list", "load", "plan",
    "read", "read_layers", "read_network", "read_profile", "search", "simulate", "stats", "topology", "write",
]  # fmt: skip

_MODULES = {
    **dict.fromkeys(("B", "F", "I", "W"), "schedgen.ir.instructions"),
    **dict.fromkeys(("Scheme", "Sizes"), "schedgen.schemes.scheme"),
    **dict.fromkeys(("read", "write"), "schedgen.ir.file"),
    **dict.fromkeys(("RefusedFile", "UsageError"), "schedgen.util.errors"),
    **dict.fromkeys(("HostLink", "Level", "Network", "topology"), "schedgen.simulator.network"),
    **dict.fromkeys(("SCHEMES", "load"), "schedgen.schemes"),
    "Machine": "schedgen.simulator.machine",
    "Options": "schedgen.compiler.options",
    "Program": "schedgen.ir.program",
    "check": "schedgen.checker",
    "compare": "schedgen.report.compare",
    "compile": "schedgen.compiler.compile",
    "forward_list": "schedgen.compiler.compile",
    "plan": "schedgen.planner.plan",
    "read_network": "schedgen.simulator.machine_file",
    "read_layers": "schedgen.planner.layer_profile",
    "read_profile": "schedgen.planner.stage_costs",
    "search": "schedgen.planner.order_search.search_ways",
    "simulate": "schedgen.simulator.simulate",
    "stats": "schedgen.simulator.stats",
}


def __getattr__(name: str) -> Any:
    """A public name; AttributeError for any other."""
    if name not in _MODULES:
        raise AttributeError(f"module schedgen has no attribute {name}")
    return getattr(importlib.import_module(_MODULES[name]), name)
