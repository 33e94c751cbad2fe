"""The circuit breaker by its clock alone."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from celery_once_fenced.stores.breaker import Breaker


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(pause=2, clock=clock)


def test_it_is_closed_at_first(breaker: Breaker) -> None:
    assert breaker.admits()
    assert not breaker.is_open


def test_failure_refuses_all_calls_for_a_pause(breaker: Breaker, clock: Clock) -> None:
    breaker.failed()
    assert breaker.is_open
    for clock.now in (0, 1, 1.99):
        assert not breaker.admits()


def test_one_probe_goes_through_after_the_pause(breaker: Breaker, clock: Clock) -> None:
    breaker.failed()
    clock.now = 2
    assert [breaker.admits() for _ in range(3)] == [True, False, False]


def test_success_of_the_probe_closes_it(breaker: Breaker, clock: Clock) -> None:
    breaker.failed()
    clock.now = 2
    breaker.admits()
    breaker.succeeded()
    assert [breaker.admits() for _ in range(3)] == [True, True, True]


def test_failure_of_the_probe_begins_another_pause(breaker: Breaker, clock: Clock) -> None:
    breaker.failed()
    clock.now = 2
    breaker.admits()
    clock.now = 2.5
    breaker.failed()
    clock.now = 4.4
    assert not breaker.admits()
    clock.now = 4.5
    assert breaker.admits()


def test_probe_that_never_reports_costs_one_pause(breaker: Breaker, clock: Clock) -> None:
    breaker.failed()
    clock.now = 2
    assert breaker.admits()
    clock.now = 4
    assert breaker.admits()


def test_one_probe_among_many_threads(breaker: Breaker, clock: Clock) -> None:
    breaker.failed()
    clock.now = 2
    with ThreadPoolExecutor(50) as pool:
        assert sum(pool.map(lambda _: breaker.admits(), range(500))) == 1


def test_forked_child_starts_closed(breaker: Breaker, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    breaker.failed()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert breaker.admits()
    assert not breaker.is_open
