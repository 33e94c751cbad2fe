"""A namespace of its own in Redis for tests that run with real workers, and nothing left in it afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from celery_once_fenced import runtime as runtimes
from celery_once_fenced.runtime import Runtime
from celery_once_fenced.testing.swap import swapped

__all__ = ["own_namespace"]

LONGEST = 64
"""Characters that a namespace may have."""


@contextmanager
def own_namespace(app: Any = None, *, name: str | None = None) -> Iterator[str]:
    """Keep the keys of a test apart from all others, and free what is held of them before and after.

    Found by the index of the holds: no ``KEYS``, no ``SCAN``.  Counters stay.  Only this process is told: a worker in
    another one needs the same ``namespace`` in its settings.

    Args:
        app: The Celery app.  Default: the current one, or the one that has the setting ``once_fenced``.
        name: The namespace.  Default: that of the settings with ``.test``, and the name of the pytest-xdist worker.

    Raises:
        ConfigError: there is no app with this setting.
        StoreUnavailableError: Redis does not answer.
    """
    runtime = runtimes.current() if app is None else runtimes.runtime_of(app)
    name = name or _name(runtime.settings.namespace)
    with swapped(runtime), _settings(runtime, namespace=name):
        try:
            _free_all(runtime)
            yield name
            _free_all(runtime)
        finally:
            runtime.leases.close()


def _name(namespace: str) -> str:
    suffix = f".test{os.environ.get('PYTEST_XDIST_WORKER', '')}"
    return namespace[: LONGEST - len(suffix)] + suffix


@contextmanager
def _settings(runtime: Runtime, **changes: Any) -> Iterator[None]:
    before = runtime.settings
    runtime.settings = replace(before, **changes)
    try:
        yield
    finally:
        runtime.settings = before


def _free_all(runtime: Runtime) -> None:
    for hold in runtime.leases.holds():
        runtime.leases.release(hold.digest, hold.slot, hold.holder, hold.name)
