"""What each option of ``Once`` may be: one check per option, that returns the value as it is kept, or
explains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from celery_once_fenced.durations import parse_duration
from celery_once_fenced.errors import ConfigError
from celery_once_fenced.templates import Template
from celery_once_fenced.wording import did_you_mean, listed

Tier = Literal["efficiency", "correctness"]
Unique = Literal[
    "until_executed", "until_executing", "until_expired", "while_executing", "until_and_while_executing"
]
OnDuplicate = Literal["return_existing", "raise", "replace", "keep_last"]
OnConflict = Literal["skip", "defer", "raise"]
OnOverflow = Literal["raise", "drop"]
OnStoreError = Literal["open", "raise"]
OnUnknown = Literal["hold", "rerun", "fail"]

Check = Callable[[str, Any], Any]

SHORTEST_LEASE = 0.1
"""Seconds.  A third of it must hold a round trip of the renewal, and the trust margin its share of the
rest."""


def _one_of(literal: Any, *, none: bool = False) -> Check:
    values: tuple[str, ...] = get_args(literal)

    def check(name: str, value: object) -> object:
        if (value is None and none) or (isinstance(value, str) and value in values):
            return value
        raise ConfigError(
            f"{name}={value!r} is not allowed; it must be {listed(values)}{did_you_mean(value, values)}"
        )

    return check


def _duration(least: float = 0.0, *, none: bool = False, above: bool = False) -> Check:
    def check(name: str, value: object) -> float | None:
        if value is None and none:
            return None
        seconds = parse_duration(value, option=name)
        if seconds < least or (above and seconds == least):
            bound = "more than" if above else "at least"
            raise ConfigError(f"{name}={value!r} is too short; it must be {bound} {least:g} s")
        return seconds

    return check


def lease_seconds(name: str, value: object) -> float:
    seconds = parse_duration(value, option=name)
    if seconds < SHORTEST_LEASE:
        raise ConfigError(
            f"{name}={value!r} is too short: it is renewed every third, and a renewal is a round trip; "
            f"it must be at least {SHORTEST_LEASE:g} s"
        )
    return seconds


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise ConfigError(f"{name}={value!r} must be a whole number, 0 or more")
    return value


def _bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} must be True or False")
    return value


def _str(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name}={value!r} must be text")
    return value


def _scope(name: str, value: object) -> str | None:
    if value is None or (isinstance(value, str) and value):
        return value
    raise ConfigError(f"{name}={value!r} must be text that is not empty; leave it out for the task's name")


def _key(name: str, value: object) -> object:
    if isinstance(value, str):
        Template.parse(value, option=name)
    if value is None or isinstance(value, str) or callable(value):
        return value
    if isinstance(value, Sequence) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ConfigError(
        f"{name}={value!r} must be a tuple of argument names, a format string such as 'order:{{order_id}}', "
        "a function of the arguments, or None for all arguments"
    )


def _resource(name: str, value: object) -> object:
    if isinstance(value, str):
        Template.parse(value, option=name)
    if value is None or isinstance(value, str) or callable(value):
        return value
    raise ConfigError(
        f"{name}={value!r} must be a format string such as 'account:{{account_id}}', a function of the "
        "arguments, or None for the key"
    )


def _fingerprint(name: str, value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    if (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and all(isinstance(item, str) for item in value)
    ):
        return tuple(value)
    raise ConfigError(
        f"{name}={value!r} must be a tuple of argument names such as ('amount',), () for no check, "
        "or None for all arguments"
    )


def _on_unknown(name: str, value: object) -> object:
    return value if callable(value) else _one_of(OnUnknown)(name, value)


def _final_errors(name: str, value: object) -> tuple[type[Exception], ...]:
    found = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (None,)
    if not all(isinstance(item, type) and issubclass(item, Exception) for item in found):
        raise ConfigError(f"{name}={value!r} must be a tuple of exception classes such as (CardDeclined,)")
    return found


CHECKS: Mapping[str, Check] = {
    "tier": _one_of(Tier),
    "key": _key,
    "scope": _scope,
    "unique": _one_of(Unique),
    "on_duplicate": _one_of(OnDuplicate),
    "on_conflict": _one_of(OnConflict, none=True),
    "lease": lease_seconds,
    "queue_hold": _duration(above=True),
    "window": _duration(above=True, none=True),
    "max_hold": _duration(above=True, none=True),
    "max_deferred": _count,
    "on_overflow": _one_of(OnOverflow),
    "on_store_error": _one_of(OnStoreError),
    "replay_for": _duration(),
    "resource": _resource,
    "fingerprint": _fingerprint,
    "atomic": _bool,
    "on_unknown": _on_unknown,
    "final_errors": _final_errors,
    "max_attempts": _count,
    "double_run": _str,
}
