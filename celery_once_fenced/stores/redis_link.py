"""One process's way to one Redis: bounded connections, one deadline, one second sending, one breaker (E2).

A question is one or more commands, sent together.  Within ``timeout`` seconds it is answered or fails:

- it waits for a free connection for at most half the time; an idle one that the server has closed is opened again;
- if the answer does not come within half of what is left then, or the connection breaks, or the server has
  become a replica, the question is sent a second time, on a fresh connection: every script takes a question
  that it has already answered for what it is (E3);
- making a connection counts, and may take ``connect_timeout``; the system bounds the look-up of a host name.

Commands are packed here, and connections are kept here (``redis_connections``): what redis-py does for them on its way
through client and pool would cost more than the server takes to answer.

Whatever interrupts a question (a time limit, Ctrl-C) breaks its connection, so that its answer is never read
as the answer to the next one.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.exceptions import NoScriptError, ReadOnlyError, RedisError, ResponseError
from redis.retry import Retry

from celery_once_fenced.errors import ConfigError, StoreUnavailableError
from celery_once_fenced.stores.breaker import Breaker
from celery_once_fenced.stores.redis_connections import Connections, NoneFreeError

__all__ = ["Command", "RedisLink", "Script", "script"]

Command = tuple[str | int, ...]
Interruption = (redis.ConnectionError, redis.TimeoutError)
MIN_TIMEOUT = 0.001
PATIENCE = 0.45
"""Of the timeout: how long one read may take by itself.  Less than half, so that two sendings keep the deadline."""
_sources: dict[str, str] = {}
"""Text of every script in use, by its hash."""


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script, called by its hash; its text is sent where the server lacks it (restart, failover)."""

    source: str
    sha: str

    @classmethod
    def of(cls, source: str) -> Script:
        made = cls(source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())
        _sources[made.sha] = source
        return made

    def call(self, bucket: str, *args: str | int) -> Command:
        """The command that runs it on a bucket."""
        return ("EVALSHA", self.sha, 1, bucket, *args)


@cache
def script(name: str) -> Script:
    """The script ``lua/<name>.lua``, with what every script begins with before it."""
    folder = files("celery_once_fenced.stores") / "lua"
    return Script.of("".join((folder / f"{part}.lua").read_text("utf-8") for part in ("bucket", name)))


def _with_source(command: Command) -> Command:
    return ("EVAL", _sources[str(command[1])], *command[2:])


