"""The message header ``once_fenced``: what a call knew about its key, shipped to the worker (K4).

It holds digests and ids, never arguments beyond the readable key.  A worker takes it as it takes the rest of the
message, but checks its form: a header it cannot read counts as missing, and then the key is derived again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from celery_once_fenced.keys import Key
from celery_once_fenced.record import record

__all__ = ["HEADER", "Header"]

HEADER = "once_fenced"

_DIGEST = re.compile(r"[0-9a-f]{64}")


@record(frozen=True, slots=True, kw_only=True)
class Header:
    """One published message.  ``delivery`` is kept by redelivery and deferral, ``run`` also by retries."""

    key: Key | None = None
    fingerprint: str | None = None
    delivery: str = ""
    run: str = ""
    awaited: bool = False
    deferrals: int = 0
    republished: int = 0
    answer_from: str = ""
    bypass: bool = False
    packed: bool = False
    """A stored message names its delivery before it is published, so that the second publishing is recognised (L9)."""
    seq: int = 0
    """Number of the call under ``replace`` and ``keep_last`` (E13)."""
    waiting_since: int = 0
    """When it began to wait for its turn (D3)."""
    once_key: str | None = None
    """Only for a signature sent by name: the worker derives the key from it (E16)."""

    def dump(self) -> dict[str, Any]:
        """As a JSON object, without what is empty."""
        fields = {
            "key": self.key.digest if self.key else None,
            "text": self.key.text if self.key else None,
            "fp": self.fingerprint,
            "id": self.delivery,
            "run": self.run if self.run != self.delivery else "",
            "awaited": self.awaited,
            "n": self.deferrals,
            "again": self.republished,
            "from": self.answer_from,
            "bypass": self.bypass,
            "packed": self.packed,
            "seq": self.seq,
            "since": self.waiting_since,
            "once_key": self.once_key,
        }
        return {name: value for name, value in fields.items() if value}

    @classmethod
    def parse(cls, raw: object) -> Header | None:
        """The header of a message, or None when there is none or it is not of this form."""
        if not isinstance(raw, dict | Mapping):
            return None
        said = {_READERS[name][0]: _READERS[name][1](raw[name]) for name in raw if name in _READERS}
        digest, text = said.pop("digest", None), said.pop("text", "")
        said["run"] = said.get("run") or said.get("delivery", "")
        return cls(key=Key(digest, text[:255]) if digest else None, **said)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def _flag(value: object) -> bool:
    return value is True


def _digest(value: object) -> str | None:
    return value if isinstance(value, str) and _DIGEST.fullmatch(value) else None


_READERS: Mapping[str, tuple[str, Callable[[object], Any]]] = {
    "key": ("digest", _digest),
    "text": ("text", _text),
    "fp": ("fingerprint", _digest),
    "id": ("delivery", _text),
    "run": ("run", _text),
    "awaited": ("awaited", _flag),
    "n": ("deferrals", _count),
    "again": ("republished", _count),
    "from": ("answer_from", _text),
    "bypass": ("bypass", _flag),
    "packed": ("packed", _flag),
    "seq": ("seq", _count),
    "since": ("waiting_since", _count),
    "once_key": ("once_key", lambda value: _text(value) or None),
}
"""What a message may say, which field that is, and how it is read: what is of another form counts as not said."""
