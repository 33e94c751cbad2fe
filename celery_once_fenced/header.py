"""The message header ``once_fenced``: what a call knew about its key, shipped to the worker (K4).

It holds digests and ids, never arguments beyond the readable key.  A worker takes it as it takes the rest of the
message, but checks its form: a header it cannot read counts as missing, and then the key is derived again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from celery_once_fenced.keys import Key

__all__ = ["HEADER", "Header"]

HEADER = "once_fenced"

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
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
        if not isinstance(raw, Mapping):
            return None
        delivery = _text(raw, "id")
        return cls(
            key=_key(raw),
            fingerprint=_digest(raw, "fp"),
            delivery=delivery,
            run=_text(raw, "run") or delivery,
            awaited=raw.get("awaited") is True,
            deferrals=_count(raw, "n"),
            republished=_count(raw, "again"),
            answer_from=_text(raw, "from"),
            bypass=raw.get("bypass") is True,
            packed=raw.get("packed") is True,
            seq=_count(raw, "seq"),
            waiting_since=_count(raw, "since"),
            once_key=_text(raw, "once_key") or None,
        )


def _text(raw: Mapping[str, object], name: str) -> str:
    value = raw.get(name)
    return value if isinstance(value, str) else ""


def _count(raw: Mapping[str, object], name: str) -> int:
    value = raw.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def _digest(raw: Mapping[str, object], name: str) -> str | None:
    value = _text(raw, name)
    return value if _DIGEST.fullmatch(value) else None


def _key(raw: Mapping[str, object]) -> Key | None:
    digest = _digest(raw, "key")
    return Key(digest, _text(raw, "text")[:255]) if digest else None
