"""Canonical, typed bytes of one argument: equal for equal calls, different for different ones (rule K2).

A value is encoded *as the decoded message will hold it*, so that a producer, which has the caller's objects,
and a worker, which has what the serializer made of them, find the same bytes.  For JSON that means: a dict
key becomes text, a tuple a list, a subclass of ``int`` or ``str`` its plain value, an object with
``__json__`` what that returns.

Every encoding begins with a tag that names the type and says where it ends (a length, or ``;``), so encodings
can be joined without running together.  ``1``, ``"1"``, ``1.0``, ``True`` and ``None`` differ, and so do
``0.0`` and ``-0.0``, ``Decimal("1.0")`` and ``Decimal("1.00")``, and one instant written with two UTC
offsets: the encoding compares what is in the message, not what it means.  An ``Enum`` counts as its value.

Nothing is encoded by ``repr``, ``pickle`` or ``hash``, which change between runs, versions and machines.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Any
from uuid import UUID

from celery_once_fenced.wording import shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["UnencodableError", "encode", "encode_value", "scalars"]

MAX_DEPTH = 100
"""Nesting beyond this is refused; a fixed number, since the room left on the stack differs between two
processes."""


class UnencodableError(TypeError):
    """A value cannot be part of a key; ``path`` says where it sits, e.g. ``items[3]['owner']``."""

    def __init__(self, problem: str, path: str = "") -> None:
        super().__init__(problem, path)
        self.problem = problem
        self.path = path

    def __str__(self) -> str:
        return f"argument {self.path} {self.problem}"

    def within(self, step: str) -> UnencodableError:
        return UnencodableError(self.problem, shorten(step + self.path, 100))


def encode(value: object, *, json: bool, path: str) -> bytes:
    """Encode one argument.

    Args:
        value: What the call passes, or what the message held.
        json: Whether the task's serializer is JSON; others keep the types of dict keys and take sets.
        path: Name of the argument, for the error.

    Raises:
        UnencodableError: a ``TypeError`` that names the place, the type and the remedy.
    """
    try:
        return encode_value(value, json)
    except UnencodableError as error:
        raise error.within(path) from None


def encode_value(value: Any, json: bool, depth: int = 0) -> bytes:
    """``encode`` without a place in its error: what a derivation calls, until something is wrong."""
    scalar = _EXACT[json].get(type(value))
    return _encode_other(value, json, depth) if scalar is None else scalar(value)


def scalars(json: bool) -> Mapping[type, Callable[[Any], bytes]]:
    """How values of exactly these types are encoded, for a caller that looks them up by itself."""
    return _EXACT[json]


def _encode_other(value: Any, json: bool, depth: int) -> bytes:
    """Containers, objects and subclasses, in the order in which the JSON serializer looks at them."""
    if depth >= MAX_DEPTH:
        raise UnencodableError(f"contains itself, or is nested more than {MAX_DEPTH} levels deep")
    match value:
        case str():
            return _str(value, json)
        case int() | float():
            return _int(value) if isinstance(value, int) else _float(value)
        case list() | tuple():
            return _sequence(b"l", value, json, depth + 1)
        case dict():
            return _mapping(_json_object(value) if json else value, json, depth + 1)
    if json and not isinstance(value, type) and hasattr(value, "__json__"):
        return encode_value(value.__json__(), json, depth + 1)
    if json and _is_lazy_text(value):
        return _str(str(value), json)
    return _encode_object(value, json, depth)


def _encode_object(value: Any, json: bool, depth: int) -> bytes:
    for kind, scalar in _SCALARS.items():
        if isinstance(value, kind):
            return scalar(value)
    match value:
        case set() | frozenset():
            return _set(value, json, depth + 1)
        case Enum():
            return encode_value(value.value, json, depth + 1)
    if callable(getattr(value, "model_dump", None)) and not isinstance(value, type):
        return _model(value, json, depth + 1)
    if is_dataclass(value) and not isinstance(value, type):
        return _dataclass(value, json, depth + 1)
    raise UnencodableError(
        f"is a {type(value).__qualname__}, which has no stable value; pass its primary key or other plain "
        "data, or leave the argument out of the key (and of the fingerprint)"
    )


# --- scalars ------------------------------------------------------------------------------------------------


def _str(value: str, json: bool) -> bytes:
    return _EXACT[json][str](value)


def _text(value: str) -> bytes:
    try:
        data = str.encode(value)
    except UnicodeEncodeError:
        data = _surrogates(value, json=False)
    return b"s%d:%b" % (len(data), data)


def _json_text(value: str) -> bytes:
    try:
        data = str.encode(value)
    except UnicodeEncodeError:
        data = _surrogates(value, json=True)
    return b"s%d:%b" % (len(data), data)


def _surrogates(value: str, json: bool) -> bytes:
    if json:  # It writes \ud83d\ude00 for such a pair, and reads back the one character it stands for.
        value = str.encode(value, "utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    return str.encode(value, "utf-8", "surrogatepass")


def _int(value: int) -> bytes:
    return b"i%x;" % value  # Hexadecimal: Python limits the digits of a decimal conversion.


def _float(value: float) -> bytes:
    return b"d%b;" % float.hex(value).encode()


def _framed(tag: bytes, data: bytes) -> bytes:
    return b"%b%d:%b" % (tag, len(data), data)


_SCALARS: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda _: b"n",
    bool: lambda value: b"t" if value else b"f",
    int: _int,
    float: _float,
    # As kombu looks: datetime before date, which it is a subclass of.
    datetime: lambda value: _framed(b"T", datetime.isoformat(value).encode()),
    date: lambda value: _framed(b"D", date.isoformat(value).encode()),
    time: lambda value: _framed(b"C", time.isoformat(value).encode()),
    Decimal: lambda value: _framed(b"N", Decimal.__str__(value).encode()),
    UUID: lambda value: b"u" + value.bytes,
    bytes: lambda value: _framed(b"b", value),
    bytearray: lambda value: _framed(b"b", bytes(value)),
    timedelta: lambda value: b"m%x;" % (value // timedelta(microseconds=1)),
}
_EXACT = {False: {**_SCALARS, str: _text}, True: {**_SCALARS, str: _json_text}}
"""By the type itself and whether the serializer is JSON: most arguments are one of these."""


# --- containers ---------------------------------------------------------------------------------------------


def _sequence(tag: bytes, value: Iterable[Any], json: bool, depth: int) -> bytes:
    parts = _items(value, json, depth)
    return b"%b%d:%b" % (tag, len(parts), b"".join(parts))


def _set(value: Iterable[Any], json: bool, depth: int) -> bytes:
    if json:
        raise UnencodableError("is a set, which JSON cannot carry; pass a sorted list")
    parts = sorted(_items(value, json, depth))
    return b"e%d:%b" % (len(parts), b"".join(parts))


def _items(value: Iterable[Any], json: bool, depth: int) -> list[bytes]:
    parts: list[bytes] = []
    try:
        for item in value:
            parts.append(encode_value(item, json, depth))  # noqa: PERF401 - counts for the error
    except UnencodableError as error:
        raise error.within(f"[{len(parts)}]") from None
    return parts


def _mapping(value: Mapping[Any, Any], json: bool, depth: int) -> bytes:
    pairs = []
    for key, item in value.items():
        try:
            pairs.append((encode_value(key, json, depth), encode_value(item, json, depth)))
        except UnencodableError as error:
            raise error.within(f"[{key!r}]" if isinstance(key, str | int) else "[…]") from None
    pairs.sort()
    return b"o%d:%b" % (len(pairs), b"".join(part for pair in pairs for part in pair))


def _json_object(value: Mapping[Any, Any]) -> dict[str, Any]:
    """The dict with the keys that JSON gives it; of two that become one the later wins, as it does there."""
    found = {key if type(key) is str else _json_key(key): item for key, item in value.items()}
    if found.keys() == {"__type__", "__value__"}:
        raise UnencodableError(
            "is a dict of '__type__' and '__value__', the serializer's own marker; rename one"
        )
    return found


def _json_key(key: object) -> str:
    match key:
        case str():
            return str.__str__(key)
        case True | False | None:
            return {True: "true", False: "false", None: "null"}[key]
        case int():
            return int.__repr__(key)
        case float():
            return _json_float(key)
    raise UnencodableError(
        f"has a dict key of type {type(key).__name__}, which JSON cannot carry; use text keys"
    )


def _json_float(key: float) -> str:
    names = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
    text = float.__repr__(key)
    return names.get(text, text)


# --- objects ------------------------------------------------------------------------------------------------


def _is_lazy_text(value: object) -> bool:
    """Django's lazy translations, by name: the core never imports Django."""
    return any(
        (k.__module__, k.__name__) == ("django.utils.functional", "Promise") for k in type(value).__mro__
    )


def _model(value: Any, json: bool, depth: int) -> bytes:
    """A pydantic model: as Celery's ``pydantic=True`` puts it into a JSON message, else class and fields."""
    if json:
        return encode_value(value.model_dump(mode="json"), json, depth)
    return _class_of(value) + _mapping(value.model_dump(), json, depth)


def _dataclass(value: Any, json: bool, depth: int) -> bytes:
    content = _mapping({field.name: getattr(value, field.name) for field in fields(value)}, json, depth)
    return content if json else _class_of(value) + content


def _class_of(value: object) -> bytes:
    """A serializer that keeps objects can tell a Created(7) from a Deleted(7), so the key does too."""
    kind = type(value)
    return _framed(b"O", f"{kind.__module__}.{kind.__qualname__}".encode())