class RedisLink:
    """Connects when first asked.  For any number of threads; a forked child makes connections of its own."""

    def __init__(
        self,
        url: str,
        *,
        timeout: float,
        connect_timeout: float,
        max_connections: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.breaker = Breaker(clock=clock)
        self._timeout = timeout
        self._clock = clock
        options = _options(url, timeout, connect_timeout)
        make = partial(options.pop("connection_class", redis.Connection), **options)
        self._connections = Connections(make, size=max_connections, wait=timeout / 2)
        self._password = str(options.get("password") or "")

    def ask(self, *commands: Command, again: Sequence[Command] = (), past_breaker: bool = False) -> list[Any]:
        """The answers to ``commands``, in one round trip.

        ``again`` is what to send the second time, where that is something else.  ``past_breaker``: ask even
        while the breaker is open (renewals).

        Raises ``StoreUnavailableError``: no answer in time, or an error as the answer.
        """
        if not (past_breaker or self.breaker.admits()):
            raise StoreUnavailableError("redis", "it gave no answer a moment ago and is not asked again yet")
        try:
            answers = self._ask(commands, again or commands)
        except RedisError as error:
            raise self._unavailable(error) from error
        self.breaker.succeeded()
        for answer in answers:
            if isinstance(answer, RedisError):
                raise self._unavailable(answer)
        return answers

    def close(self) -> None:
        """Close the connections.  Asking again opens new ones."""
        self._connections.close()

    def _unavailable(self, error: RedisError) -> StoreUnavailableError:
        if isinstance(error, Interruption) and not isinstance(error, ExhaustedError):
            self.breaker.failed()
        problem = (
            f"{type(error).__name__}: {error}"  # the driver drops the code, such as OOM, that tells which
        )
        return StoreUnavailableError(
            "redis", problem.replace(self._password, "***") if self._password else problem
        )

    def _ask(self, first: Sequence[Command], again: Sequence[Command]) -> list[Any]:
        deadline = self._clock() + self._timeout
        try:
            connection = self._connections.take()
        except NoneFreeError:
            raise ExhaustedError("No connection available: all of this process are busy") from None
        try:
            self._ensure_open(connection, deadline)
            return self._converse(connection, first, again, deadline)
        except BaseException:
            connection.disconnect()
            raise
        finally:
            self._connections.give_back(connection)

    def _ensure_open(self, connection: Any, deadline: float) -> None:
        """A closed connection is found out before the question is sent, so that this costs no second sending."""
        try:
            connection.connect()  # nothing, where it is connected
            if not connection.can_read(timeout=0):
                return
        except Interruption:
            if self._clock() >= deadline:
                raise
        connection.disconnect()
        connection.connect()

    def _converse(
        self, connection: Any, first: Sequence[Command], again: Sequence[Command], deadline: float
    ) -> list[Any]:
        now = self._clock()
        try:
            answers = self._exchange(connection, first, now + (deadline - now) / 2)
            if not any(_is_from_a_replica(answer) for answer in answers):
                return answers
        except Interruption:
            if self._clock() >= deadline:
                raise
        connection.disconnect()
        connection.connect()
        return self._exchange(connection, again, deadline)

    def _exchange(self, connection: Any, commands: Sequence[Command], deadline: float) -> list[Any]:
        connection.send_packed_command([_packed(commands)], check_health=False)
        answers = [self._read(connection, deadline) for _ in commands]
        unknown = [i for i, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:
            told = self._exchange(connection, [_with_source(commands[i]) for i in unknown], deadline)
            for i, answer in zip(unknown, told, strict=True):
                answers[i] = answer
        return answers

    def _read(self, connection: Any, deadline: float) -> Any:
        left = deadline - self._clock()
        # The connection's own timeout bounds a read where as much is left; only late ones are watched.
        if left < self._timeout * PATIENCE and not connection.can_read(timeout=max(left, MIN_TIMEOUT)):
            raise redis.TimeoutError(f"no answer within {self._timeout:g} s")
        try:
            return connection.read_response()
        except ResponseError as error:
            return error


class ExhaustedError(redis.ConnectionError):
    """No connection became free in time."""


def _packed(commands: Sequence[Command]) -> bytes:
    """In the protocol's own form; half a character, which no text should have, becomes ``?`` as redis-py would do."""
    parts = []
    for command in commands:
        parts.append(f"*{len(command)}\r\n")
        for part in command:
            text = part if isinstance(part, str) else f"{part:d}"
            size = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
            parts.append(f"${size}\r\n{text}\r\n")
    return "".join(parts).encode("utf-8", "replace")


def _is_from_a_replica(answer: object) -> bool:
    """Redis 6.2 wraps what a command in a script was answered."""
    return isinstance(answer, ReadOnlyError) or (
        isinstance(answer, ResponseError) and "-READONLY" in str(answer)
    )


def _options(url: str, timeout: float, connect_timeout: float) -> dict[str, Any]:
    """What the URL says, except where E2 says something else."""
    parse: Any = parse_url  # untyped
    try:
        options: dict[str, Any] = dict(parse(url))
    except ValueError as error:
        raise ConfigError("redis_url is no URL of the form redis://, rediss:// or unix://") from error
    for of_a_pool in ("max_connections", "timeout"):
        options.pop(of_a_pool, None)
    return options | {
        "socket_timeout": timeout * PATIENCE,
        "socket_connect_timeout": connect_timeout,
        "retry": Retry(NoBackoff(), 0),
        "retry_on_timeout": False,
        "retry_on_error": [],
        "health_check_interval": 0,
        "protocol": 2,
        "decode_responses": True,
        "encoding": "utf-8",
        "encoding_errors": "replace",
    }
