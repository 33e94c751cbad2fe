"""What every lease store does where calls of one key are numbered, and where messages wait in line (E13, D3).

``test_lease_controls`` runs these sentences again on stores that are broken on purpose.
"""

from __future__ import annotations

from itertools import product

import pytest

from celery_once_fenced.policy import SPANS, STRATEGIES, span_of
from tests.conformance.lease_bench import HOLD, LEASE, Bench

UNCONFIRMED = 10.0
REPLACED = ("until_executed", "replace")
KEPT = ("until_and_while_executing", "keep_last")


def replacing(bench: Bench, unique: str = "until_executed") -> Bench:
    return bench.of(unique, "replace")


def keeping(bench: Bench) -> Bench:
    return bench.of(*KEPT)


# --- the table of strategies --------------------------------------------------------------------------------


@pytest.mark.parametrize(("unique", "on_duplicate"), list(product(SPANS, STRATEGIES)))
def test_a_strategy_changes_what_refuses_and_leaves_the_rest(unique: str, on_duplicate: str) -> None:
    span, plain = span_of(unique, on_duplicate), SPANS[unique]
    assert (span.sets_q, span.needs_r, span.sets_r, span.clears_q) == (
        plain.sets_q,
        plain.needs_r,
        plain.sets_r,
        plain.clears_q,
    )
    refused = (span.refused_by_q, span.refused_by_r)
    assert refused == (
        (False, False) if on_duplicate == "replace" else (plain.refused_by_q, plain.refused_by_r)
    )
    assert span.ordered is (on_duplicate in ("replace", "keep_last"))
    assert (span.displaces, span.keeps_last) == (on_duplicate == "replace", on_duplicate == "keep_last")


# --- replace (E13, E13a) ------------------------------------------------------------------------------------


def test_replacement_takes_q_and_says_whom_it_displaced(bench: Bench) -> None:
    feed = replacing(bench)
    assert feed.enqueue("d1").by is None
    answer = feed.enqueue("d2")
    assert answer.granted
    assert answer.by is not None
    assert answer.by.task_id == "task of d1"
    assert feed.holder("q") == "d2"
    assert answer.seq > feed.numbers["d1"] > 0
    assert feed.counters["replaced"] == 1


def test_running_call_does_not_refuse_a_replacement(bench: Bench) -> None:
    feed = replacing(bench)
    feed.enqueue("d1")
    feed.start("d1", "h1")
    assert feed.enqueue("d2").granted
    assert feed.start("d2", "h2").answer == "busy"


def test_lost_reply_of_a_replacement_is_no_second_one(bench: Bench) -> None:
    feed = replacing(bench)
    feed.enqueue("d1")
    feed.confirm("d1")
    first, second = feed.enqueue("d2"), feed.enqueue("d2")
    assert (second.granted, second.seq) == (True, first.seq)
    assert second.by is not None
    assert second.by.task_id == "task of d1"
    assert feed.counters["replaced"] == 1


def test_older_message_is_superseded_by_a_newer_queued_one(bench: Bench) -> None:
    feed = replacing(bench)
    feed.enqueue("d1")
    feed.enqueue("d2")
    feed.confirm("d2")
    answer = feed.start("d1", "h1")
    assert answer.answer == "superseded"
    assert answer.by is not None
    assert (answer.by.slot, answer.by.task_id) == ("q", "task of d2")
    assert feed.holder("q") == "d2"


def test_older_message_is_superseded_by_a_newer_started_one(bench: Bench) -> None:
    feed = replacing(bench)
    feed.enqueue("d1")
    feed.enqueue("d2")
    feed.start("d2", "h2")
    feed.end("d2", "h2")
    answer = feed.start("d1", "h1")
    assert answer.answer == "superseded"
    assert answer.by is not None
    assert answer.by.task_id == "task of d2"


