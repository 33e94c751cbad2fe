"""Fixtures for pytest, found by its entry point.  Nothing else is imported before a test asks for one of them.

Neither applies by itself; for all tests of a module or directory, ask for one in an autouse fixture of your own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from celery_once_fenced.testing import Enforced

__all__ = ["clean_once_fenced", "enforced_once"]


@pytest.fixture
def enforced_once() -> Iterator[Enforced]:
    """``enforce_once()`` around the test: eager mode, leases in memory, ``enforced_once.clock`` to move."""
    from celery_once_fenced.testing import enforce_once

    with enforce_once() as once:
        yield once


@pytest.fixture
def clean_once_fenced() -> Iterator[str]:
    """``own_namespace()`` around the test, for real workers and Redis: no key is held when it begins; gives the namespace."""
    from celery_once_fenced.testing import own_namespace

    with own_namespace() as namespace:
        yield namespace
