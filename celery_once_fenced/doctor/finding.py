"""What an examination finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "named"]

SHOWN = 5


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, and what to do about it, as sentences without their end."""

    id: str
    """``E…``: a promise is broken; ``W…``: it may come as a surprise.  Django's checks have it as ``once_fenced.<id>``."""
    text: str
    remedy: str

    @property
    def level(self) -> Literal["error", "warning"]:
        return "error" if self.id.startswith("E") else "warning"

    def __str__(self) -> str:
        return f"{self.id} {self.text}: {self.remedy}"


def named(names: Sequence[str]) -> str:
    """A list of tasks, for a sentence: a few of them, and how many more."""
    shown, more = names[:SHOWN], len(names) - SHOWN
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")
