"""What people and metrics ask of Redis: who holds what, in pages, and what was counted.  Sixteen buckets, one answer.

The index of each bucket is a sorted set by expiry; a page is merged from sixteen of them.  No script looks at more than
a few hundred members, so that none keeps the server from others for long, and a search for something rare stops after
``SEARCH_SECONDS`` and says how far it came.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from celery_once_fenced.stores.hold import Hold
from celery_once_fenced.stores.listing import (
    HOURLY,
    HOURS,
    Census,
    Cursor,
    HoldPage,
    HoldQuery,
    Hours,
    Listed,
    Surroundings,
    TaskCensus,
    Waiters,
)
from celery_once_fenced.stores.redis_link import Command, RedisLink, script
from celery_once_fenced.stores.redis_values import (
    MICROSECOND,
    add_counters,
    decode,
    encode,
    number,
    parse_hold,
    parse_member,
)

__all__ = ["BUCKETS", "RedisListing"]

BUCKETS = "0123456789abcdef"
PAGE = 300
"""Holds that one script lists: a millisecond of a Redis that others use, too."""
LOOKED_AT = 500
"""Members of an index that one script of a search looks at: a few milliseconds."""
COUNTED = 2000
"""Members that one script of the census counts."""
SEARCH_SECONDS = 0.15


class RedisListing:
    """The reading half of ``RedisLeaseStore``."""

    _namespace: str
    _link: RedisLink

    def look(self, digest: str) -> list[Hold]:
        (found,) = self._link.ask(script("look").call(self._bucket(digest), digest))
        return [parse_hold(slot, digest, value, left) for slot, value, left in found]

    def surroundings(self, digest: str) -> Surroundings:
        (told,) = self._link.ask(script("surroundings").call(self._bucket(digest), digest))
        waiting, since, refused, kept, started, unconfirmed, displaced, resource, own = told
        newest = parse_hold("q", digest, started, 0) if started else None
        return Surroundings(
            waiting=waiting,
            waiting_since=number(since) / 1000 if since else None,
            refused=number(refused[0]),
            refused_since=number(refused[1]) / 1000 or None,
            kept_at=number(kept) * MICROSECOND or None,
            newest_task=newest.task_id if newest else "",
            newest_at=newest.since if newest else None,
            unconfirmed=decode(unconfirmed),
            displaced_task=parse_hold("q", digest, displaced, 0).task_id if displaced else "",
            resource=resource,
            queued_waits=bool(own),
        )

    def waiters(self, resource: str) -> Waiters:
        told = [bucket[0] for bucket in self._of_all("waiters", resource, "")]
        since = [number(first) / 1000 for some, first in told if some]
        return Waiters(sum(some for some, _ in told), min(since, default=None))

    def waiting(self, fences: Sequence[tuple[str, str]]) -> list[int]:
        asked = [part for fence in fences for part in fence]
        buckets = self._of_all("waiters", *asked) if asked else []
        return [sum(some for some, _ in told) for told in zip(*buckets, strict=True)]

    def holds(self) -> Iterator[Hold]:
        readers = [_Reader(self._bucket(digit)) for digit in BUCKETS]
        while readers:
            pages = self._link.ask(*(reader.command() for reader in readers))
            for reader, page in zip(readers, pages, strict=True):
                yield from reader.take(page)
            readers = [reader for reader in readers if not reader.through]

    def page(
        self, query: HoldQuery, size: int, cursor: Cursor | None = None, *, back: bool = False
    ) -> HoldPage:
        readers = [_Bucket(self._bucket(digit), cursor, cursor) for digit in BUCKETS]
        deadline = time.monotonic() + SEARCH_SECONDS
        while asked := _unread(readers, size, back):
            commands = [reader.command(query, size, back) for reader in asked]
            for reader, answer in zip(asked, self._link.ask(*commands), strict=True):
                reader.take(answer, back)
            if time.monotonic() > deadline:
                break
        return _merged(readers, size, back)

    def census(self, seconds: float | None = None) -> Census:
        census, counted = script("census"), _Counted()
        ranks = dict.fromkeys(BUCKETS, 0)
        deadline = None if seconds is None else time.monotonic() + seconds
        while ranks:
            commands = [census.call(self._bucket(digit), rank, COUNTED) for digit, rank in ranks.items()]
            answers = self._link.ask(*commands)
            for digit, (rank, members, *rows) in zip(tuple(ranks), answers, strict=True):
                counted.add(rows)
                counted.members[digit] = members
                ranks[digit] = rank
            ranks = {digit: rank for digit, rank in ranks.items() if rank >= 0}
            if deadline is not None and time.monotonic() > deadline:
                break
        return counted.census(whole=not ranks)

    def stats(self) -> Mapping[str, Mapping[str, int]]:
        total: dict[str, dict[str, int]] = {}
        for bucket in self._of_all("stats"):
            for task, pairs in bucket:
                add_counters(total.setdefault(decode(task), {}), pairs)
        return total

    def hours(self) -> Mapping[str, Hours]:
        total: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (HOURS * len(HOURLY)))
        for _, *rows in self._of_all("hours", HOURS, *HOURLY):
            for task, numbers in rows:
                counted = total[decode(task)]
                for place, text in enumerate(numbers.split(",")):
                    counted[place] += int(text) if text.isdecimal() else 0
        return {
            task: {counter: counted[place :: len(HOURLY)] for place, counter in enumerate(HOURLY)}
            for task, counted in total.items()
        }

    def _of_all(self, name: str, *args: str | int) -> Sequence[Any]:
        called = script(name)
        return self._link.ask(*(called.call(self._bucket(digit), *args) for digit in BUCKETS))

    def _bucket(self, digest: str) -> str:
        return f"{{{self._namespace}:{digest[:1]}}}:"


@dataclass
class _Reader:
    """How far a bucket has been read, where all its holds are wanted."""

    bucket: str
    through: bool = False
    score: str = "-inf"
    skip: int = 0
    """How many members at that score are known."""
    seen: set[str] = field(default_factory=set)
    """A renewal moves a member on, to where it would be met again."""

    def command(self) -> Command:
        return script("list").call(self.bucket, self.score, self.skip, PAGE)

    def take(self, answer: Sequence[Any]) -> Iterator[Hold]:
        members, last, same, *rows = answer
        self.through = members < PAGE
        self.skip = same + (self.skip if last == self.score else 0)
        self.score = last
        for row in rows:
            left, slot, name, digest, task, value = row.split("|", 5)
            hold = parse_hold(slot, digest, value, left, decode(name))
            member = f"{slot}|{name}|{digest}|{task}"
            if hold.task == decode(task) and member not in self.seen:
                self.seen.add(member)
                yield hold


@dataclass
class _Bucket:
    """How far a page has read in one bucket."""

    name: str
    frontier: Cursor | None
    """What lies before it is known; None before the first answer without a cursor."""
    began: Cursor | None
    """Where the page begins.  In the millisecond of its expiry each bucket starts anew: what it met before is left out."""
    found: list[Listed] = field(default_factory=list)
    through: bool = False
    members: int = 0

    def command(self, query: HoldQuery, size: int, back: bool) -> Command:
        score, member = (
            ("", "") if self.frontier is None else (f"{self.frontier.expiry:.0f}", self.frontier.member)
        )
        return script("page").call(
            self.name,
            "prev" if back else "next",
            score,
            member,
            size // 8 + 1,  # twice its share
            LOOKED_AT,
            query.slot,
            _tasks(query),
            encode(query.worker),
            _lower(encode(query.text)),
            int(query.waited),
            _lower(query.text),  # the key comes last in a value, and is stored as it is
        )

    def take(self, answer: Sequence[Any], back: bool) -> None:
        self.members, score, member, *rows = answer
        listed = [found for row in rows if (found := _listed(row)) is not None]
        self.found += [found for found in listed if _is_beyond(found.at, self.began, back)]
        self.through = score is None
        if not self.through:
            self.frontier = Cursor(float(score), str(member))


def _is_beyond(at: Cursor, began: Cursor | None, back: bool) -> bool:
    if began is None:
        return True
    return at < began if back else at > began


def _listed(row: Sequence[Any]) -> Listed | None:
    score, member, *_, waiting = row
    hold = parse_member(row[:4])
    return None if hold is None else Listed(hold, Cursor(float(score), str(member)), waiting)


def _tasks(query: HoldQuery) -> str:
    """One per line; an empty line for none at all."""
    if query.before is None:
        return "" if query.tasks is None else "\n".join(map(encode, sorted(query.tasks))) or "\n"
    wanted = {name: at for name, at in query.before.items() if query.tasks is None or name in query.tasks}
    return "\n".join(f"{encode(name)}|{at / MICROSECOND:.0f}" for name, at in sorted(wanted.items())) or "\n"


def _lower(text: str) -> str:
    """As Lua's ``lower`` does it: ASCII letters only."""
    return "".join(character.lower() if character.isascii() else character for character in text)


