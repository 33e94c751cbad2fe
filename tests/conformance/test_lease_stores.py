"""What every lease store does, in sentences.  Each runs on the memory twin and on a real server.

``test_lease_controls`` runs them again on stores that are broken on purpose, and expects them to fail.
"""

from __future__ import annotations

from itertools import product

import pytest

from celery_once_fenced.policy import SPANS
from celery_once_fenced.stores import Renewal
from celery_once_fenced.stores.counters import begun_of, runs_of
from tests.conformance.lease_bench import HOLD, LEASE, Bench, key

WINDOW = 600.0


# --- the table of spans -------------------------------------------------------------------------------------

REFUSED_BY = {
    "until_executed": {"q", "r"},
    "until_executing": {"q"},
    "until_expired": {"q"},
    "while_executing": set(),
    "until_and_while_executing": {"q"},
}
NEEDS_R = {"until_executed", "while_executing", "until_and_while_executing"}
CLEARS_Q = NEEDS_R - {"while_executing"} | {"until_executing"}


def occupy(bench: Bench, slots: str) -> None:
    if "r" in slots:
        bench.of("while_executing").start("runner", "other holder")
    if "q" in slots:
        bench.of("until_expired").enqueue("queuer")


@pytest.mark.parametrize(("unique", "occupied"), list(product(SPANS, ["", "q", "r", "qr"])))
def test_enqueue_is_refused_as_the_span_says(bench: Bench, unique: str, occupied: str) -> None:
    occupy(bench, occupied)
    answer = bench.of(unique).enqueue("d1")
    in_the_way = REFUSED_BY[unique] & set(occupied)
    assert answer.granted is not bool(in_the_way)
    assert (answer.by.slot if answer.by else "") == min(in_the_way, default="")
    taken = answer.granted and unique != "while_executing"
    assert bench.holder("q") == ("d1" if taken else "queuer" if "q" in occupied else None)


@pytest.mark.parametrize(("unique", "occupied"), list(product(SPANS, ["", "r"])))
def test_start_moves_the_slots_as_the_span_says(bench: Bench, unique: str, occupied: str) -> None:
    bench.of(unique).enqueue("d1")
    occupy(bench, occupied)
    queued, answer = bench.holder("q"), bench.of(unique).start("d1", "h1").answer
    assert answer == ("busy" if occupied and unique in NEEDS_R else "granted")
    if answer == "busy":
        assert (bench.holder("q"), bench.holder("r")) == (queued, "other holder")
    else:
        assert bench.holder("q") == (None if unique in CLEARS_Q else queued)
        assert bench.holder("r") == ("h1" if unique in NEEDS_R else "other holder" if occupied else None)


@pytest.mark.parametrize("unique", SPANS)
def test_start_frees_no_q_of_another_call(bench: Bench, unique: str) -> None:
    occupy(bench, "q")
    assert bench.of(unique).start("d1").answer == "granted"
    assert bench.holder("q") == "queuer"


@pytest.mark.parametrize("unique", ["until_executing", "until_expired"])
def test_span_without_r_sees_its_twin_in_a_slot_of_its_own(bench: Bench, unique: str) -> None:
    task = bench.of(unique)
    task.enqueue("d1")
    assert task.start("d1", "h1", guard=True).answer == "granted"
    assert task.start("d1", "h2", guard=True).answer == "twin"
    assert task.start("d2", "h3", guard=True).answer == "granted"
    assert (bench.holder("q") is None) is (unique == "until_executing")
    assert bench.holder("r") is None


# --- enqueue ------------------------------------------------------------------------------------------------


def test_refusal_tells_who_holds_the_key_and_for_how_long(bench: Bench) -> None:
    bench.enqueue("d1", task_id="t1")
    by = bench.enqueue("d2").by
    assert by is not None
    assert (by.slot, by.digest, by.holder, by.delivery, by.task_id) == (
        "q",
        bench.key.digest,
        "d1",
        "d1",
        "t1",
    )
    assert (by.task, by.text, by.worker) == (bench.task, bench.key.text, "")
    assert HOLD - 10 < by.left <= HOLD


