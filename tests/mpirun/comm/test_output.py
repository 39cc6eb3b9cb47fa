"""What is printed for the user."""

import io

from mpirun.comm.output import say


def test_a_line_may_hold_what_a_stream_cannot_encode():
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    say("in d\u00fcr and \udcff", stream)
    assert stream.buffer.getvalue() == b"in d\\xfcr and \\udcff\n"
