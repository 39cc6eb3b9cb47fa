"""A connection between the guards of two hosts."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any

from mpirun.watchdog.state import State


class Link:
    """A connection to another guard: lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self.rest, self.out, self.heard = connection, b"", b"", time.monotonic()
        self.host = ""
        self.states: list[State] = []
        self.trusted, self.open, self.left = False, True, False
        connection.setblocking(False)

    def say(self, **words: object) -> None:
        self.out += json.dumps(words).encode() + b"\n"
        with contextlib.suppress(OSError):  # full, or broken: `heard` will tell
            self.out = self.out[self.socket.send(self.out) :]

    def hear(self) -> list[dict[str, Any]]:
        """What has come since."""
        try:
            data = self.socket.recv(1 << 20)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.open = False
            return []
        self.heard = time.monotonic()
        *lines, self.rest = (self.rest + data).split(b"\n")
        try:
            found = [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError):
            found = [{}] if self.trusted else []
        self.open = self.trusted or (bool(found or len(self.rest) < 1000) and len(found) == len(lines))
        return found
