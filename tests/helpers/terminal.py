"""A command in a terminal of its own."""

from __future__ import annotations

import os
import pty
import subprocess
import sys


def in_terminal(*arguments: object, code: int = 0, **environment: str) -> str:
    """What `schedgen ARGUMENTS` writes to a terminal whose colour and width only `environment` sets."""
    others = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR")}
    command = [sys.executable, "-m", "schedgen", *map(str, arguments)]
    leader, follower = pty.openpty()
    with subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=others | environment) as child:
        os.close(follower)
        data = b""
        while True:
            try:
                data += os.read(leader, 2**16)
            except OSError:  # Linux: the other end is closed
                break
    os.close(leader)
    assert child.returncode == code
    return data.decode().replace("\r\n", "\n")
