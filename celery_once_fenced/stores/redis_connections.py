"""Open connections of one process to one Redis, at most ``size``: the one used last is used next.

Taking a free one and giving it back cost next to nothing, for they are on the way of every call: they are a pop and an
append, which threads may do side by side.  Only who finds none free takes the lock, and waits.

A forked child forgets its parent's connections and makes its own.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["Connections", "NoneFreeError"]


class NoneFreeError(Exception):
    """All connections were busy: that says something about this process, nothing about the server."""


class Connections:
    """``make`` makes one that connects when it is first used; ``wait`` is how long to wait for a free one, in seconds."""

    def __init__(self, make: Callable[[], Any], *, size: int, wait: float) -> None:
        self._make = make
        self._size = size
        self._wait = wait
        self._start_over()
        _of_this_process.add(self)

    def _start_over(self) -> None:
        self._changed = threading.Condition()
        self._waiting = 0
        self._free: list[Any] = []
        self._all: weakref.WeakSet[Any] = weakref.WeakSet()
        """One that is lost, by an exception at the wrong moment, is replaced."""

    def take(self) -> Any:
        """A connection that is nobody else's until it is given back.  Raises ``NoneFreeError``."""
        try:
            return self._free.pop()
        except IndexError:
            return self._another()

    def give_back(self, connection: Any) -> None:
        """Open or not: it connects again when it is used."""
        self._free.append(connection)
        if self._waiting:  # counted before who waits looks: either they see this connection, or we see them
            with self._changed:
                self._changed.notify()

    @property
    def plenty(self) -> bool:
        """Whether at most half are in hand: then one may be kept while its user does something else."""
        return len(self._all) - len(self._free) <= self._size // 2

    def close(self) -> None:
        """Close all, also those in use; they connect again when they are used."""
        for connection in list(self._all):
            connection.disconnect()

    def _another(self) -> Any:
        deadline = time.monotonic() + self._wait
        with self._changed:
            self._waiting += 1
            try:
                while not self._free:
                    if len(self._all) < self._size:
                        made = self._make()
                        self._all.add(made)
                        return made
                    if not self._changed.wait(deadline - time.monotonic()):
                        raise NoneFreeError
                return self._free.pop()
            finally:
                self._waiting -= 1


_of_this_process: weakref.WeakSet[Connections] = weakref.WeakSet()


def _forget_the_parents() -> None:
    """A child neither uses nor closes its parent's connections, and its locks may have been held at the fork."""
    for connections in list(_of_this_process):
        theirs = list(connections._all)
        connections._start_over()
        # This end alone is closed: the thread that forked may have one in hand, and go on here.
        for connection in theirs:
            connection.disconnect()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_the_parents)
