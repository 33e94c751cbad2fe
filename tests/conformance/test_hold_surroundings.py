"""What every lease store tells of a key beside who holds it."""

from __future__ import annotations

import pytest

from celery_once_fenced.stores import Surroundings
from tests.conformance.lease_bench import Bench


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