def test_lost_reply_of_enqueue_is_no_refusal(bench: Bench) -> None:
    assert bench.enqueue("d1").granted
    assert bench.enqueue("d1").granted
    assert "suppressed" not in bench.counters


def test_same_delivery_is_granted_again_though_its_span_is_refused_by_a_running_one(bench: Bench) -> None:
    bench.enqueue("d1")
    occupy(bench, "r")
    assert bench.enqueue("d1").granted


def test_hold_is_extended_and_never_shortened(bench: Bench) -> None:
    bench.enqueue("d1", hold=HOLD)
    bench.enqueue("d1", hold=60)
    assert left(bench, "q") == pytest.approx(HOLD, abs=10)
    bench.enqueue("d1", hold=2 * HOLD)
    assert left(bench, "q") == pytest.approx(2 * HOLD, abs=10)


def test_same_task_id_in_another_delivery_is_a_duplicate(bench: Bench) -> None:
    bench.enqueue("d1", task_id="t1")
    assert not bench.enqueue("d2", task_id="t1").granted


def test_awaited_refusal_is_no_suppression(bench: Bench) -> None:
    bench.enqueue("d1")
    assert not bench.enqueue("d2", mode="awaited").granted
    bench.enqueue("d3")
    assert (bench.counters["awaiting"], bench.counters["suppressed"]) == (1, 1)


def test_every_suppression_is_counted(bench: Bench) -> None:
    bench.enqueue("d1")
    for i in range(5):
        bench.enqueue(f"tick {i}")
    assert bench.counters["suppressed"] == 5


def test_window_is_as_long_as_the_first_call_said(bench: Bench) -> None:
    feed = bench.of("until_expired")
    feed.enqueue("d1", hold=WINDOW)
    bench.later(WINDOW / 2)
    feed.enqueue("d1", hold=WINDOW)
    feed.defer("d1", hold=WINDOW)
    feed.enqueue("d2", hold=WINDOW, mode="successor", task_id="task of d1")
    bench.later(WINDOW / 2)
    assert feed.enqueue("d3").granted


def test_queued_hold_lapses(bench: Bench) -> None:
    bench.enqueue("d1")
    bench.later(HOLD + 1)
    assert bench.enqueue("d2").granted


# --- retries and deferrals ----------------------------------------------------------------------------------


def test_retry_takes_the_q_of_its_own_task(bench: Bench) -> None:
    bench.enqueue("d1", task_id="t1")
    assert bench.enqueue("d2", task_id="t1", mode="successor").granted
    assert bench.holder("q") == "d2"


def test_retry_takes_q_while_its_predecessor_still_runs(bench: Bench) -> None:
    bench.enqueue("d1", task_id="t1")
    bench.start("d1", "h1", task_id="t1")
    bench.enqueue("d2", task_id="t1", mode="successor")
    assert (bench.holder("q"), bench.holder("r")) == ("d2", "h1")
    assert not bench.enqueue("d3").granted


def test_retry_leaves_the_q_of_another_task_and_is_not_refused(bench: Bench) -> None:
    bench.enqueue("d1")
    assert bench.enqueue("d2", task_id="t2", mode="successor").granted
    assert bench.holder("q") == "d1"


def test_retry_waits_for_its_predecessor_then_runs(bench: Bench) -> None:
    bench.start("d1", "h1", task_id="t1")
    bench.enqueue("d2", task_id="t1", mode="successor")
    assert bench.start("d2", "h2", task_id="t1").answer == "successor"
    bench.end("d1", "h1", task_id="t1")
    assert bench.start("d2", "h2", task_id="t1").answer == "granted"
    assert bench.holder("q") is None


