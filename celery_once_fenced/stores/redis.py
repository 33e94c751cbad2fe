"""The efficiency tier's leases in Redis or Valkey: each operation is one script of ``lua/``, one round trip.

The protocol stands in those scripts, in ``lua/bucket.lua`` first; here questions become arguments,
replies answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Any

from celery_once_fenced.errors import ConfigError, StoreUnavailableError
from celery_once_fenced.policy import Span
from celery_once_fenced.stores import (
    Confirm,
    Defer,
    Deferred,
    End,
    Enqueue,
    Enqueued,
    Renewal,
    Settle,
    Slot,
    Start,
    Started,
)
from celery_once_fenced.stores.counters import hold_field
from celery_once_fenced.stores.redis_link import Command, RedisLink, Script, script
from celery_once_fenced.stores.redis_listing import RedisListing
from celery_once_fenced.stores.redis_values import MAX_TEXT, encode, milliseconds, number, parse_hold

__all__ = ["RedisLeaseStore"]

AGAIN: Command = ("1",)
"""What end and release are told when they are asked a second time for want of an answer."""
_GRANTED = Enqueued(True)
RENEWED_AT_ONCE = 500
"""Leases in one command: Lua takes no more than some thousands of arguments."""


class RedisLeaseStore(RedisListing):
    """``LeaseStore`` on one Redis or Valkey.  Connects when first used; for many threads, and across forks.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.
        namespace: First part of every key; two applications with one namespace share their leases.
        socket_timeout: Seconds for one operation, the second sending included (E2).
        connect_timeout: Seconds for making a connection.
        max_connections: Per process; more threads than that wait for one, within the timeout.
        clock: Monotonic seconds, for deadlines and the breaker.

    Raises:
        ConfigError: the URL or the namespace cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str,
        socket_timeout: float = 0.5,
        connect_timeout: float = 1.0,
        max_connections: int = 50,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not namespace or "{" in namespace or "}" in namespace:
            raise ConfigError(
                f"namespace must be a text without braces, not {namespace!r}: braces place keys in a cluster"
            )
        self._namespace = namespace
        self._link = RedisLink(
            url,
            timeout=socket_timeout,
            connect_timeout=connect_timeout,
            max_connections=max_connections,
            clock=clock,
        )

    # --- the life of a call ---------------------------------------------------------------------------------

    def enqueue(self, ask: Enqueue) -> Enqueued:
        return self.begin_enqueue([ask])()[0]

    def enqueue_many(self, asks: Sequence[Enqueue]) -> list[Enqueued]:
        return self.begin_enqueue(asks)()

    def begin_enqueue(self, asks: Sequence[Enqueue]) -> Callable[[], list[Enqueued]]:
        if not asks or not _asks_when_queued(asks[0].span):
            return lambda: [_GRANTED for _ in asks]
        answers = self._link.send(*map(self._enqueue, asks))
        return lambda: [_enqueued(ask, answer) for ask, answer in zip(asks, answers(), strict=True)]

    def _enqueue(self, ask: Enqueue) -> Command:
        digest = ask.key.digest
        return self._script("enqueue").call(
            self._bucket(digest),
            digest,
            encode(ask.task),
            _flags(ask.span),
            ask.mode,
            encode(ask.delivery),
            encode(ask.task_id),
            milliseconds(ask.hold) or 1,
            ask.key.text[:MAX_TEXT],
            milliseconds(ask.patience),
            *((ask.seq or "", ask.call) if ask.span.ordered else ()),
        )

    def confirm(self, ask: Confirm) -> None:
        digest = ask.key.digest
        self._run("confirm", digest, digest, encode(ask.delivery), int(ask.published))

    def defer(self, ask: Defer) -> Deferred:
        digest = ask.key.digest
        what, waiters, since = self._run(
            "defer",
            digest,
            digest,
            encode(ask.task),
            _flags(ask.span),
            encode(ask.delivery),
            milliseconds(ask.hold) or 1,
            "" if ask.limit is None else ask.limit,
            ask.since or "",
            milliseconds(ask.believed) or 1,
            ask.resource,
        )
        return Deferred(what == "overflow", waiters, number(since))

    def start(self, ask: Start) -> Started:
        digest = ask.key.digest
        answer = self._run(
            "start",
            digest,
            digest,
            encode(ask.slot),
            encode(ask.task),
            _flags(ask.span),
            encode(ask.delivery),
            encode(ask.holder),
            encode(ask.task_id),
            encode(ask.worker),
            milliseconds(ask.lease) or 1,
            int(ask.redelivery),
            ask.key.text[:MAX_TEXT],
            ask.waiting_since or "",
            *((ask.seq or "", milliseconds(ask.remembered) or 1) if ask.span.ordered else ()),
        )
        return _started(ask, *answer)

    def renew(self, asks: Sequence[Renewal]) -> list[bool]:
        alike: dict[tuple[str, str, float], list[int]] = {}
        for i, ask in enumerate(asks):
            alike.setdefault((ask.digest[:1], ask.task, ask.lease), []).append(i)
        batches = [
            places[first : first + RENEWED_AT_ONCE]
            for places in alike.values()
            for first in range(0, len(places), RENEWED_AT_ONCE)
        ]
        if not batches:
            return []
        commands = [self._renewal([asks[i] for i in places]) for places in batches]
        answers = self._link.ask(*commands, past_breaker=True)
        renewed = dict(zip(chain(*batches), chain(*answers), strict=True))
        return [renewed[i] == 1 for i in range(len(asks))]

    def _renewal(self, asks: Sequence[Renewal]) -> Command:
        """Of leases of one bucket, task and length."""
        first, parts = asks[0], []
        for ask in asks:
            parts += [ask.digest, "" if ask.slot == ask.digest else encode(ask.slot), encode(ask.holder)]
        bucket, lease = self._bucket(first.digest), milliseconds(first.lease) or 1
        return self._script("renew").call(bucket, encode(first.task), lease, *parts)

    def end(self, ask: End) -> bool:
        digest = ask.key.digest
        answer = self._run(
            "end",
            digest,
            digest,
            encode(ask.slot),
            encode(ask.task),
            encode(ask.delivery),
            encode(ask.holder),
            encode(ask.task_id),
            milliseconds(ask.mark),
            milliseconds(ask.requeue),
            "" if ask.held is None else hold_field(ask.held),
            milliseconds(ask.held or 0),
            ask.counter if ask.entered else f"{ask.counter} not_entered",
            ask.key.text[:MAX_TEXT],
            ask.seq or "",
            int(ask.freed),
            again=AGAIN,
        )
        return bool(answer == 1)

    def settle(self, ask: Settle) -> None:
        digest = ask.key.digest
        more = (digest, ask.seq or "", ask.waiting_since or "") if ask.seq or ask.waiting_since else ()
        self._run("settle", digest, encode(ask.delivery), milliseconds(ask.window), *more)

    def release(self, digest: str, slot: Slot, holder: str, name: str = "", *, by_hand: bool = False) -> bool:
        answer = self._run(
            "release", digest, digest, slot, encode(name or digest), encode(holder), int(by_hand), again=AGAIN
        )
        return bool(answer == 1)

    def was_freed(self, digest: str, holder: str) -> bool:
        return bool(self._link.ask(("EXISTS", f"{self._bucket(digest)}freed:{encode(holder)}"))[0] == 1)

    # --- for people and metrics -----------------------------------------------------------------------------

    def count(self, digest: str, task: str, counter: str, times: int = 1) -> None:
        self._run("count", digest, encode(task), counter, times)

    def server_version(self) -> str | None:
        """``valkey 9.1.0`` or ``redis 7.2.4``; None when the server does not say."""
        info = self._info("server")
        if "valkey_version" in info:
            return f"valkey {info['valkey_version']}"
        return f"redis {info['redis_version']}" if "redis_version" in info else None

    def server_clock(self) -> float:
        """Unix time by the server's clock."""
        seconds, microseconds = self._link.ask(("TIME",))[0]
        return int(seconds) + int(microseconds) / 1_000_000

    def maxmemory_policy(self) -> str | None:
        """What the server does when it is full; None when it cannot be read.

        Anything but ``noeviction`` loses leases (E19).
        """
        return self._info("memory").get("maxmemory_policy")

    def close(self) -> None:
        self._link.close()

    # --- wire -----------------------------------------------------------------------------------------------

    def _script(self, name: str) -> Script:
        return script(name)

    def _run(self, name: str, digest: str, *args: str | int, again: Command = ()) -> Any:
        command = self._script(name).call(self._bucket(digest), *args)
        return self._link.ask(command, again=[command + again] if again else ())[0]

    def _info(self, section: str) -> dict[str, str]:
        try:
            text = str(self._link.ask(("INFO", section))[0])
        except StoreUnavailableError:
            return {}
        return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


@cache
def _flags(span: Span) -> str:
    return span.flags


def _asks_when_queued(span: Span) -> bool:
    """False for while_executing: nothing to be refused by, nothing to take, no round trip."""
    return span.refused_by_q or span.refused_by_r or span.sets_q


def _enqueued(ask: Enqueue, answer: Any) -> Enqueued:
    if answer == 1:
        return _GRANTED
    what, count, *hold = answer
    by = parse_hold(hold[0], ask.key.digest, *hold[1:3]) if hold else None
    if what == "refused":
        return Enqueued(False, by, times=number(count), repeated_for=hold[3] / 1000)
    return Enqueued(what == "granted", by, kept=what == "kept", seq=number(count))


def _started(
    ask: Start, what: Any, wait: int, slot: str = "", value: str = "", seq: str = "", call: str = ""
) -> Started:
    if not slot:
        return Started(what, wait=wait / 1000, seq=number(seq), call=call, queued_since=number(value))
    digest = ask.key.digest
    name = "" if slot == "q" or ask.slot == digest else ask.slot
    return Started(what, parse_hold("q" if slot == "q" else "r", digest, value, wait, name), wait / 1000)
