"""What the guard makes of numbered calls, and of a line that is full (E13, D3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from celery_once_fenced.events import observing
from celery_once_fenced.run import Conflict, Defer, Execution, Returned, Skip, Superseded
from celery_once_fenced.stores import Enqueue
from tests.fixtures.deliveries import LEASE, Bench, delivery, policy

REPLACE = policy(on_duplicate="replace")
KEEP = policy(on_duplicate="keep_last")


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    with observing(bench.events.append):
        yield bench


def called(bench: Bench, name: str, call: str = "", **fields: Any) -> Execution:
    """A call that has its number, and the delivery that it makes."""
    ex = delivery(name, **{"policy": REPLACE, **fields})
    ask = Enqueue(ex.key, ex.task, ex.policy.span, ex.delivery, ex.task_id, 3600.0, call=call)
    answer = bench.leases.enqueue(ask)
    return replace(ex, seq=answer.seq)


def confirmed(bench: Bench, *names: str, **fields: Any) -> list[Execution]:
    from celery_once_fenced.stores import Confirm

    made = [called(bench, name, **fields) for name in names]
    bench.leases.confirm(Confirm(made[-1].key, names[-1], published=True))
    return made


def never(_: Any) -> None:
    raise AssertionError("the body was entered")


def test_older_call_is_superseded(bench: Bench) -> None:
    old, new = confirmed(bench, "d1", "d2")
    assert bench.run(old, never) == Superseded(new.task_id)
    assert bench.run(new) == Returned("done")
    assert bench.run(old, never) == Superseded(new.task_id)


def test_older_awaited_call_waits_for_the_newer_one_and_is_answered_from_it(bench: Bench) -> None:
    stored: dict[str, tuple[bool | None, object]] = {}
    old, new = confirmed(
        bench, "d1", "d2", awaited=True, stored_success=lambda task_id: stored.get(task_id, (None, None))
    )
    aside = bench.run(old, never)
    assert (type(aside), aside.why, aside.answer_from) == (Defer, "superseded", new.task_id)
    back = replace(old, answer_from=aside.answer_from)
    assert bench.run(back, never).why == "superseded"  # it is still queued
    assert bench.run(new) == Returned("done")
    stored[new.task_id] = (True, "new")
    assert bench.run(back, never) == Returned("new")


def test_older_awaited_call_runs_where_the_newer_one_failed(bench: Bench) -> None:
    old, new = confirmed(bench, "d1", "d2", awaited=True, stored_success=lambda task_id: (False, None))
    with pytest.raises(ZeroDivisionError):
        bench.run(new, lambda grant: 1 / 0)
    assert bench.run(replace(old, answer_from=new.task_id)) == Returned("done")


def test_older_awaited_call_of_the_correctness_tier_runs(bench: Bench) -> None:
    """The ledger answers no call from another's."""
    fields = {"tier": "correctness", "replay_for": 0, "on_duplicate": "replace"}
    old, _ = confirmed(bench, "d1", "d2", awaited=True, policy=policy(**fields), resource="r")
    assert bench.run(old) == Returned("done")


def test_awaited_call_is_not_answered_from_an_older_one(bench: Bench) -> None:
    old = called(bench, "d1", policy=KEEP)
    new = replace(delivery("d2", policy=KEEP, awaited=True), seq=old.seq + 1)

    def meanwhile(_: Any) -> None:
        aside = bench.run(new, never)
        assert (aside.why, aside.answer_from, aside.limit) == ("awaited", "", 0)

    bench.run(old, meanwhile)


def test_numbered_call_is_never_skipped(bench: Bench) -> None:
    first = called(bench, "d1")

    def meanwhile(_: Any) -> None:
        assert isinstance(bench.run(called(bench, "d2"), never), Defer)

    bench.run(first, meanwhile)


def test_body_runs_with_the_kept_call_and_its_number(bench: Bench) -> None:
    taken: list[tuple[int, str]] = []
    first = called(bench, "d1", policy=KEEP, take_kept=lambda seq, call: taken.append((seq, call)))
    kept = called(bench, "d2", "the newest", policy=KEEP)
    assert bench.run(first) == Returned("done")
    assert taken == [(kept.seq, "the newest")]


@pytest.mark.parametrize(("on_conflict", "limit"), [("defer", 7), ("raise", None)])
def test_who_meets_a_holder_waits_in_line(bench: Bench, on_conflict: Any, limit: int | None) -> None:
    def meanwhile(_: Any) -> None:
        aside = bench.run(delivery("d2", policy=policy(on_conflict=on_conflict, max_deferred=7)), never)
        assert getattr(aside, "limit", None) == limit
        assert isinstance(aside, Defer if limit else Conflict)

    bench.run(delivery("d1"), meanwhile)


def test_twin_is_not_in_the_line(bench: Bench) -> None:
    def meanwhile(_: Any) -> None:
        aside = bench.run(delivery("d1"), never)
        assert (aside.why, aside.limit) == ("twin", None)
        assert aside.seconds == pytest.approx(LEASE, rel=0.1)

    bench.run(delivery("d1"), meanwhile)


# --- messages that nobody announced (W5) ------------------------------------------------------------------------------

WINDOW = policy(unique="until_expired", window=60)


def test_message_that_nobody_announced_takes_the_window_or_is_skipped(bench: Bench) -> None:
    first, second = (delivery(name, policy=WINDOW, unannounced=True) for name in ("d1", "d2"))
    assert bench.run(first) == Returned("done")
    assert bench.run(second, never) == Skip(first.task_id)
    bench.clock.pass_(61)
    assert bench.run(second) == Returned("done")


@pytest.mark.parametrize("fields", [{"awaited": True}, {"seen_before": True}, {"unannounced": False}])
def test_message_that_may_not_be_left_out_asks_for_no_window(bench: Bench, fields: dict[str, bool]) -> None:
    bench.run(delivery("d1", policy=WINDOW, unannounced=True))
    assert bench.run(delivery("d2", policy=WINDOW, **{"unannounced": True, **fields})) == Returned("done")