def test_started_message_is_not_superseded_by_its_redelivery_being_older(bench: Bench) -> None:
    """It was started before the newer one came: its redelivery finds its twin, or runs again after a kill."""
    feed = replacing(bench)
    feed.enqueue("d1")
    feed.start("d1", "h1", redelivery=True)
    feed.enqueue("d2")
    feed.confirm("d2")
    assert feed.start("d1", "h3", redelivery=True).answer == "twin"
    feed.later(LEASE + 1)
    assert feed.start("d1", "h3", redelivery=True).answer == "granted"


def test_retry_is_superseded_like_its_call(bench: Bench) -> None:
    feed = replacing(bench)
    feed.enqueue("d1", task_id="t1")
    feed.start("d1", "h1", task_id="t1")
    feed.enqueue("d2")
    feed.confirm("d2")
    feed.enqueue("r1", task_id="t1", mode="successor", retry_of="d1")
    feed.end("d1", "h1", task_id="t1")
    assert feed.holder("q") == "d2"
    assert feed.start("r1", "h3", task_id="t1").answer == "superseded"


def test_retry_runs_where_nothing_newer_has_come(bench: Bench) -> None:
    feed = replacing(bench)
    feed.enqueue("d1", task_id="t1")
    feed.start("d1", "h1", task_id="t1")
    feed.enqueue("r1", task_id="t1", mode="successor", retry_of="d1")
    feed.end("d1", "h1", task_id="t1")
    assert feed.numbers["r1"] == feed.numbers["d1"]
    assert feed.start("r1", "h2", task_id="t1").answer == "granted"


def test_retry_is_not_superseded_by_a_q_of_its_own_task(bench: Bench) -> None:
    """Killed between setting q and publishing, the retry is made again from the older message."""
    feed = replacing(bench)
    feed.enqueue("d1", task_id="t1")
    feed.start("d1", "h1", task_id="t1")
    feed.enqueue("r1", task_id="t1", mode="successor", hold=2 * HOLD)
    feed.later(HOLD + 1)  # that it was started is forgotten by now
    assert feed.start("d1", "h2", task_id="t1", redelivery=True).answer == "granted"


def test_older_message_waits_while_a_replacement_is_not_confirmed_then_runs(bench: Bench) -> None:
    feed = replacing(bench)
    feed.enqueue("d1")
    feed.enqueue("d2")
    answer = feed.start("d1", "h1")
    assert answer.answer == "busy"
    assert answer.wait == pytest.approx(UNCONFIRMED, abs=5)
    feed.later(UNCONFIRMED)
    assert feed.start("d1", "h1").answer == "granted"


def test_replacement_that_came_was_published(bench: Bench) -> None:
    feed = replacing(bench, "until_executing")
    feed.enqueue("d1")
    feed.enqueue("d2")
    feed.start("d2")
    feed.later(UNCONFIRMED)
    assert feed.start("d1").answer == "superseded"


def test_replacement_that_was_not_published_gives_q_back(bench: Bench) -> None:
    feed = replacing(bench)
    feed.enqueue("d1", hold=HOLD / 2)
    feed.confirm("d1")
    feed.enqueue("d2")
    feed.confirm("d2", published=False)
    assert feed.holder("q") == "d1"
    hold = feed.slot("q")
    assert hold is not None
    assert hold.left == pytest.approx(HOLD / 2, abs=10)
    assert feed.start("d1", "h1").answer == "granted"


def test_replacement_of_nothing_that_was_not_published_leaves_nothing(bench: Bench) -> None:
    feed = replacing(bench)
    feed.enqueue("d1")
    feed.confirm("d1", published=False)
    assert feed.holder("q") is None


def test_what_two_unconfirmed_replacements_displaced_is_not_lost(bench: Bench) -> None:
    feed = replacing(bench)
    feed.enqueue("d1")
    feed.confirm("d1")
    feed.enqueue("d2")
    feed.enqueue("d3")
    feed.confirm("d2", published=False)
    assert feed.holder("q") == "d3"
    feed.confirm("d3", published=False)
    assert feed.holder("q") == "d1"
    assert feed.start("d1", "h1").answer == "granted"


