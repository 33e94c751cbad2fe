"""Run a Celery task once, and be honest about which "once" that is.

``SingletonTask`` suppresses duplicates through a lease in Redis; ``FencedTask`` makes a duplicate or stale execution
harmless through a fencing token and a ledger in Postgres.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

# First, so that the function below is not displaced by the submodule of its name when that is imported later.
import celery_once_fenced.lease  # noqa: F401

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from celery_once_fenced.durations import Duration
    from celery_once_fenced.effects import DidNotHappen, Happened, Unknown
    from celery_once_fenced.errors import (
        BusyError,
        ConfigError,
        DeferralFailedError,
        DeferralOverflowError,
        DuplicateError,
        ExhaustedError,
        FencedOffError,
        FenceMismatchError,
        GrantError,
        InDoubtError,
        KeyDerivationError,
        KeyReusedError,
        LeaseLostError,
        OnceError,
        OutcomeUnknownError,
        RecordedError,
        StoreUnavailableError,
    )
    from celery_once_fenced.grant import Grant, current_grant
    from celery_once_fenced.ledger import ResultOmitted
    from celery_once_fenced.operate import explain, forget, release, resolve
    from celery_once_fenced.outcome import Outcome
    from celery_once_fenced.outside import fence
    from celery_once_fenced.policy import Once
    from celery_once_fenced.tasks import FencedTask, SingletonTask

__version__ = "0.1.0"

__all__ = [
    "BusyError",
    "ConfigError",
    "DeferralFailedError",
    "DeferralOverflowError",
    "DidNotHappen",
    "DuplicateError",
    "ExhaustedError",
    "FenceMismatchError",
    "FencedOffError",
    "FencedTask",
    "Grant",
    "GrantError",
    "Happened",
    "InDoubtError",
    "KeyDerivationError",
    "KeyReusedError",
    "LeaseLostError",
    "Once",
    "OnceError",
    "Outcome",
    "OutcomeUnknownError",
    "RecordedError",
    "ResultOmitted",
    "SingletonTask",
    "StoreUnavailableError",
    "Unknown",
    "current_grant",
    "explain",
    "fence",
    "forget",
    "lease",
    "release",
    "resolve",
]

_HOMES = {
    "effects": ("DidNotHappen", "Happened", "Unknown"),
    "grant": ("Grant", "current_grant"),
    "ledger": ("ResultOmitted",),
    "operate": ("explain", "forget", "release", "resolve"),
    "outcome": ("Outcome",),
    "outside": ("fence",),
    "policy": ("Once",),
    "tasks": ("FencedTask", "SingletonTask"),
}
"""Which module has which name; the others are errors.  Nothing is imported before it is used, as in Celery itself: the
import of the package costs next to nothing, and touches neither Celery nor a driver (W11).
"""


def lease(name: str, ttl: Duration = 60.0, wait: Duration = 0.0) -> AbstractContextManager[Grant]:
    """Hold a lease of the efficiency tier outside tasks: see ``celery_once_fenced.outside.lease``."""
    outside = import_module("celery_once_fenced.outside")
    held: AbstractContextManager[Grant] = outside.lease(name, ttl, wait)
    return held


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((module for module, names in _HOMES.items() if name in names), "errors")
    globals()[name] = value = getattr(import_module(f"{__name__}.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