def test_retry_that_was_published_twice_takes_over_the_q_of_the_other(bench: Bench) -> None:
    """Killed between setting q and publishing, a retry is made again: the first q must not block the key."""
    bench.enqueue("d2", task_id="t1", mode="successor")
    assert bench.start("d3", "h3", task_id="t1").answer == "granted"
    assert bench.holder("q") is None


def test_deferral_extends_its_own_q(bench: Bench) -> None:
    bench.enqueue("d1")
    bench.later(HOLD / 2)
    assert not bench.defer("d1").overflow
    assert left(bench, "q") == pytest.approx(HOLD, abs=10)
    assert bench.counters["deferred"] == 1


def test_deferral_of_another_delivery_moves_nothing(bench: Bench) -> None:
    bench.enqueue("d1")
    bench.later(HOLD / 2)
    assert not bench.defer("d2").overflow
    assert bench.holder("q") == "d1"
    assert left(bench, "q") == pytest.approx(HOLD / 2, abs=10)


def test_deferral_takes_no_free_key(bench: Bench) -> None:
    assert not bench.defer("d1").overflow
    assert bench.holder("q") is None


# --- start --------------------------------------------------------------------------------------------------


def test_lost_reply_of_start_is_granted_and_extended(bench: Bench) -> None:
    bench.start("d1", "h1")
    bench.later(LEASE / 2)
    assert bench.start("d1", "h1").answer == "granted"
    assert left(bench, "r") == pytest.approx(LEASE, abs=5)
    assert bench.counters["granted"] == 1


def test_redelivery_meets_its_twin_and_waits_for_its_lease(bench: Bench) -> None:
    bench.start("d1", "h1")
    twin = bench.start("d1", "h2", redelivery=True)
    assert twin.answer == "twin"
    assert twin.wait == pytest.approx(LEASE, abs=5)
    assert bench.holder("r") == "h1"


def test_start_of_another_task_is_told_who_runs(bench: Bench) -> None:
    bench.start("d1", "h1", task_id="t1")
    busy = bench.start("d2", "h2")
    assert busy.answer == "busy"
    assert busy.by is not None
    assert (busy.by.slot, busy.by.holder, busy.by.task_id) == ("r", "h1", "t1")
    assert (busy.by.delivery, busy.by.worker) == ("d1", "celery@host")


def test_killed_worker_frees_the_key_within_one_lease(bench: Bench) -> None:
    bench.enqueue("d1")
    bench.start("d1", "h1")
    bench.later(LEASE + 1)
    assert bench.start("d1", "h2", redelivery=True).answer == "granted"
    assert bench.counters["expired"] == 1


def test_marks_stop_the_redelivery_alone(bench: Bench) -> None:
    bench.start("d1", "h1")
    bench.end("d1", "h1", mark=LEASE)
    assert bench.start("d2", "h2", redelivery=True).answer == "granted"


def test_retry_with_the_same_task_id_is_no_redelivery(bench: Bench) -> None:
    """The next delivery of a settled task id runs: the delivery is the identity, not the task."""
    bench.start("d1", "h1", task_id="t1")
    bench.end("d1", "h1", task_id="t1", mark=LEASE)
    bench.settle("d1")
    assert bench.start("d2", "h2", task_id="t1", redelivery=True).answer == "granted"


def test_first_delivery_does_not_look_at_marks(bench: Bench) -> None:
    bench.settle("d1")
    assert bench.start("d1").answer == "granted"


# --- renew --------------------------------------------------------------------------------------------------


def test_renewal_keeps_the_lease(bench: Bench) -> None:
    bench.start("d1", "h1")
    for _ in range(3):
        bench.later(LEASE * 0.6)
        assert bench.renew("h1")
    assert left(bench, "r") == pytest.approx(LEASE, abs=5)
    assert bench.counters["renewed"] == 3