def test_confirmation_of_another_moves_nothing(bench: Bench) -> None:
    feed = replacing(bench)
    feed.enqueue("d1")
    feed.enqueue("d2")
    feed.confirm("d1")
    assert feed.start("d1", "h1").answer == "busy"


def test_awaited_call_runs_whatever_has_come_since(bench: Bench) -> None:
    feed = replacing(bench)
    feed.enqueue("d1", mode="awaited")
    feed.enqueue("d2")
    feed.start("d2", "h2")
    feed.end("d2", "h2")
    assert feed.start("d1", "h1").answer == "superseded"
    assert feed.start("d1", "h1", ordered=False).answer == "granted"
    feed.end("d1", "h1")
    feed.enqueue("d0", retry_of="d1", mode="awaited")
    assert feed.start("d0", "h0").answer == "superseded"  # what ran last is not what is newest


def test_numbers_go_up_though_the_clock_goes_back(bench: Bench) -> None:
    feed = replacing(bench)
    feed.enqueue("d1")
    feed.numbers["d1"] += 3_600_000_000
    feed.enqueue("d2", retry_of="d1", mode="successor", task_id="task of d1")
    assert feed.enqueue("d3").seq > feed.numbers["d2"]


def test_message_without_a_number_is_not_ordered(bench: Bench) -> None:
    feed = replacing(bench)
    feed.enqueue("d1")
    feed.confirm("d1")
    assert feed.start("foreign", "h2").answer == "granted"


# --- keep_last (E13b) ---------------------------------------------------------------------------------------


def test_call_is_kept_only_while_another_is_queued(bench: Bench) -> None:
    feed = keeping(bench)
    assert feed.enqueue("d1").granted
    answer = feed.enqueue("d2")
    assert (answer.granted, answer.kept) == (False, True)
    assert answer.by is not None
    assert answer.by.task_id == "task of d1"
    feed.start("d1", "h1")
    assert feed.enqueue("d3").granted
    assert feed.counters["kept_last"] == 1
    assert feed.counters["suppressed"] == 0


def test_start_takes_the_last_kept_call(bench: Bench) -> None:
    feed = keeping(bench)
    for delivery in ("d1", "d2", "d3"):
        feed.enqueue(delivery)
    answer = feed.start("d1", "h1")
    assert (answer.answer, answer.call, answer.seq) == ("granted", "call of d3", feed.numbers["d3"])


def test_kept_call_is_there_until_its_run_is_settled(bench: Bench) -> None:
    """Killed after its end, the message comes again, and must not run the older call."""
    feed = keeping(bench)
    feed.enqueue("d1")
    feed.enqueue("d2")
    feed.start("d1", "h1", redelivery=True)
    feed.end("d1", "h1")
    assert feed.start("d1", "h2", redelivery=True).call == "call of d2"
    feed.end("d1", "h2")
    feed.settle("d1", seq=feed.numbers["d2"])
    feed.enqueue("d3")
    assert feed.start("d3", "h3").call == ""


def test_settle_leaves_a_newer_kept_call(bench: Bench) -> None:
    feed = keeping(bench)
    feed.enqueue("d1")
    first = feed.start("d1", "h1")
    feed.enqueue("d2")
    feed.enqueue("d3")
    feed.end("d1", "h1")
    feed.settle("d1", seq=first.seq)
    assert feed.start("d2", "h2").call == "call of d3"


