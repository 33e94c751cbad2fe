"""Calls of a key that is held: what the caller is told, and what runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from example_project.servers import wait_until
from tests.acceptance.workers import Site


@pytest.fixture(scope="module")
def site(sites: Callable[..., Site]) -> Iterator[Site]:
    site = sites()
    with site.worker(concurrency=3):
        yield site


def test_second_call_gets_the_result_of_the_first(site: Site, label: str) -> None:
    task = site.task("early")
    first = task.delay(label, "hold")
    wait_until(lambda: site.stage.runs(label) == 1)
    second = task.delay(label, "hold")
    site.stage.release(label)
    assert second.get(timeout=10) == first.get(timeout=10) == f"{label}#1"
    assert site.stage.runs(label) == 1
