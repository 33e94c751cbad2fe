"""What happened, in one vocabulary: ``noun.past_tense``, for logs, metrics, tests and whoever else subscribes.

An observer is any callable that takes an :class:`Event`.  It runs in the thread where the thing happened, sometimes
inside a transaction, so it must be quick.  An observer that raises is logged and the task goes on.
Fields never hold argument values: ``key`` is the digest, ``text`` is left out where ``key_text="hash"``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["Event", "Observer", "emit", "observing", "passing", "subscribe", "unsubscribe"]

logger = logging.getLogger("celery_once_fenced")


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.  ``name`` is e.g. ``lease.lost``; ``fields`` are primitives."""

    name: str
    fields: Mapping[str, object] = field(default_factory=dict)


Observer = Callable[[Event], None]

_observers: list[Observer] = []
_passing: set[type[BaseException]] = set()


def subscribe(observer: Observer) -> Observer:
    """Call ``observer`` with every event of this process from now on; returns it, so it works as a decorator."""
    _observers.append(observer)
    return observer


def unsubscribe(observer: Observer) -> None:
    """Undo :func:`subscribe`.  Raises ``ValueError`` when the observer is not subscribed."""
    _observers.remove(observer)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Subscribe for the length of a ``with`` block."""
    subscribe(observer)
    try:
        yield
    finally:
        unsubscribe(observer)


def passing(error: type[BaseException]) -> None:
    """An error that may strike in an observer and is not its own, as a time limit is: it passes."""
    _passing.add(error)


def emit(name: str, **fields: object) -> None:
    """Tell every observer.  Raises nothing but what is :func:`passing`."""
    event = Event(name, fields)
    for observer in tuple(_observers):
        try:
            observer(event)
        except tuple(_passing):
            raise
        except Exception:
            logger.exception("observer %r failed on %s", observer, name)