def test_retry_carries_the_kept_call_and_meets_a_newer_one(bench: Bench) -> None:
    feed = keeping(bench)
    feed.enqueue("d1", task_id="t1")
    feed.enqueue("d2")
    feed.numbers["d1"] = feed.start("d1", "h1", task_id="t1").seq  # as the header of the retry says
    feed.enqueue("r1", task_id="t1", mode="successor", retry_of="d1")
    feed.end("d1", "h1", task_id="t1")
    answer = feed.start("r1", "h2", task_id="t1")
    assert (answer.answer, answer.call) == ("granted", "")
    feed.enqueue("d3")
    feed.enqueue("r2", task_id="t1", mode="successor", retry_of="r1")
    feed.end("r1", "h2", task_id="t1")
    feed.enqueue("d4")
    assert feed.start("d3", "h3").call == "call of d4"
    assert feed.start("r2", "h4", task_id="t1").answer == "superseded"


def test_retry_waits_for_a_newer_queued_call_which_may_never_be_published(bench: Bench) -> None:
    feed = keeping(bench)
    feed.enqueue("d1", task_id="t1")
    feed.start("d1", "h1", task_id="t1")
    feed.enqueue("d2")
    feed.enqueue("r1", task_id="t1", mode="successor", retry_of="d1")
    feed.end("d1", "h1", task_id="t1")
    answer = feed.start("r1", "h2", task_id="t1")
    assert answer.answer == "busy"
    assert answer.wait == pytest.approx(HOLD, abs=10)
    feed.release("q", "d2")
    assert feed.start("r1", "h2", task_id="t1").answer == "granted"


def test_retry_is_superseded_when_the_newer_queued_call_has_started(bench: Bench) -> None:
    feed = keeping(bench)
    feed.enqueue("d1", task_id="t1")
    feed.start("d1", "h1", task_id="t1")
    feed.enqueue("d2")
    feed.enqueue("r1", task_id="t1", mode="successor", retry_of="d1")
    feed.end("d1", "h1", task_id="t1")
    feed.start("d2", "h2")
    assert feed.start("r1", "h3", task_id="t1").answer == "superseded"


def test_awaited_call_is_numbered_and_not_kept(bench: Bench) -> None:
    feed = keeping(bench)
    feed.enqueue("d1")
    answer = feed.enqueue("d2", mode="awaited")
    assert (answer.granted, answer.kept) == (False, False)
    assert answer.seq > feed.numbers["d1"]
    assert feed.start("d2", "h2").answer == "granted"
    feed.end("d2", "h2")
    assert feed.start("d1", "h1").answer == "superseded"


# --- many at once (E18) -------------------------------------------------------------------------------------


def test_many_calls_are_answered_in_their_order(bench: Bench) -> None:
    from celery_once_fenced.stores import Enqueue

    asks = [
        Enqueue(bench.key, bench.task, bench.span, delivery, f"task of {delivery}", HOLD)
        for delivery in ("d1", "d2", "d3")
    ]
    first, *others = bench.store.enqueue_many(asks)
    assert first.granted
    assert [answer.by.task_id if answer.by else "" for answer in others] == ["task of d1"] * 2
    assert bench.store.enqueue_many([]) == []


# --- waiting in line (D3) -----------------------------------------------------------------------------------


def test_waiters_are_counted_once_each(bench: Bench) -> None:
    first = bench.defer("d1", limit=2)
    again = bench.defer("d1", limit=2)
    assert (first.waiters, again.waiters) == (1, 1)
    assert again.since == first.since > 0


def test_one_waiter_too_many_overflows(bench: Bench) -> None:
    bench.defer("d1", limit=2)
    bench.defer("d2", limit=2)
    answer = bench.defer("d3", limit=2)
    assert (answer.overflow, answer.waiters) == (True, 2)
    assert not bench.defer("d1", limit=2).overflow
    assert (bench.counters["overflowed"], bench.counters["deferred"]) == (1, 3)


def test_holder_of_q_may_always_wait(bench: Bench) -> None:
    bench.enqueue("d1")
    bench.defer("d2", limit=1)
    assert not bench.defer("d1", limit=1).overflow


def test_line_without_a_limit_is_counted(bench: Bench) -> None:
    bench.defer("d1", limit=1)
    assert bench.defer("d2", limit=0).waiters == 2


