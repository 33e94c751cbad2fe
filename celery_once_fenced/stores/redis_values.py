"""How holds are written into Redis and read back: text with ``|`` between the fields, the readable key last.

The layout stands in ``lua/bucket.lua``; scripts compare encoded fields and never decode them.  What comes
back is untrusted: it may be anybody's, so nothing here raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celery_once_fenced.stores import Hold, Slot
from celery_once_fenced.stores.counters import HOLD_MAX

__all__ = [
    "MAX_TEXT",
    "MICROSECOND",
    "add_counters",
    "decode",
    "encode",
    "milliseconds",
    "number",
    "parse_hold",
    "parse_member",
]

MAX_TEXT = 100
"""Characters of the readable key that are stored with a hold."""
MICROSECOND = 1e-6
UNKNOWN = "?"


def encode(field: str) -> str:
    """A field as it is stored: no ``|`` in it."""
    if "|" in field or "%" in field:
        return field.replace("%", "%25").replace("|", "%7C")
    return field


def decode(field: str) -> str:
    """The inverse of ``encode``."""
    return field.replace("%7C", "|").replace("%25", "%") if "%" in field else field


def milliseconds(seconds: float) -> int:
    """A time to live for Redis: 0 for 0 or less, else at least 1 ms."""
    return max(1, round(seconds * 1000)) if seconds > 0 else 0


def parse_hold(slot: Slot, digest: str, value: object, left: object, name: str = "") -> Hold:
    """What a script says occupies a slot.  ``left``: milliseconds, negative where it would never lapse."""
    fields = str(value).split("|", 4 if slot == "q" else 6)
    if "%" in str(value):  # most have nothing to decode; the text, which comes last, never has
        fields[:-1] = map(decode, fields[:-1])
    seconds = max(number(left), 0) / 1000
    if slot == "q" and len(fields) == 5:
        holder, task_id, since, task, text = fields
        delivery, worker = holder, ""
    elif slot == "r" and len(fields) == 7:
        holder, task_id, delivery, since, worker, task, text = fields
    else:
        return Hold(slot, digest, UNKNOWN, "", "", 0.0, seconds, name=name)
    return Hold(
        slot=slot,
        digest=digest,
        holder=holder or UNKNOWN,
        task_id=task_id,
        delivery=delivery,
        since=number(since) * MICROSECOND,
        left=seconds,
        worker=worker,
        text=text[:MAX_TEXT],
        task=task,
        name=name,
    )


def parse_member(row: Sequence[Any]) -> Hold | None:
    """One line of ``list.lua``; None where the hold has gone or the line is none of ours."""
    _, member, value, left = row
    fields = str(member).split("|", 3)
    if value is None or len(fields) != 4:
        return None
    slot, name, digest, _ = fields
    return parse_hold("q" if slot == "q" else "r", digest, value, left, decode(name))


def add_counters(counters: dict[str, int], pairs: Sequence[str]) -> None:
    """Add the fields and values of one bucket, as ``stats.lua`` answers them, to those of the others."""
    for field, value in zip(pairs[::2], pairs[1::2], strict=True):
        if value.lstrip("-").isdecimal():
            counters[field] = _merge(field, counters.get(field, 0), int(value))


def _merge(field: str, one: int, other: int) -> int:
    return max(one, other) if field == HOLD_MAX else one + other


def number(text: object) -> int:
    """What should be a whole number, as one; 0 where it is none."""
    try:
        return int(str(text)[:19])
    except ValueError:
        return 0
