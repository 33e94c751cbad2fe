"""Canonical, typed bytes of one argument: equal for equal calls, different for different ones (rule K2).

A value is encoded *as the decoded message will hold it*, so that a producer, which has the caller's objects, and a
worker, which has what the serializer made of them, find the same bytes.  For JSON that means: a dict key becomes
text, a tuple a list, a subclass of ``int`` or ``str`` its plain value, an object with ``__json__`` what that returns.

Every encoding begins with a tag that names the type and says where it ends (a length, or ``;``), so encodings can be
joined without running together.  ``1``, ``"1"``, ``1.0``, ``True`` and ``None`` differ, and so do ``0.0`` and
``-0.0``, ``Decimal("1.0")`` and ``Decimal("1.00")``, and one instant written with two UTC offsets: the encoding
compares what is in the message, not what it means.  An ``Enum`` counts as its value.

Nothing is encoded by ``repr``, ``pickle`` or ``hash``, which change between runs, versions and machines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

__all__ = ["Unencodable", "encode"]

MAX_DEPTH = 100
"""Nesting beyond this is refused; a fixed number, since the room left on the stack differs between two processes."""

_Encoder = Callable[[Any, bool, int], bytes]


class Unencodable(TypeError):
    """A value cannot be part of a key; ``path`` says where it sits, e.g. ``items[3]['owner']``."""

    def __init__(self, problem: str, path: str = "") -> None:
        super().__init__(problem, path)
        self.problem = problem
        self.path = path

    def __str__(self) -> str:
        return f"argument {self.path} {self.problem}"

    def within(self, step: str) -> Unencodable:
        return Unencodable(self.problem, step + self.path)


def encode(value: object, *, json: bool, path: str) -> bytes:
    """Encode one argument.

    Args:
        value: What the call passes, or what the message held.
        json: Whether the task's serializer is JSON; others keep the types of dict keys and take sets.
        path: Name of the argument, for the error.

    Raises:
        Unencodable: a ``TypeError`` that names the place, the type and the remedy.
    """
    try:
        return _encode(value, json, 0)
    except Unencodable as error:
        raise error.within(path) from None


def _encode(value: Any, json: bool, depth: int) -> bytes:
    encoder = _EXACT.get(type(value))
    if encoder is None:
        encoder = _encoder_of(value, json)
    return encoder(value, json, depth)


def _encoder_of(value: Any, json: bool) -> _Encoder:
    for kind, encoder in _NATIVE.items():
        if isinstance(value, kind):
            return encoder
    if json and not isinstance(value, type) and hasattr(value, "__json__"):
        return _reduced
    if json and _is_lazy_text(value):
        return _lazy_text
    for kind, encoder in _MARKED.items():
        if isinstance(value, kind):
            return encoder
    if callable(getattr(value, "model_dump", None)) and not isinstance(value, type):
        return _model
    if is_dataclass(value) and not isinstance(value, type):
        return _dataclass
    return _unknown


def _framed(tag: bytes, data: bytes) -> bytes:
    return b"%b%d:%b" % (tag, len(data), data)


# --- scalars ---------------------------------------------------------------------------------------------------------


def _none(value: None, json: bool, depth: int) -> bytes:
    return b"n"


def _bool(value: bool, json: bool, depth: int) -> bytes:
    return b"t" if value else b"f"


def _int(value: int, json: bool, depth: int) -> bytes:
    return b"i%x;" % value  # Hexadecimal: Python limits the digits of a decimal conversion.


def _float(value: float, json: bool, depth: int) -> bytes:
    return b"d%b;" % float.hex(value).encode()


def _str(value: str, json: bool, depth: int) -> bytes:
    try:
        data = str.encode(value)
    except UnicodeEncodeError:
        data = _surrogates(value, json)
    return b"s%d:%b" % (len(data), data)


def _surrogates(value: str, json: bool) -> bytes:
    if (
        json
    ):  # JSON writes \ud83d\ude00 for such a pair, and reads it back as the one character it stands for.
        value = str.encode(value, "utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    return str.encode(value, "utf-8", "surrogatepass")


def _bytes(value: bytes | bytearray, json: bool, depth: int) -> bytes:
    return _framed(b"b", bytes(value))


def _datetime(value: datetime, json: bool, depth: int) -> bytes:
    return _framed(b"T", datetime.isoformat(value).encode())


def _date(value: date, json: bool, depth: int) -> bytes:
    return _framed(b"D", date.isoformat(value).encode())


def _time(value: time, json: bool, depth: int) -> bytes:
    return _framed(b"C", time.isoformat(value).encode())


def _timedelta(value: timedelta, json: bool, depth: int) -> bytes:
    return b"m%x;" % (value // timedelta(microseconds=1))


def _decimal(value: Decimal, json: bool, depth: int) -> bytes:
    return _framed(b"N", Decimal.__str__(value).encode())


def _uuid(value: UUID, json: bool, depth: int) -> bytes:
    return b"u" + value.bytes


# --- containers ------------------------------------------------------------------------------------------------------


def _deeper(depth: int) -> int:
    if depth >= MAX_DEPTH:
        raise Unencodable(f"contains itself, or is nested more than {MAX_DEPTH} levels deep")
    return depth + 1


def _items(value: Iterable[Any], json: bool, depth: int) -> list[bytes]:
    depth = _deeper(depth)
    parts = []
    for index, item in enumerate(value):
        try:
            parts.append(_encode(item, json, depth))
        except Unencodable as error:
            raise error.within(f"[{index}]" if depth < MAX_DEPTH else "") from None
    return parts


def _list(value: Iterable[Any], json: bool, depth: int) -> bytes:
    parts = _items(value, json, depth)
    return b"l%d:%b" % (len(parts), b"".join(parts))


def _set(value: Iterable[Any], json: bool, depth: int) -> bytes:
    if json:
        raise Unencodable("is a set, which JSON cannot carry; pass a sorted list")
    parts = sorted(_items(value, json, depth))
    return b"e%d:%b" % (len(parts), b"".join(parts))


def _dict(value: Mapping[Any, Any], json: bool, depth: int) -> bytes:
    if json:
        value = _json_object(value)
    depth = _deeper(depth)
    pairs = []
    for key, item in value.items():
        try:
            pairs.append((_encode(key, json, depth), _encode(item, json, depth)))
        except Unencodable as error:
            raise error.within(f"[{key!r}]" if isinstance(key, str | int) else "[…]") from None
    pairs.sort()
    return b"o%d:%b" % (len(pairs), b"".join(part for pair in pairs for part in pair))


def _json_object(value: Mapping[Any, Any]) -> dict[str, Any]:
    """The same dict with the keys that JSON gives it; of two that become one, the later wins, as it does there."""
    found = {key if type(key) is str else _json_key(key): item for key, item in value.items()}
    if found.keys() == {"__type__", "__value__"}:
        raise Unencodable(
            "is a dict of '__type__' and '__value__', which the serializer takes for its own marker"
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
    raise Unencodable(f"has a dict key of type {type(key).__name__}, which JSON cannot carry; use text keys")


def _json_float(key: float) -> str:
    names = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
    text = float.__repr__(key)
    return names.get(text, text)


# --- objects ---------------------------------------------------------------------------------------------------------


def _reduced(value: Any, json: bool, depth: int) -> bytes:
    return _encode(value.__json__(), json, _deeper(depth))


def _is_lazy_text(value: object) -> bool:
    """Django's lazy translations, by name: the core never imports Django."""
    return any(
        (k.__module__, k.__name__) == ("django.utils.functional", "Promise") for k in type(value).__mro__
    )