def test_twin_is_not_in_the_line(bench: Bench) -> None:
    bench.defer("d1", limit=None)
    assert bench.defer("d2", limit=1).waiters == 1


def test_waiter_that_runs_leaves_the_line(bench: Bench) -> None:
    bench.defer("d1", limit=1)
    bench.start("d1", "h1")
    assert not bench.defer("d2", limit=1).overflow


def test_waiter_that_meets_another_holder_stays_in_the_line(bench: Bench) -> None:
    bench.start("d0", "h0")
    bench.defer("d1", limit=1)
    bench.start("d1", "h1")
    assert bench.defer("d2", limit=1).overflow


def test_waiter_that_never_comes_back_is_forgotten(bench: Bench) -> None:
    bench.defer("d1", limit=1, believed=LEASE)
    bench.later(LEASE + 1)
    assert not bench.defer("d2", limit=1).overflow


# --- refused again and again --------------------------------------------------------------------------------


def test_refusals_in_a_row_are_counted_until_the_key_runs(bench: Bench) -> None:
    bench.enqueue("d0")
    assert [bench.enqueue(f"d{i}").times for i in range(1, 11)] == list(range(1, 11))
    assert bench.counters["repeated"] == 1
    bench.start("d0", "h0")
    assert bench.enqueue("d11").times == 1


def refused(bench: Bench, times: int, patience: float = LEASE) -> list[bool]:
    """Whether each of so many calls was worth a warning."""
    before = bench.store.surroundings(bench.key.digest).refused
    asked = [bench.enqueue(f"d{before + i}", patience=patience) for i in range(1, times + 1)]
    assert not any(answer.granted for answer in asked)
    return [answer.repeated_for > 0 for answer in asked]


def test_rush_on_a_key_that_runs_as_it_should_is_no_warning(bench: Bench) -> None:
    bench.start("d0", "h0")
    assert not any(refused(bench, 120))
    assert bench.counters["repeated"] == 0
    assert bench.store.surroundings(bench.key.digest).refused == 120


def test_refusals_for_longer_than_is_no_wonder_are_told_at_once_and_then_at_the_next_power_of_ten(
    bench: Bench,
) -> None:
    bench.start("d0", "h0", lease=HOLD)
    refused(bench, 50)
    bench.later(LEASE + 1)
    told = bench.enqueue("late", patience=LEASE)
    assert (told.times, told.repeated_for) == (51, pytest.approx(LEASE + 1, abs=20))
    assert not any(refused(bench, 48))
    assert refused(bench, 1) == [True]
    assert bench.counters["repeated"] == 2
    assert bench.store.surroundings(bench.key.digest).refused == 100


def test_few_refusals_are_no_warning_however_long_they_take(bench: Bench) -> None:
    bench.start("d0", "h0", lease=HOLD)
    told = []
    for _ in range(10):
        bench.later(LEASE)
        told += refused(bench, 1)
    assert told == [False] * 9 + [True]


def test_run_that_takes_as_long_as_runs_do_is_no_wonder(bench: Bench) -> None:
    bench.start("d0", "h0", lease=HOLD)
    bench.end("d0", "h0", held=900.0)
    bench.start("d1", "h1", lease=HOLD)
    refused(bench, 10)
    bench.later(600)
    assert not any(refused(bench, 10))
    bench.later(301)
    assert any(refused(bench, 1))


def test_streak_ends_when_the_key_runs(bench: Bench) -> None:
    bench.enqueue("d0")
    refused(bench, 20)
    bench.start("d0", "h0")
    bench.later(LEASE - 1)
    refused(bench, 1)
    since = bench.store.surroundings(bench.key.digest).refused_since
    assert since is not None
    assert (bench.store.surroundings(bench.key.digest).refused, bench.counters["repeated"]) == (1, 0)


def test_window_refuses_by_design(bench: Bench) -> None:
    feed = bench.of("until_expired")
    feed.enqueue("d0")
    assert feed.enqueue("d1").times == 0