def test_lapsed_lease_is_never_made_again(bench: Bench) -> None:
    bench.start("d1", "h1")
    bench.later(LEASE + 1)
    assert not bench.renew("h1")
    assert bench.holder("r") is None


def test_zombie_does_not_renew_its_successors_lease(bench: Bench) -> None:
    """Same task, same delivery, same worker: only the holder tells them apart."""
    bench.start("d1", "h1")
    bench.later(LEASE + 1)
    bench.start("d1", "h2", redelivery=True)
    bench.later(LEASE / 2)
    assert not bench.renew("h1")
    assert left(bench, "r") == pytest.approx(LEASE / 2, abs=5)


def test_many_leases_are_renewed_in_the_order_asked(bench: Bench) -> None:
    keys = [key(f"feed {i}") for i in range(40)]
    for i, each in enumerate(keys):
        if i % 3:
            Bench(bench.store, key=each).start(f"d{i}", f"h{i}")
    asks = [Renewal(each.digest, each.digest, f"h{i}", bench.task, LEASE) for i, each in enumerate(keys)]
    assert bench.store.renew(asks) == [bool(i % 3) for i in range(40)]
    assert bench.store.renew([]) == []


# --- end and settle -----------------------------------------------------------------------------------------


def test_end_frees_the_key(bench: Bench) -> None:
    """Before the result is out: `t.delay(x).get(); t.delay(x)` is not suppressed."""
    bench.enqueue("d1")
    bench.start("d1", "h1")
    assert bench.end("d1", "h1", mark=LEASE)
    assert bench.enqueue("d2").granted
    assert bench.counters["released"] == 1


def test_late_finisher_does_not_free_the_next_holder(bench: Bench) -> None:
    bench.start("d1", "h1")
    bench.later(LEASE + 1)
    bench.start("d2", "h2")
    assert not bench.end("d1", "h1")
    assert bench.holder("r") == "h2"
    assert bench.start("d3").answer == "busy"
    assert (bench.counters["lost"], bench.counters["expired"]) == (1, 1)


def test_what_acquired_nothing_frees_nothing(bench: Bench) -> None:
    """A skipped duplicate, even of the same task id and delivery, ends without any effect."""
    bench.start("d1", "h1", task_id="t1")
    assert bench.start("d1", "h2", task_id="t1").answer == "twin"
    assert not bench.end("d1", "h2", task_id="t1")
    assert bench.holder("r") == "h1"


def test_end_twice_is_once(bench: Bench) -> None:
    bench.start("d1", "h1")
    assert bench.end("d1", "h1")
    bench.start("d2", "h2")
    assert not bench.end("d1", "h1")
    assert bench.holder("r") == "h2"


def test_redelivery_between_end_and_settle_waits_for_the_mark(bench: Bench) -> None:
    bench.start("d1", "h1")
    bench.end("d1", "h1", mark=LEASE)
    ending = bench.start("d1", "h2", redelivery=True)
    assert ending.answer == "ending"
    assert ending.wait == pytest.approx(LEASE, abs=5)


def test_redelivery_after_settle_is_dropped(bench: Bench) -> None:
    bench.start("d1", "h1")
    bench.end("d1", "h1", mark=LEASE)
    bench.settle("d1", window=WINDOW)
    bench.later(LEASE + 1)
    assert bench.start("d1", "h2", redelivery=True).answer == "done"
    bench.later(WINDOW)
    assert bench.start("d1", "h2", redelivery=True).answer == "granted"


def test_killed_between_end_and_settle_runs_again(bench: Bench) -> None:
    bench.start("d1", "h1")
    bench.end("d1", "h1", mark=LEASE)
    bench.later(LEASE + 1)
    assert bench.start("d1", "h2", redelivery=True).answer == "granted"


def test_settle_without_a_window_only_clears_the_mark(bench: Bench) -> None:
    bench.start("d1", "h1")
    bench.end("d1", "h1", mark=LEASE)
    bench.settle("d1", window=0)
    assert bench.start("d1", "h2", redelivery=True).answer == "granted"


