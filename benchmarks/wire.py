"""The questions that the store asks, written out beforehand and sent over a plain socket: what no client can undercut."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import hiredis

from celery_once_fenced.stores.redis import RedisLeaseStore
from celery_once_fenced.stores.redis_conversation import packed
from celery_once_fenced.stores.redis_link import Command, script

__all__ = ["NAMESPACE", "Wire", "question"]

NAMESPACE = "bench"
SCRIPTS = ("enqueue", "start", "end", "renew")


class Wire:
    """A connection to a Redis database and next to nothing on top of it."""

    def __init__(self, url: str) -> None:
        server = urlsplit(url)
        self._socket = socket.create_connection((server.hostname, server.port or 6379))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = hiredis.Reader()
        if server.password:
            self.ask(packed([("AUTH", server.username or "default", server.password)]))
        self.ask(packed([("SELECT", server.path.strip("/") or 0)]))
        for name in SCRIPTS:
            self.ask(packed([("SCRIPT", "LOAD", script(name).source)]))

    def ping(self) -> None:
        self.ask(b"PING\r\n")

    def ask(self, question: bytes, answers: int = 1) -> None:
        """A round trip."""
        self.send(question)
        self.receive(answers)

    def send(self, question: bytes) -> None:
        self._socket.sendall(question)

    def receive(self, answers: int = 1) -> None:
        while answers:
            self._reader.feed(self._socket.recv(65536))
            while answers and (answer := self._reader.gets()) is not False:
                assert not isinstance(answer, hiredis.ReplyError), answer
                answers -= 1


class _Written(Exception):  # noqa: N818  # no error
    def __init__(self, commands: tuple[Command, ...]) -> None:
        self.commands = commands


class _Recorder:
    """In the place of the way to Redis."""

    def send(self, *commands: Command, **_: object) -> Any:
        raise _Written(commands)

    ask = send


def question(ask: Callable[[RedisLeaseStore], object]) -> bytes:
    """What the store sends to ask this."""
    store = RedisLeaseStore("redis://", namespace=NAMESPACE)
    store._link = _Recorder()  # type: ignore[assignment]
    try:
        ask(store)
    except _Written as written:
        return packed(written.commands)
    raise AssertionError("it asked nothing")
