"""Connections between the watchdogs of several hosts: their messages, and which host is silent.

The watchdog beside rank 0 listens, and all others connect to it. The first line of a connection is the run's token; one
that begins otherwise is closed. Each further line is a message, JSON with some of these keys:

states   the states of the host's ranks, once a second
died     the state of a rank that ended before it was done
failed   a rank fails and reports why itself
end      all ranks are to be ended, "now" or "soon"
bye      the host's ranks have ended: its silence means nothing from now on
"""

from __future__ import annotations

import contextlib
import hmac
import json
import selectors
import socket
import time
from collections.abc import Iterator
from typing import Any

from mpirun.watchdog.hang_report import State

SILENCE = 60.0  # seconds after which a silent host counts as lost, if the time limit is not shorter


class Link:
    """A connection to another watchdog."""

    def __init__(self, connection: socket.socket, trusted: bool) -> None:
        """`trusted`: this side has connected; else the other has to send the token."""
        self.socket, self.received, self.out, self.heard = connection, b"", b"", time.monotonic()
        self.states: list[State] = []
        self.trusted, self.open, self.left = trusted, True, False
        connection.setblocking(False)

    def send(self, line: bytes) -> None:
        """Send a line, with those that could not be sent before."""
        self.out += line + b"\n"
        with contextlib.suppress(OSError):  # full, or broken: `heard` will tell
            self.out = self.out[self.socket.send(self.out) :]

    def receive(self, token: str) -> list[dict[str, Any]]:
        """The messages that have arrived since the last call. `open` becomes False when the connection ends."""
        try:
            data = self.socket.recv(1 << 20)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        self.heard = time.monotonic()
        *lines, self.received = (self.received + data).split(b"\n")
        if lines and not self.trusted:
            self.trusted = hmac.compare_digest(lines.pop(0), token.encode())
        self.open = bool(data) and (self.trusted or len(self.received) <= len(token))
        return [json.loads(line) for line in lines] if self.trusted else []


class Hosts:
    """The other hosts that this watchdog is connected to."""

    def __init__(self, selector: selectors.BaseSelector, token: str) -> None:
        """`selector`: where links are registered, each as its own data; `token`: what a trusted watchdog knows."""
        self.selector, self.token = selector, token
        self.links: list[Link] = []

    def connect(self, address: str, port: int) -> bool:
        """Connect to the watchdog beside rank 0; return whether it answers."""
        try:
            self.add(socket.create_connection((address, port), 3), trusted=True)
        except OSError:
            return False
        self.links[-1].send(self.token.encode())
        return True

    def add(self, connection: socket.socket, trusted: bool = False) -> None:
        """Register a new connection."""
        link = Link(connection, trusted)
        self.links.append(link)
        self.selector.register(link.socket, selectors.EVENT_READ, link)

    def receive(self, link: Link) -> Iterator[dict[str, Any]]:
        """The messages that have arrived from a trusted host. A connection that ends is closed after them.

        If its watchdog ends without `bye`, the link stays in the list, so that its silence counts.
        """
        for message in link.receive(self.token):
            link.states = message.get("states", link.states)
            link.left = link.left or bool(message.get("bye"))
            yield message
        if not link.open:
            self.selector.unregister(link.socket)
            link.socket.close()
            if link.left or not link.trusted:
                self.links.remove(link)

    def send(self, **message: object) -> None:
        """Send a message to all other hosts."""
        for link in self.links:
            if link.trusted:
                link.send(json.dumps(message).encode())

    def states(self) -> list[State]:
        """The states of all ranks on other hosts, as far as they are known."""
        return [state for link in self.links for state in link.states]

    def silent(self, seconds: float) -> str | None:
        """A host that has sent nothing for `seconds`; None: there is none."""
        now = time.monotonic()
        for link in self.links:
            if link.trusted and not link.left and now - link.heard > seconds:
                return link.states[0]["host"] if link.states else "a host"
        return None
