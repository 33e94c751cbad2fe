"""Fixtures for every test; what they do stands in tests/fixtures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery import _state

# django_project sets Django up, which must come before any test module imports a model.
pytest_plugins = [
    "tests.fixtures.django_project",
    "tests.fixtures.fencing",
    "tests.fixtures.proxy",
    "tests.fixtures.redis_servers",
    "tests.fixtures.servers",
]


@pytest.fixture(autouse=True)
def current_app_stays() -> Iterator[None]:
    """Celery's current app, which code outside tasks asks for, is that of the next test no longer (W4)."""
    before = _state._tls.current_app
    yield
    _state._tls.current_app = before
