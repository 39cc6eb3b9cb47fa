"""The `schedgen` command: parses, calls, and answers what goes wrong.

Exit codes: 0 done; 1 the file is refused; 2 wrong usage, or sizes and
functions that make no schedule. Those of `diff` are diff(1)'s: 0 the same, 1
they differ, 2 trouble. An error is one sentence on stderr.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from schedgen.cli.options import parser
from schedgen.util.errors import RefusedFile, UsageError, one_line
from schedgen.util.progress import allow


def main(arguments: Sequence[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file name may hold anything
    options = parser().parse_args(arguments)
    allow(options.quiet)
    trouble: int = options.trouble
    try:
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except (UsageError, RefusedFile) as error:
        print(f"schedgen: {one_line(error)}", file=sys.stderr)
        return max(error.code, trouble)
    except BrokenPipeError:  # the reader of our output has gone, as in `schedgen stats F | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except OSError as error:
        name = error.filename or getattr(options, "output", None) or "standard output"
        print(f"schedgen: {one_line(name)}: {error.strerror}", file=sys.stderr)
        return trouble
    except (KeyboardInterrupt, MemoryError) as error:
        print(f"schedgen: {type(error).__name__}", file=sys.stderr)
        return 130 if isinstance(error, KeyboardInterrupt) else trouble
