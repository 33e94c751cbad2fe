"""What the guard adds to a task's counters at the end of an execution."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from celery_once_fenced.errors import InDoubtError, KeyReusedError
from celery_once_fenced.stores.counters import runs_of
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


def runs(bench: Bench) -> int:
    return sum(runs_of(counters) for counters in bench.leases.stats().values())


def test_only_bodies_that_were_entered_are_measured() -> None:
    bench = Bench()
    bench.run(post(), lambda grant: 1)
    assert runs(bench) == 1
    assert bench.run(post("d2"), failing).counter == "replayed"  # answered from the ledger
    assert runs(bench) == 1
    with pytest.raises(KeyReusedError):
        bench.run(replace(post("d3"), fingerprint="ff" * 32), failing)
    assert runs(bench) == 1


def test_a_body_that_fails_is_measured_too() -> None:
    bench = Bench()
    with pytest.raises(ValueError, match="certain"):
        bench.run(post(), failing)
    assert runs(bench) == 1
