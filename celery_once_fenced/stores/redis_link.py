"""One process's way to one Redis: bounded connections, one deadline, one second sending, one breaker (E2).

A question is one or more commands, sent together.  Within ``timeout`` seconds it is answered or fails:

- it waits for a free connection for at most half the time; an idle one that the server has closed is opened again;
- if the answer does not come within half of what is left then, or the connection breaks, or the server has
  become a replica, the question is sent a second time, on a fresh connection: every script takes a question
  that it has already answered for what it is (E3);
- making a connection counts, and may take ``connect_timeout``; the system bounds the look-up of a host name, and each
  part of an answer that comes in parts may take as long as a whole one.

Commands are packed and connections kept by the plugin itself (``redis_conversation``, ``redis_connections``): what
redis-py does for them on its way through client and pool would cost more than the server takes to answer.

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
from redis.exceptions import RedisError
from redis.retry import Retry

from celery_once_fenced.errors import ConfigError, StoreUnavailableError
from celery_once_fenced.stores.breaker import Breaker
from celery_once_fenced.stores.redis_connections import Connections, NoneFreeError
from celery_once_fenced.stores.redis_conversation import (
    PATIENCE,
    Command,
    Conversation,
    Interruption,
    Line,
    sources,
)

__all__ = ["Command", "RedisLink", "Script", "script"]


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script, called by its hash; its text is sent where the server lacks it (restart, failover)."""

    source: str
    sha: str

    @classmethod
    def of(cls, source: str) -> Script:
        made = cls(source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())
        sources[made.sha] = source
        return made

    def call(self, bucket: str, *args: str | int) -> Command:
        """The command that runs it on a bucket."""
        return ("EVALSHA", self.sha, 1, bucket, *args)


@cache
def script(name: str) -> Script:
    """The script ``lua/<name>.lua``, with what every script begins with before it."""
    folder = files("celery_once_fenced.stores") / "lua"
    return Script.of("".join((folder / f"{part}.lua").read_text("utf-8") for part in ("bucket", name)))


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
        self._lines = Connections(lambda: Line(make()), size=max_connections, wait=timeout / 2)
        self._password = str(options.get("password") or "")

    def ask(self, *commands: Command, again: Sequence[Command] = (), past_breaker: bool = False) -> list[Any]:
        """The answers to ``commands``, in one round trip.

        ``again`` is what to send the second time, where that is something else.  ``past_breaker``: ask even
        while the breaker is open (renewals).

        Raises ``StoreUnavailableError``: no answer in time, or an error as the answer.
        """
        return self._answers(self._begin(commands, again, past_breaker=past_breaker))

    def send(
        self, *commands: Command, again: Sequence[Command] = (), past_breaker: bool = False
    ) -> Callable[[], list[Any]]:
        """Send ``commands``; what is returned waits for the answers, and raises as :meth:`ask` does.

        It is to be called, and once: until then it keeps a connection.  Where few are left, the answers are waited for
        at once: who keeps one may need another, and renewals need theirs.
        """
        conversation = self._begin(commands, again, past_breaker=past_breaker)
        if self._lines.plenty:
            return partial(self._answers, conversation)
        answers = self._answers(conversation)
        return lambda: answers

    def _begin(
        self, commands: Sequence[Command], again: Sequence[Command], *, past_breaker: bool
    ) -> Conversation:
        if not (past_breaker or self.breaker.admits()):
            raise StoreUnavailableError("redis", "it gave no answer a moment ago and is not asked again yet")
        deadline = self._clock() + self._timeout
        try:
            line = self._lines.take()
        except NoneFreeError:  # that says nothing about the server
            raise StoreUnavailableError(
                "redis", "No connection available: all of this process are busy"
            ) from None
        conversation = Conversation(line, self._lines.give_back, self._timeout, self._clock)
        try:
            conversation.begin(commands, again or commands, deadline)
        except RedisError as error:
            raise self._unavailable(error) from error
        return conversation

    def close(self) -> None:
        """Close the connections.  Asking again opens new ones."""
        self._lines.close()

    def _answers(self, conversation: Conversation) -> list[Any]:
        try:
            answers = conversation.end()
        except RedisError as error:
            raise self._unavailable(error) from error
        self.breaker.succeeded()
        for answer in answers:
            if isinstance(answer, RedisError):
                raise self._unavailable(answer)
        return answers

    def _unavailable(self, error: RedisError) -> StoreUnavailableError:
        if isinstance(error, Interruption):
            self.breaker.failed()
        problem = (
            f"{type(error).__name__}: {error}"  # the driver drops the code, such as OOM, that tells which
        )
        return StoreUnavailableError(
            "redis", problem.replace(self._password, "***") if self._password else problem
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