def test_mark_is_left_by_a_late_finisher_too(bench: Bench) -> None:
    bench.start("d1", "h1")
    bench.later(LEASE + 1)
    assert not bench.end("d1", "h1", mark=LEASE)
    assert bench.start("d1", "h2", redelivery=True).answer == "ending"


def test_tombstone_outranks_the_mark_of_a_late_twin(bench: Bench) -> None:
    bench.settle("d1")
    bench.end("d1", "h1", mark=LEASE)
    assert bench.start("d1", "h2", redelivery=True).answer == "done"


def test_dropped_redelivery_frees_its_leftover_q_and_no_others(bench: Bench) -> None:
    bench.settle("d1")
    bench.enqueue("d1")
    bench.start("d1", redelivery=True)
    assert bench.holder("q") is None
    bench.enqueue("d2", task_id="task of d1")
    bench.start("d1", redelivery=True)
    assert bench.holder("q") == "d2"


def test_dropped_redelivery_keeps_its_window(bench: Bench) -> None:
    feed = bench.of("until_expired")
    feed.enqueue("d1")
    feed.settle("d1")
    assert feed.start("d1", guard=True).answer == "done"
    assert bench.holder("q") == "d1"


def test_requeue_gives_q_back_to_the_delivery(bench: Bench) -> None:
    bench.start("d1", "h1", task_id="t1")
    assert bench.end("d1", "h1", task_id="t1", requeue=HOLD)
    q = bench.slot("q")
    assert q is not None
    assert (q.delivery, q.task_id, q.task, q.text) == ("d1", "t1", bench.task, bench.key.text)
    assert not bench.enqueue("d2").granted


@pytest.mark.parametrize("on_duplicate", ["return_existing", "replace"])
def test_requeue_says_since_when_the_call_is_queued(bench: Bench, on_duplicate: str) -> None:
    task = bench.of("until_executed", on_duplicate)
    task.enqueue("d1")
    queued = task.slot("q")
    assert queued is not None
    for start in range(2):
        bench.later(10)
        task.start("d1", f"h{start}")
        task.end("d1", f"h{start}", requeue=HOLD)
        again = task.slot("q")
        assert again is not None
        assert again.since == pytest.approx(queued.since, abs=1e-6)


def test_requeue_of_a_call_that_had_no_q_says_now(bench: Bench) -> None:
    assert bench.start("d1", "h1").queued_since == 0
    bench.end("d1", "h1", requeue=HOLD)
    again, now = bench.slot("q"), bench.enqueue("d2").by
    assert (again, now) != (None, None)
    assert again.since > 1_600_000_000  # type: ignore[union-attr]


def test_requeue_leaves_the_q_of_another(bench: Bench) -> None:
    bench.start("d1", "h1")
    bench.of("until_executing").enqueue("d2")
    assert bench.end("d1", "h1", requeue=HOLD)
    assert bench.holder("q") == "d2"


# --- released by a person -------------------------------------------------------------------------------------


def test_release_by_a_person_is_counted_and_is_no_loss(bench: Bench) -> None:
    bench.start("d1", "h1")
    assert bench.release("r", "h1", by_hand=True)
    assert bench.store.was_freed(bench.key.digest, "h1")
    assert not bench.renew("h1")
    assert not bench.end("d1", "h1", held=1.0)
    counted = bench.counters
    assert (counted["released_by_hand"], counted["lost"], counted["released"]) == (1, 0, 0)
    assert counted["expired"] == 0


def test_release_by_a_person_is_no_loss_though_the_next_one_runs(bench: Bench) -> None:
    bench.start("d1", "h1")
    bench.release("r", "h1", by_hand=True)
    bench.start("d2", "h2")
    assert not bench.end("d1", "h1")
    assert bench.holder("r") == "h2"
    assert not bench.store.was_freed(bench.key.digest, "h2")
    assert bench.counters["lost"] == 0


