"""What the guard adds to a task's counters when an execution ends in doubt."""

from __future__ import annotations

from typing import Any

import pytest

from celery_once_fenced.errors import InDoubtError
from tests.fixtures.deliveries import Bench
from tests.unit.test_guard import post


def doubtful(grant: Any) -> None:
    raise InDoubtError("key", "gateway", "now")


def failing(grant: Any) -> None:
    raise ValueError("certain")


def in_doubt(bench: Bench) -> int:
    return sum(counters.get("in_doubt", 0) for counters in bench.leases.stats().values())


def test_an_execution_that_ends_in_doubt_is_counted_and_no_other() -> None:
    bench = Bench()
    with pytest.raises(ValueError, match="certain"):
        bench.run(post(), failing)
    assert in_doubt(bench) == 0
    with pytest.raises(InDoubtError):
        bench.run(post("d2"), doubtful)
    assert in_doubt(bench) == 1