def _unread(readers: Sequence[_Bucket], size: int, back: bool) -> list[_Bucket]:
    """The buckets that may still have something for the page."""
    known = sorted((listed.at for reader in readers for listed in reader.found), reverse=back)
    end = known[size - 1] if len(known) >= size else None

    def open_(reader: _Bucket) -> bool:
        if reader.through or end is None or reader.frontier is None:
            return not reader.through
        return reader.frontier > end if back else reader.frontier < end

    return [reader for reader in readers if open_(reader)]


def _merged(readers: Sequence[_Bucket], size: int, back: bool) -> HoldPage:
    found = sorted(
        (listed for reader in readers for listed in reader.found), key=lambda listed: listed.at, reverse=back
    )
    stopped = None
    if unread := [reader.frontier for reader in _unread(readers, size, back) if reader.frontier is not None]:
        stopped = max(unread) if back else min(unread)
        found = [listed for listed in found if (listed.at >= stopped if back else listed.at <= stopped)]
    page = found[:size]
    return HoldPage(page[::-1] if back else page, sum(reader.members for reader in readers), stopped)


class _Counted:
    def __init__(self) -> None:
        self._tasks: defaultdict[str, TaskCensus] = defaultdict(TaskCensus)
        self._workers: set[str] = set()
        self.members: dict[str, int] = {}
        """Of each bucket, holds that may have lapsed included."""

    def add(self, rows: Sequence[Any]) -> None:
        for kind, name, *numbers in rows:
            if kind == "worker":
                self._workers.add(decode(name))
            else:
                self._add(kind, decode(name), int(numbers[0]), int(numbers[1]) / 1_000_000)

    def _add(self, slot: str, task: str, number: int, since: float) -> None:
        known = self._tasks[task]
        if slot == "q":
            self._tasks[task] = replace(known, queued=known.queued + number)
        else:
            oldest = min(since or float("inf"), known.oldest or float("inf"))
            known_at = None if oldest == float("inf") else oldest
            self._tasks[task] = replace(known, running=known.running + number, oldest=known_at)

    def census(self, *, whole: bool) -> Census:
        tasks = dict(self._tasks) if whole else self._reckoned()
        return Census(tasks, sorted(self._workers - {""}), whole)

    def _reckoned(self) -> dict[str, TaskCensus]:
        """What was not counted is taken to be queued, by the same tasks in the same shares."""
        running = sum(task.running for task in self._tasks.values())
        queued = sum(task.queued for task in self._tasks.values())
        share = max(1.0, (sum(self.members.values()) - running) / max(queued, 1))
        return {name: replace(task, queued=round(task.queued * share)) for name, task in self._tasks.items()}
