"""schedgen: two functions, w and n, compiled to the instruction list of every rank.

F, B, I, W are the values of d that `w` and `n` receive.
"""

__version__ = "0.1.0"

from schedgen.ir.instructions import B, F, I, W

__all__ = ["B", "F", "I", "W", "__version__"]
