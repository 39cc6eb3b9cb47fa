"""Where an error was raised, in words."""

import json

from mpirun.comm.fail_together import raised_at


def test_where_an_error_was_raised_is_a_line_of_the_user_s():
    """The line that raised it or, if the traceback has libraries alone, the line that called them, and theirs."""
    try:
        json.loads("{")
    except ValueError as error:
        line = error.__traceback__.tb_lineno
        assert raised_at(error) == f" (at {__file__}:{line})"
        error.__traceback__ = error.__traceback__.tb_next
        called, _, innermost = raised_at(error).partition(", in ")
        assert called == f" (at {__file__}:{line + 5}" and innermost.startswith(json.decoder.__file__)
