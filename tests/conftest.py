"""Tests call kernels often and on little: compiled they take a tenth of the time, and here they check bounds, too.

What a command does with small inputs, which is to interpret kernels, the tests that start one see. test_jit.py compares
both ways.
"""

import os
from pathlib import Path

import schedgen.util.jit

os.environ.setdefault("NUMBA_BOUNDSCHECK", "1")
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "kernels"))
schedgen.util.jit.SMALL = 0
