"""``Once``: the options of one task, or of one layer of settings, each checked when it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from celery_once_fenced.errors import ConfigError
from celery_once_fenced.option_checks import (
    CHECKS,
    OnConflict,
    OnDuplicate,
    OnOverflow,
    OnStoreError,
    OnUnknown,
    Tier,
    Unique,
)
from celery_once_fenced.wording import did_you_mean

if TYPE_CHECKING:
    from celery_once_fenced.durations import Duration
    from celery_once_fenced.keys import KeySpec, ResourceSpec

__all__ = ["NOT_GIVEN", "Given", "NotGiven", "Once"]


class NotGiven(Enum):
    """The type of ``NOT_GIVEN``: the next layer decides.  None is a value of some options."""

    NOT_GIVEN = 0


NOT_GIVEN: Final = NotGiven.NOT_GIVEN
T = TypeVar("T")
Given: TypeAlias = T | NotGiven


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Once:
    """Options of one task, or of one layer of settings; what is left out, the next layer decides.

    Durations are seconds, a ``timedelta`` or text such as ``"15m"``; they are kept as seconds.  Raises
    ``ConfigError`` for an unknown option or a wrong value.
    """

    tier: Given[Tier] = NOT_GIVEN
    """``efficiency`` (default): a lease suppresses duplicates.  ``correctness``: the ledger makes them
    harmless."""
    key: Given[KeySpec] = NOT_GIVEN
    """None (default) = all arguments; a tuple of argument names, ``()`` = the task alone; a format string
    such as ``"order:{order_id}"``; a function of the bound arguments that returns text, or None: not
    guarded."""
    scope: Given[str | None] = NOT_GIVEN
    """First part of the key.  Default: the task's name.  Set it to survive a rename, or to dedupe across
    tasks."""
    unique: Given[Unique] = NOT_GIVEN
    """The span in which a second call is a duplicate.  Default ``until_executed``."""
    on_duplicate: Given[OnDuplicate] = NOT_GIVEN
    """When enqueuing a duplicate.  Default ``return_existing``."""
    on_conflict: Given[OnConflict | None] = NOT_GIVEN
    """When a worker picks up a message whose key another task holds.  Default ``skip`` for until_executed,
    else ``defer``."""
    lease: Given[Duration] = NOT_GIVEN
    """Running lease, renewed every third of it.  Default 60 s, at least 0.1 s."""
    queue_hold: Given[Duration] = NOT_GIVEN
    """How long a queued call holds its key, beyond its own delay.  Default 1 h."""
    window: Given[Duration | None] = NOT_GIVEN
    """How long a call counts under ``until_expired``, which requires it."""
    max_hold: Given[Duration | None] = NOT_GIVEN
    """Renewal stops here.  Default: the hard time limit, else no end."""
    max_deferred: Given[int] = NOT_GIVEN
    """Waiters per key.  Default 100."""
    on_overflow: Given[OnOverflow] = NOT_GIVEN
    """Beyond ``max_deferred``: ``raise`` (default), the waiter fails; ``drop``, it is dropped."""
    on_store_error: Given[OnStoreError] = NOT_GIVEN
    """Redis unreachable, efficiency tier: ``open`` (default) runs unguarded, ``raise`` does not."""
    replay_for: Given[Duration] = NOT_GIVEN
    """Correctness, required: how long a finished key answers later calls with its recorded result.  ``0``:
    the key may run again as soon as it has finished."""
    resource: Given[ResourceSpec] = NOT_GIVEN
    """Correctness: what the fence protects.  Default: the key; a format string; a function of the
    arguments."""
    fingerprint: Given[Sequence[str] | None] = NOT_GIVEN
    """Correctness: arguments that must match when a key is used again.  Default None = all; ``()`` = off."""
    atomic: Given[bool] = NOT_GIVEN
    """Correctness: the body in one transaction (default True), or in the ``grant.atomic()`` that it opens."""
    on_unknown: Given[OnUnknown | Callable[[str], object]] = NOT_GIVEN
    """Correctness: an effect was started and its outcome is not known.  ``hold`` (default), ``rerun``,
    ``fail``, or a function of the downstream key that finds out."""
    final_errors: Given[Sequence[type[Exception]]] = NOT_GIVEN
    """Correctness: exceptions that end the key: recorded, and raised again for duplicates.  Default none."""
    max_attempts: Given[int] = NOT_GIVEN
    """Correctness: takeovers of one key before it is parked as failed.  Default 5."""
    double_run: Given[str] = NOT_GIVEN
    """In words, what breaks if this runs twice; shown by audit and admin."""

    def __new__(cls, *args: object, **options: object) -> Once:
        """Explain what the dataclass alone would answer with a bare ``TypeError``."""
        if args:
            raise ConfigError(f"Once takes keyword options only, as in Once(lease=30), not Once({args[0]!r})")
        unknown = next(_unknown(options), None)
        if unknown:
            raise ConfigError(unknown)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, value in self.given().items():
            object.__setattr__(self, name, CHECKS[name](name, value))

    def __repr__(self) -> str:
        return f"Once({', '.join(f'{name}={value!r}' for name, value in self.given().items())})"

    def given(self) -> dict[str, Any]:
        """The options that this layer sets."""
        pairs = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in pairs if value is not NOT_GIVEN}

    @classmethod
    def from_mapping(cls, options: Mapping[str, object]) -> Once:
        """The same from a dict.  Raises ``ConfigError`` with all problems at once."""
        problems = cls.problems(options)
        if problems:
            raise ConfigError("; ".join(problems))
        return cls(**options)  # type: ignore[arg-type]  # checked above

    @classmethod
    def problems(cls, options: object) -> list[str]:
        """What is wrong with a dict of options, as sentences; empty: nothing."""
        if isinstance(options, Once):
            return []
        if not isinstance(options, Mapping):
            return [f"options must be a dict or Once(...), not {type(options).__name__}"]
        known = {name: value for name, value in options.items() if name in CHECKS and value is not NOT_GIVEN}
        return [*_unknown(options), *(problem for item in known.items() for problem in _wrong(*item))]


def _unknown(options: Mapping[str, object]) -> Iterator[str]:
    for name in options:
        if name not in CHECKS:
            hint = did_you_mean(name, CHECKS) or f"; the options are {', '.join(CHECKS)}"
            yield f"{name!r} is no option of Once{hint}"


def _wrong(name: str, value: object) -> list[str]:
    try:
        CHECKS[name](name, value)
    except ConfigError as error:
        return [str(error)]
    return []
