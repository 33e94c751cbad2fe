"""What every lease store tells of a key beside who holds it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_once_fenced.stores import Surroundings, Waiters
from tests.conformance.lease_bench import Bench, key


def around(bench: Bench) -> Surroundings:
    return bench.store.surroundings(bench.key.digest)


def test_nothing_is_known_of_a_key_that_nobody_called(bench: Bench) -> None:
    assert around(bench) == Surroundings()


def test_line_is_as_long_as_its_messages_and_as_old_as_the_first(bench: Bench) -> None:
    task = bench.of("while_executing")
    task.start("runner")
    first = task.defer("d1", limit=0).since
    task.defer("d2", limit=0)
    task.defer("d1", limit=0)  # it came, met the holder again, and keeps its place
    assert around(bench).waiting == 2
    assert around(bench).waiting_since == pytest.approx(first / 1000)


def test_message_that_is_not_back_in_time_leaves_the_line(bench: Bench) -> None:
    bench.of("while_executing").defer("d1", limit=0, believed=30)
    bench.later(31)
    assert (around(bench).waiting, around(bench).waiting_since) == (0, None)


def test_message_that_ran_without_a_start_leaves_the_line_when_it_is_settled(bench: Bench) -> None:
    task = bench.of("while_executing")
    for delivery in ("d1", "d2"):
        task.defer(delivery, limit=0, resource="account:7")
    task.settle("d1")
    assert (around(bench).waiting, bench.store.waiters("account:7").number) == (1, 1)
    task.settle("of another, that never waited")
    assert around(bench).waiting == 1


def test_line_tells_which_resource_it_waits_for(bench: Bench) -> None:
    bench.defer("d1", limit=0, resource="account:7")
    assert around(bench).resource == "account:7"
    bench.start("d1")
    assert around(bench).resource == ""


def test_line_tells_whether_the_queued_call_is_in_it(bench: Bench) -> None:
    bench.defer("d1", limit=0, resource="account:7")
    assert not around(bench).queued_waits
    bench.enqueue("d2")
    assert not around(bench).queued_waits
    bench.defer("d2", limit=0, resource="account:7")
    assert (around(bench).queued_waits, around(bench).waiting) == (True, 2)
    bench.start("d2")
    assert not around(bench).queued_waits


def test_for_a_fence_wait_those_of_other_keys_and_those_of_its_own(bench: Bench) -> None:
    for number in range(2):
        bench.defer(f"own {number}", limit=0)
    for number in range(3):
        other = replace(bench, key=key(f"shop.feed:{number + 2}"), waiting={})
        other.defer("d1", limit=0, resource="account:7")
    own = bench.key.digest
    fences = [("account:7", own), ("account:7", ""), ("account:8", own), ("account:9", "")]
    assert bench.store.waiting(fences) == [5, 3, 2, 0]
    assert bench.store.waiting([]) == []


def test_waiters_of_a_resource_are_those_of_all_its_keys(bench: Bench) -> None:
    """Also of keys in other buckets."""
    others = [replace(bench, key=key(f"shop.feed:{number}"), waiting={}) for number in range(2, 12)]
    assert len({other.key.digest[0] for other in others}) > 3
    first = bench.defer("d1", limit=0, resource="account:7").since
    for other in others:
        other.defer("d1", limit=0, resource="account:7")
    others[0].defer("d2", limit=0, resource="account:8")
    bench.defer("d2", limit=0)  # for its own key
    assert bench.store.waiters("account:7") == Waiters(11, pytest.approx(first / 1000))
    assert bench.store.waiters("account:8").number == 1
    assert bench.store.waiters("account:9") == Waiters()


def test_waiter_of_a_resource_keeps_its_place_until_it_runs(bench: Bench) -> None:
    first = bench.defer("d1", limit=0, resource="account:7").since
    bench.later(20)
    bench.defer("d1", limit=0, resource="account:7")
    assert bench.store.waiters("account:7") == Waiters(1, pytest.approx(first / 1000))
    bench.start("d1")
    assert bench.store.waiters("account:7") == Waiters()


def test_waiter_of_a_resource_that_is_not_back_in_time_is_forgotten(bench: Bench) -> None:
    bench.defer("d1", limit=0, believed=30, resource="account:7")
    bench.later(31)
    assert bench.store.waiters("account:7") == Waiters()


def test_redelivery_that_meets_its_twin_waits_for_no_resource(bench: Bench) -> None:
    bench.defer("d1", resource="account:7")
    assert bench.store.waiters("account:7") == Waiters()


def test_refusals_in_a_row_are_told_until_the_key_runs(bench: Bench) -> None:
    bench.enqueue("d1")
    bench.enqueue("d2")
    bench.enqueue("d3")
    assert around(bench).refused == 2
    bench.start("d1")
    assert around(bench).refused == 0


def test_kept_call_is_told_until_it_has_run(bench: Bench) -> None:
    task = bench.of("until_and_while_executing", "keep_last")
    task.enqueue("d1")
    kept = task.enqueue("d2").seq
    assert around(bench).kept_at == pytest.approx(kept / 1_000_000)
    assert around(bench).newest_at is None
    task.start("d1")
    assert around(bench).kept_at == around(bench).newest_at
    task.settle("d1", seq=kept)
    assert around(bench).kept_at is None


def test_newest_started_call_is_told(bench: Bench) -> None:
    task = bench.of("until_executed", "replace")
    made = task.enqueue("d1", task_id="t|1").seq
    assert around(bench).newest_task == ""
    task.start("d1", task_id="t|1")
    assert around(bench).newest_task == "t|1"
    assert around(bench).newest_at == pytest.approx(made / 1_000_000)


def test_replacement_is_unconfirmed_until_it_is_published(bench: Bench) -> None:
    task = bench.of("until_executed", "replace")
    task.enqueue("d1", task_id="t1")
    task.confirm("d1")
    task.enqueue("d|2", task_id="t2")
    assert (around(bench).unconfirmed, around(bench).displaced_task) == ("d|2", "t1")
    task.confirm("d|2")
    assert (around(bench).unconfirmed, around(bench).displaced_task) == ("", "")


def test_asking_changes_nothing(bench: Bench) -> None:
    bench.enqueue("d1")
    bench.enqueue("d2")
    assert around(bench) == around(bench)
    assert (bench.counters["suppressed"], bench.holder("q")) == (1, "d1")
