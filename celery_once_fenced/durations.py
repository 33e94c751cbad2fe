"""Durations as people write them, in seconds."""

from __future__ import annotations

import math
import re
from datetime import timedelta

from celery_once_fenced.errors import ConfigError

__all__ = ["Duration", "parse_duration"]

Duration = float | timedelta | str
"""Seconds, a ``timedelta``, or text such as ``"90s"``, ``"15m"``, ``"1h30m"``."""

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])", re.ASCII)
_DURATION = re.compile(rf"(?:{_PART.pattern})+", re.ASCII)
_FORMS = 'seconds as a number, a timedelta, or text such as "90s", "15m", "2h", "30d"'
_LONGEST = 100 * 366 * 86400.0
"""A hundred years: what every store can add to a clock."""


def parse_duration(value: object, *, option: str) -> float:
    """Seconds of a duration: a number, a ``timedelta``, or text such as ``"90s"``, ``"500ms"`` or
    ``"1h30m"``.

    Raises:
        ConfigError: another type or form, a negative or an endless duration.
    """
    seconds = _seconds(value)
    if seconds is None or not 0 <= seconds <= _LONGEST:
        raise ConfigError(f"{option}={value!r} is no duration; write {_FORMS}")
    return seconds


def _seconds(value: object) -> float | None:
    match value:
        case bool():
            return None
        case int() | float():
            return float(value) if abs(value) <= _LONGEST else math.inf
        case timedelta():
            return value.total_seconds()
        case str() if _DURATION.fullmatch(value.strip()):
            return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(value))
    return None