def test_release_that_nobody_decided_is_a_loss(bench: Bench) -> None:
    bench.start("d1", "h1")
    assert bench.release("r", "h1")
    assert not bench.store.was_freed(bench.key.digest, "h1")
    bench.end("d1", "h1")
    assert (bench.counters["released_by_hand"], bench.counters["lost"]) == (0, 1)


def test_lapse_that_nobody_decided_is_a_loss(bench: Bench) -> None:
    bench.start("d1", "h1")
    bench.later(LEASE + 1)
    assert not bench.release("r", "h1", by_hand=True)
    assert not bench.store.was_freed(bench.key.digest, "h1")
    bench.end("d1", "h1")
    assert (bench.counters["released_by_hand"], bench.counters["lost"]) == (0, 1)


def test_mark_of_a_release_lasts_as_long_as_its_lease_would_have(bench: Bench) -> None:
    """A live holder has renewed by then, and says at its end what it learned."""
    bench.start("d1", "h1", lease=LEASE)
    bench.later(LEASE / 2)
    bench.release("r", "h1", by_hand=True)
    bench.later(LEASE / 2 - 5)
    assert bench.store.was_freed(bench.key.digest, "h1")
    bench.later(10)
    assert not bench.store.was_freed(bench.key.digest, "h1")
    bench.end("d1", "h1", freed=True)
    assert bench.counters["lost"] == 0


def test_queued_call_that_a_person_releases_is_counted_and_leaves_no_mark(bench: Bench) -> None:
    bench.enqueue("d1")
    assert bench.release("q", "d1", by_hand=True)
    assert not bench.store.was_freed(bench.key.digest, "d1")
    assert bench.counters["released_by_hand"] == 1


def test_twin_guard_that_a_person_releases_is_no_loss(bench: Bench) -> None:
    task = bench.of("until_executing")
    task.start("d1", "h1", guard=True)
    assert task.release("r", "h1", "d1", by_hand=True)
    assert not task.end("d1", "h1", slot="d1")
    assert (bench.counters["released_by_hand"], bench.counters["lost"]) == (1, 0)


# --- release ------------------------------------------------------------------------------------------------


def test_failed_publish_gives_the_key_back(bench: Bench) -> None:
    bench.enqueue("d1")
    assert bench.release("q", "d1")
    assert bench.enqueue("d2").granted


def test_release_compares_the_holder(bench: Bench) -> None:
    bench.start("d1", "h1")
    bench.of("until_executing").enqueue("d2")
    assert not bench.release("q", "d1")
    assert not bench.release("r", "h2")
    assert not bench.release("r", "d1")
    assert (bench.holder("q"), bench.holder("r")) == ("d2", "h1")
    assert bench.release("r", "h1")
    assert not bench.release("r", "h1")


def test_twin_guard_is_released_by_the_name_of_its_slot(bench: Bench) -> None:
    feed = bench.of("until_executing")
    feed.start("d1", "h1", guard=True)
    (hold,) = feed.store.holds()
    assert (hold.name, hold.digest) == ("d1", bench.key.digest)
    assert feed.release(hold.slot, hold.holder, hold.name)
    assert feed.start("d1", "h2", guard=True).answer == "granted"


# --- seeing it ----------------------------------------------------------------------------------------------


def test_look_shows_both_slots(bench: Bench) -> None:
    assert bench.store.look(bench.key.digest) == []
    bench.start("d1", "h1")
    bench.of("until_executing").enqueue("d2")
    assert [hold.slot for hold in bench.store.look(bench.key.digest)] == ["q", "r"]


