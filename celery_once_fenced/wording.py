"""How the package shows values and names to people: shortened, in one line, and safe to print, split and
store.

What comes out is for reading only; no decision is ever made from it (rule K3).
"""

from __future__ import annotations

from difflib import get_close_matches
from enum import Enum
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["counted", "did_you_mean", "lasting", "listed", "readable", "safe", "shorten"]

MAX_VALUE = 80
MAX_ITEMS = 5
MAX_DEPTH = 3
_PLAIN_INT = 10**18
_PLAIN = frozenset({bool, float, type(None)})
_LARGE = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """``"; did you mean 'lease'?"``, or nothing where no known word is close."""
    close = get_close_matches(str(word), list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def listed(words: Iterable[str]) -> str:
    """``'a', 'b' or 'c'``."""
    quoted = [repr(word) for word in words]
    return " or ".join(filter(None, [", ".join(quoted[:-1]), *quoted[-1:]]))


def counted(number: int, noun: str, many: str = "") -> str:
    """``1 run``, ``2 runs``; ``many``: a plural that is not made with an s."""
    return f"{number} {noun if number == 1 else many or noun + 's'}"


@lru_cache(maxsize=1024)
def lasting(seconds: float) -> str:
    """A duration as people say it, to two or three digits: ``45 ms``, ``2.5 s``, ``3 min 20 s``, ``1 h 5 min``, ``2 d``."""
    if seconds < 0:
        return f"-{lasting(-seconds)}"
    if round(seconds * 1000) < 1000:
        return f"{seconds * 1000:.3g} ms"
    if round(seconds, 1) < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    for size, name, part, parts in _LARGE:
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {name}" + (f" {rest} {parts}" if rest else "")
    raise AssertionError("60 s and more are minutes at least")


def shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def safe(text: str) -> str:
    """Escape what would break a line, a terminal, UTF-8 or the store's ``|``-separated fields."""
    if text.isprintable() and "|" not in text:
        return text
    return "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    if character == "|":
        return r"\x7c"
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def readable(value: object) -> str:
    """One value in at most ``MAX_VALUE`` safe characters.  Never raises, whatever the value does."""
    kind = type(value)
    if kind is int and -_PLAIN_INT < value < _PLAIN_INT:  # type: ignore[operator]  # an int
        return str(value)
    if kind in _PLAIN:
        return str(value)
    try:
        text = shorten(value if kind is str else _shown(value, MAX_DEPTH), MAX_VALUE)  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - the value's own code runs here, and a text must not fail a call
        text = f"<{kind.__name__}>"
    return text if text.isprintable() and "|" not in text else shorten(safe(text), MAX_VALUE)


def _shown(value: object, depth: int) -> str:
    match value:
        case str():
            return str.__str__(value)[: MAX_VALUE + 1]
        case bytes():
            return value[:MAX_VALUE].decode("ascii", "backslashreplace")
        case dict() | list() | tuple() | set() | frozenset():
            return _shown_container(value, depth) if depth else "…"
        case Enum():
            return _shown(value.value, depth)
    shown = str(value)
    return shown if "object at 0x" not in shown else f"<{type(value).__name__}>"


def _shown_container(value: Iterable[object], depth: int) -> str:
    if isinstance(value, dict):
        pairs = [
            f"{_shown(k, depth - 1)}:{_shown(v, depth - 1)}" for k, v in islice(value.items(), MAX_ITEMS)
        ]
        return "{" + ",".join(sorted(pairs)) + "}"
    items = [_shown(item, depth - 1) for item in islice(value, MAX_ITEMS)]
    if isinstance(value, set | frozenset):
        return "{" + ",".join(sorted(items)) + "}"
    return "[" + ",".join(items) + "]"
