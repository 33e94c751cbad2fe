"""What a person is told about a key, in a sentence, from what each lease store knows."""

from __future__ import annotations

from celery_once_fenced.explanation import Explanation
from tests.conformance.lease_bench import Bench


def told(bench: Bench) -> str:
    digest = bench.key.digest
    holds = tuple(bench.store.look(digest))
    return str(Explanation(bench.key.text, digest, holds, bench.store.surroundings(digest)))


def test_free_key_is_free(bench: Bench) -> None:
    assert told(bench) == "shop.feed:1: held by nobody, the next message to reach a worker runs."


def test_queued_and_running_holds_are_told_with_task_worker_and_time(bench: Bench) -> None:
    task = bench.of("until_and_while_executing")
    task.enqueue("d1", task_id="t1")
    task.start("d1", task_id="t1")
    task.enqueue("d2", task_id="t2")
    queued, running = told(bench).split("; ")
    assert "queued by task t2 since 20" in queued
    assert "s more unless it runs" in queued
    assert "running in task t1 on celery@host since 20" in running
    assert ", lease left 60.0 s." in running or ", lease left 59." in running


def test_refusals_are_told(bench: Bench) -> None:
    bench.enqueue("d1")
    assert "refused" not in told(bench)
    bench.enqueue("d2")
    assert "; 1 call refused in a row since it last ran, the first since 20" in told(bench)
    bench.enqueue("d3")
    assert "; 2 calls refused in a row since it last ran, the first since 20" in told(bench)


def test_line_is_told(bench: Bench) -> None:
    task = bench.of("while_executing")
    task.start("runner")
    assert "turn" not in told(bench)
    task.defer("d1", limit=0)
    assert "; 1 message waits for its turn, the first since 20" in told(bench)
    task.defer("d2", limit=0)
    assert "; 2 messages wait for their turn, the first since 20" in told(bench)


def test_kept_call_is_told_from_its_making_to_its_end(bench: Bench) -> None:
    task = bench.of("until_and_while_executing", "keep_last")
    task.enqueue("d1")
    assert "kept" not in told(bench)
    kept = task.enqueue("d2").seq
    assert "is kept: the queued one runs with its arguments" in told(bench)
    task.start("d1")
    assert "is kept until the run with its arguments has ended" in told(bench)
    task.enqueue("d3")
    task.enqueue("d4")
    assert "is kept: the queued one runs with its arguments" in told(bench)
    task.release("q", "d3")
    assert "is kept for the next one" in told(bench)
    task.end("d1")
    task.settle("d1", seq=kept)
    assert "is kept for the next one" in told(bench)


def test_replacement_is_told_until_it_is_confirmed(bench: Bench) -> None:
    task = bench.of("until_executed", "replace")
    task.enqueue("d1", task_id="t1")
    assert told(bench).endswith("not confirmed yet that this call was published.")
    task.confirm("d1")
    assert "not confirmed" not in told(bench)
    task.enqueue("d2", task_id="t2")
    assert "queued by task t2" in told(bench)
    assert told(bench).endswith("so the one it displaced, of task t1, may still run.")
    task.confirm("d2")
    assert "not confirmed" not in told(bench)


def test_newest_call_that_was_started_is_told(bench: Bench) -> None:
    task = bench.of("until_executed", "replace")
    task.enqueue("d1", task_id="t1")
    task.start("d1", task_id="t1")
    task.end("d1")
    assert "the newest call that was started is that of 20" in told(bench)
    assert told(bench).endswith("by task t1: the message of an older one does not run.")
