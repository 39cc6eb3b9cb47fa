"""Connections between the watchdogs of several hosts: their messages, and which host is silent.

The watchdog beside rank 0 listens, and all others connect to it. A message is a line of JSON with some of these keys:

token, host   opens a connection; one that begins otherwise is closed
states        the states of the host's ranks, once a second
died          the state of a rank that ended before it was done
failed        a rank fails and reports why itself
end           all ranks are to be ended, "now" or "soon"
bye           the host's ranks have ended: its silence means nothing from now on
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

from mpirun.watchdog.rank_state import State

SILENCE = 60.0  # seconds after which a silent host counts as lost, if the time limit is not shorter


class Link:
    """A connection to another watchdog."""

    def __init__(self, connection: socket.socket) -> None:
        """Make the connection non-blocking."""
        self.socket, self.received, self.out, self.heard = connection, b"", b"", time.monotonic()
        self.host = ""
        self.states: list[State] = []
        self.trusted, self.open, self.left = False, True, False
        connection.setblocking(False)

    def send(self, **message: object) -> None:
        """Send a message, with those that could not be sent before."""
        self.out += json.dumps(message).encode() + b"\n"
        with contextlib.suppress(OSError):  # full, or broken: `heard` will tell
            self.out = self.out[self.socket.send(self.out) :]

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived since the last call. `open` becomes False when the connection ends."""
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
        *lines, self.received = (self.received + data).split(b"\n")
        try:
            messages = [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError):
            messages = [{}] if self.trusted else []
        sound = bool(messages or len(self.received) < 1000) and len(messages) == len(lines)
        self.open = self.trusted or sound
        return messages


class Hosts:
    """The other hosts that this watchdog is connected to."""

    def __init__(self, selector: selectors.BaseSelector, token: str) -> None:
        """`selector`: where links are registered, each as its own data; `token`: what a trusted watchdog knows."""
        self.selector, self.token = selector, token
        self.links: list[Link] = []

    def connect(self, host: str, addresses: list[str], port: int) -> bool:
        """Connect this `host` to the watchdog beside rank 0; return whether one of its addresses answers."""
        for address in addresses:
            with contextlib.suppress(OSError):
                link = self.add(socket.create_connection((address, port), 3))
                link.trusted = True
                link.send(token=self.token, host=host)
                return True
        return False

    def add(self, connection: socket.socket) -> Link:
        """Register a new connection, which is not trusted yet."""
        link = Link(connection)
        self.links.append(link)
        self.selector.register(link.socket, selectors.EVENT_READ, link)
        return link

    def _close(self, link: Link) -> None:
        """Close a link. If its watchdog ends without `bye`, it stays in the list, so that its silence counts."""
        self.selector.unregister(link.socket)
        link.socket.close()
        if link.left or not link.trusted:
            self.links.remove(link)

    def receive(self, link: Link) -> Iterator[dict[str, Any]]:
        """The messages that have arrived from a trusted host. A connection that ends is closed after them."""
        for message in link.receive():
            if not link.trusted:
                if not hmac.compare_digest(str(message.get("token")).encode(errors="replace"), self.token.encode()):
                    self._close(link)
                    return
                link.trusted, link.host = True, message["host"]
            link.states = message.get("states", link.states)
            link.left = link.left or bool(message.get("bye"))
            yield message
        if not link.open:
            self._close(link)

    def send(self, **message: object) -> None:
        """Send a message to all other hosts."""
        for link in self.links:
            link.send(**message)

    def states(self) -> list[State]:
        """The states of all ranks on other hosts, as far as they are known."""
        return [state for link in self.links for state in link.states]

    def silent(self, seconds: float) -> Link | None:
        """A link to a host that has sent nothing for `seconds`; None: there is none."""
        now = time.monotonic()
        lost = (link for link in self.links if link.trusted and not link.left and now - link.heard > seconds)
        return next(lost, None)
