"""Compile the kernels that many tests need into numba's cache: `python compile_kernels.py FOLDER first|second`.

The halves take about the same time, and few kernels are in both.
"""

import sys
from pathlib import Path

import schedgen.util.jit
from schedgen.cli.main import main

schedgen.util.jit.SMALL = 0
FOLDER, TRACES = sys.argv[1], Path(__file__).parents[3] / "traces"
SIZES = "--stages 4 --microbatches 4 --workers 2"
HALVES = {
    "first": [
        f"compile zb-v {SIZES} -o {FOLDER}/zb-v.json",
        f"compile interleaved-1f1b {SIZES} --mode greedy -o {FOLDER}/greedy.json",
    ],
    "second": [f"simulate {TRACES}/fsdp.json", f"check {TRACES}/fsdp.json {TRACES}/pipedream.json"],
}
for command in HALVES[sys.argv[2]]:
    assert main([*command.split(), "-q"]) == 0, command