def _lazy_text(value: object, json: bool, depth: int) -> bytes:
    return _str(str(value), json, depth)


def _enum(value: Enum, json: bool, depth: int) -> bytes:
    return _encode(value.value, json, _deeper(depth))


def _model(value: Any, json: bool, depth: int) -> bytes:
    """A pydantic model: as Celery's ``pydantic=True`` puts it into a JSON message, else class and fields."""
    if json:
        return _encode(value.model_dump(mode="json"), json, _deeper(depth))
    return _named(value, value.model_dump(), depth)


def _dataclass(value: Any, json: bool, depth: int) -> bytes:
    content = {field.name: getattr(value, field.name) for field in fields(value)}
    if json:
        return _dict(content, json, depth)
    return _named(value, content, depth)


def _named(value: object, content: Mapping[Any, Any], depth: int) -> bytes:
    # With its class: a serializer that keeps objects tells a Created(7) from a Deleted(7).
    kind = type(value)
    return _framed(b"O", f"{kind.__module__}.{kind.__qualname__}".encode()) + _dict(content, False, depth)


def _unknown(value: object, json: bool, depth: int) -> bytes:
    raise Unencodable(
        f"is a {type(value).__qualname__}, which has no stable value; pass its primary key or other plain data, "
        "or leave the argument out of the key (and of the fingerprint)"
    )


# The order of the serializer: what JSON knows by itself, __json__, then kombu's markers, datetime before date.
_NATIVE: dict[type, _Encoder] = {
    type(None): _none,
    bool: _bool,
    int: _int,
    float: _float,
    str: _str,
    list: _list,
    tuple: _list,
    dict: _dict,
}
_MARKED: dict[type, _Encoder] = {
    datetime: _datetime,
    date: _date,
    time: _time,
    timedelta: _timedelta,
    Decimal: _decimal,
    UUID: _uuid,
    bytes: _bytes,
    bytearray: _bytes,
    set: _set,
    frozenset: _set,
    Enum: _enum,
}
_EXACT: dict[type, _Encoder] = {**_NATIVE, **_MARKED}
