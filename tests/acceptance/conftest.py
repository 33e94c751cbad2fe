"""Places to work in and workers for the acceptance tests; a test that fails shows the logs of its workers."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

from example_project.servers import Servers
from tests.acceptance import workers
from tests.acceptance.workers import Site

LOG_TAIL = 8000
"""Characters of each worker's log in the report of a failed test."""


@pytest.fixture
def label() -> str:
    """A label, and with it a key, that no other test uses."""
    return uuid.uuid4().hex[:8]


@pytest.fixture(scope="module")
def sites(servers: Servers) -> Iterator[Callable[..., Site]]:
    """Makes sites on the session's server; what they wrote is deleted after the module."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(contextlib.closing(Site.at(servers.redis_url, **options)))


@pytest.fixture(scope="session")
def shared_site(servers: Servers) -> Iterator[Site]:
    """A site with one worker, for all modules that do it no harm."""
    site = Site.at(servers.redis_url, worker_enable_remote_control=True)
    with contextlib.closing(site), site.worker(concurrency=5):
        yield site


@pytest.fixture(scope="module")
def site(shared_site: Site) -> Site:
    """Where a module works; one that kills or cuts something makes its own."""
    return shared_site


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    report = yield
    if report.failed:
        for worker in workers.running:
            report.sections.append((f"worker {worker.pid}", worker.log()[-LOG_TAIL:]))
    return report