def test_holds_lists_what_is_held_soonest_to_lapse_first(bench: Bench) -> None:
    for i, lease in enumerate([300, 100, 200]):
        Bench(bench.store, key=key(f"feed {i}")).start(f"d{i}", f"h{i}", lease=lease)
    bench.store.release(key("feed 2").digest, "r", "h2")
    listed = list(bench.store.holds())
    assert sorted(hold.holder for hold in listed) == ["h0", "h1"]
    assert [hold.left for hold in sorted(listed, key=lambda hold: (hold.digest[0], hold.left))] == [
        hold.left for hold in listed
    ]


def test_holds_lists_more_than_a_page(bench: Bench) -> None:
    same_bucket = [each for each in (key(f"feed {i}") for i in range(4000)) if each.digest[0] == "7"]
    for i, each in enumerate(same_bucket):
        Bench(bench.store, key=each).start(f"d{i}")
    listed = [hold.digest for hold in bench.store.holds()]
    assert len(listed) == len(set(listed)) == len(same_bucket) > 200


def test_expiry_is_counted_once_for_the_task_that_lapsed(bench: Bench) -> None:
    bench.start("d1", "h1")
    bench.later(LEASE + 1)
    other = Bench(bench.store, key=bench.key, task="shop.other")
    other.start("d2", "h2")
    assert [hold.task for hold in bench.store.holds()] == ["shop.other"]
    assert (bench.counters["expired"], other.counters["expired"]) == (1, 0)
    assert bench.counters["expired"] == 1


def test_lapsed_queued_hold_is_no_expiry(bench: Bench) -> None:
    bench.enqueue("d1")
    bench.later(HOLD + 1)
    assert "expired" not in bench.counters
    assert list(bench.store.holds()) == []


def test_run_times_go_into_the_histogram(bench: Bench) -> None:
    for i, held in enumerate([0.004, 0.2, 0.2, 100_000.0]):
        bench.start(f"d{i}")
        bench.end(f"d{i}", held=held)
    counters = bench.counters
    assert {name: value for name, value in counters.items() if name.startswith("hold")} == {
        "hold_le_0.01": 1,
        "hold_le_0.25": 2,
        "hold_le_inf": 1,
        "hold_sum_ms": 100_000_404,
        "hold_max_ms": 100_000_000,
    }


def test_start_whose_body_was_not_begun_is_counted(bench: Bench) -> None:
    bench.start("d1", "h1")
    bench.end("d1", "h1", entered=False, counter="replayed")
    bench.start("d2", "h2")
    bench.end("d2", "h2", held=1.0)
    counted = bench.counters
    assert (counted["granted"], counted["not_entered"], counted["replayed"]) == (2, 1, 1)
    assert (begun_of(counted), runs_of(counted)) == (1, 1)
    assert sum(bench.store.hours()[bench.task]["not_entered"]) == 1


def test_further_counters_are_added_to_the_tasks(bench: Bench) -> None:
    bench.store.count(bench.key.digest, bench.task, "lost")
    bench.start("d1")
    bench.end("d1", counter="replayed")
    assert (bench.counters["lost"], bench.counters["replayed"]) == (1, 1)


@pytest.mark.parametrize("odd", ["a|b", "100%", "%7C|%25", "ü 日本", "\n \r\n", "x" * 300])
def test_any_text_comes_back_as_it_was(bench: Bench, odd: str) -> None:
    bench.task = f"task {odd}"
    bench.key = key(f"key {odd}")
    bench.enqueue(f"d {odd}", task_id=f"t {odd}")
    bench.start(f"d {odd}", f"h {odd}", task_id=f"t {odd}")
    (hold,) = bench.store.holds()
    assert (hold.holder, hold.delivery, hold.task_id) == (f"h {odd}", f"d {odd}", f"t {odd}")
    assert (hold.task, hold.text) == (f"task {odd}", f"key {odd}"[:100])
    assert bench.release("r", f"h {odd}")
    assert bench.counters["granted"] == 1


def left(bench: Bench, slot: str) -> float:
    return next(hold.left for hold in bench.store.look(bench.key.digest) if hold.slot == slot)
