"""Where an error was raised, in words."""

import json

from schedgen.util.errors import raised, raised_at


def test_where_an_error_was_raised_is_a_line_of_the_user_s_with_its_source():
    """The line that raised it or, if the traceback has libraries alone, the line that called them, and theirs."""
    try:
        json.loads("{")
    except ValueError as error:
        line = error.__traceback__.tb_lineno
        assert raised_at(error) == f' (at {__file__}:{line}: `json.loads("{{")`)'
        error.__traceback__ = error.__traceback__.tb_next
        where = raised_at(error)
        assert where.startswith(f" (at {__file__}:{line + 5}: `where = raised_at(error)`, in {json.decoder.__file__}:")


def test_the_notes_of_an_error_are_told():
    error = ValueError("one")
    error.add_note("two")
    assert raised(error) == "ValueError: one; two"
