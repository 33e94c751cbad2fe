"""What could not be told to a lock store that gave no answer is told when it answers again (E17)."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from celery_once_fenced.arrears import MOST_HOLDS, Arrears
from celery_once_fenced.errors import StoreUnavailableError
from celery_once_fenced.policy import SPANS
from celery_once_fenced.run import Returned
from celery_once_fenced.stores import Enqueue, Slot
from tests.fixtures.deliveries import Bench, delivery, key

TASK = "shop.post"


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def arrears(bench: Bench) -> Arrears:
    return Arrears(bench.leases)


def queue(bench: Bench, name: str) -> None:
    bench.leases.enqueue(Enqueue(key(), TASK, SPANS["until_executed"], name, f"task of {name}", 3600.0))


def unguarded(bench: Bench, task: str = TASK) -> int:
    return int(bench.leases.stats().get(task, {}).get("unguarded", 0))


def test_paying_nothing_asks_nothing(bench: Bench, arrears: Arrears) -> None:
    arrears.pay()
    assert bench.leases.asked == []


def test_what_is_owed_is_told_once(bench: Bench, arrears: Arrears) -> None:
    queue(bench, "d1")
    arrears.owe_release(key().digest, "d1")
    for _ in range(3):
        arrears.owe_count(key().digest, TASK)
    bench.leases.asked.clear()
    arrears.pay()
    arrears.pay()
    assert bench.leases.asked == ["release", "count"]
    assert (bench.leases.slots(), unguarded(bench)) == ({}, 3)


def test_hold_of_another_delivery_is_left_alone(bench: Bench, arrears: Arrears) -> None:
    queue(bench, "d2")
    arrears.owe_release(key().digest, "d1")
    arrears.pay()
    assert bench.leases.slots() == {"q": "task of d2"}


@pytest.mark.parametrize("away", ["release", "count", "all"])
def test_what_could_not_be_paid_is_still_owed(bench: Bench, arrears: Arrears, away: str) -> None:
    queue(bench, "d1")
    arrears.owe_release(key().digest, "d1")
    arrears.owe_count(key().digest, TASK)
    bench.leases.away = {away}
    with pytest.raises(StoreUnavailableError):
        arrears.pay()
    bench.leases.away = set()
    arrears.owe_count(key().digest, TASK)
    arrears.pay()
    assert (bench.leases.slots(), unguarded(bench)) == ({}, 2)


def test_an_outage_of_any_length_is_remembered_in_bounded_space(bench: Bench, arrears: Arrears) -> None:
    for number in range(3 * MOST_HOLDS):
        arrears.owe_release(key().digest, f"d{number}")
    arrears.pay()
    assert bench.leases.asked.count("release") == MOST_HOLDS


@pytest.mark.parametrize(
    "owe", [lambda a: a.owe_release(key().digest, "d1"), lambda a: a.owe_count("", TASK)]
)
def test_forked_child_owes_nothing(arrears: Arrears, bench: Bench, owe: Callable[[Arrears], None]) -> None:
    owe(arrears)
    child = os.fork()
    if child == 0:
        arrears.pay()
        os._exit(len(bench.leases.asked))
    assert os.waitpid(child, 0)[1] == 0
    arrears.pay()
    assert len(bench.leases.asked) == 1


def run_without_a_start_frees_its_hold(bench: Bench) -> None:
    queue(bench, "d1")
    bench.leases.away = {"all"}
    assert bench.run(delivery("d1"), lambda grant: "done") == Returned("done")
    assert bench.leases.slots() == {"q": "task of d1"}
    bench.leases.away = set()
    bench.run(delivery("d2", key=key("another")), lambda grant: "done")
    assert (bench.leases.slots(), unguarded(bench)) == ({}, 1)


def test_run_without_a_start_frees_its_hold_when_the_store_is_back(bench: Bench) -> None:
    """It would suppress calls until its hold ends, an hour as a rule."""
    run_without_a_start_frees_its_hold(bench)


class Forgetful(Arrears):
    def owe_release(
        self, digest: str, holder: str, slot: Slot = "q", name: str = "", *, not_entered: str = ""
    ) -> None:
        """What could not be freed is not remembered."""


def test_a_hold_that_is_forgotten_is_caught(bench: Bench) -> None:
    bench.guard._arrears = Forgetful(bench.leases)
    with pytest.raises(AssertionError):
        run_without_a_start_frees_its_hold(bench)
