"""Guard, admission and the correctness tier: who is asked what, in which order, and what comes of each answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from celery_once_fenced.admission import Admission, Call, Permit
from celery_once_fenced.decisions import in_line_since
from celery_once_fenced.errors import (
    ConfigError,
    DuplicateError,
    ExhaustedError,
    FencedOffError,
    KeyReusedError,
    LeaseLostError,
    RecordedError,
    StoreUnavailableError,
)
from celery_once_fenced.events import observing
from celery_once_fenced.grant import current_grant
from celery_once_fenced.guard import SUCCESSOR_PAUSES, Guard
from celery_once_fenced.lease import queued_hold
from celery_once_fenced.policy import SPANS
from celery_once_fenced.run import Again, Conflict, Defer, Drop, Execution, Returned, Skip
from celery_once_fenced.stores import Defer as Deferral
from celery_once_fenced.stores import Deferred, Enqueue, Held, Mode, Settle
from celery_once_fenced.stores.counters import begun_of
from tests.fixtures.deliveries import (
    LEASE,
    Bench,
    ConnectionLostError,
    RequeueError,
    RetryError,
    delivery,
    fenced,
    key,
    policy,
)
from tests.fixtures.ledger import eventually


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    with observing(bench.events.append):
        yield bench


def never(grant: Any) -> None:
    raise AssertionError("the body must not run")


def raising(error: BaseException) -> Callable[[Any], None]:
    def body(grant: Any) -> None:
        raise error

    return body


# --- efficiency: start, run, end --------------------------------------------------------------------------------------


def test_run_takes_q_to_r_for_the_body_and_frees_it(bench: Bench) -> None:
    ex = delivery()
    bench.enqueue(ex)
    assert bench.run(ex, lambda grant: bench.leases.slots()) == Returned({"r": ex.task_id})
    assert bench.leases.slots() == {}


def test_run_costs_two_round_trips(bench: Bench) -> None:
    bench.run(delivery())
    assert bench.leases.asked == ["start", "end"]


def test_every_start_has_a_fresh_holder(bench: Bench) -> None:
    seen = []
    for _ in range(2):
        bench.run(delivery(redelivery_possible=False), lambda grant: seen.append(holder_of(bench)))
    assert seen[0] != seen[1]


def holder_of(bench: Bench) -> str:
    return bench.leases.look(key().digest)[0].holder


def test_body_sees_its_grant(bench: Bench) -> None:
    grant = bench.run(delivery(), lambda grant: (grant, current_grant())).value
    assert grant[0] is grant[1]
    assert (grant[0].key, grant[0].token) == ("shop.post:1", None)


def test_error_of_the_body_passes_and_frees_the_key(bench: Bench) -> None:
    with pytest.raises(ZeroDivisionError):
        bench.run(delivery(), lambda grant: 1 / 0)
    assert bench.leases.slots() == {}


def test_span_without_r_and_without_redelivery_asks_nothing(bench: Bench) -> None:
    ex = delivery(policy=policy(unique="until_expired", window=60), redelivery_possible=False)
    assert bench.run(ex) == Returned("done")
    assert bench.leases.asked == []


def test_late_finisher_does_not_release_the_next_holder(bench: Bench) -> None:
    ex, other = delivery(), delivery("d2")

    def outlive(grant: Any) -> None:
        bench.clock.pass_(LEASE + 1)
        assert bench.run(replace(other, redelivery_possible=False), lambda _: None)
        start(bench, other)

    bench.run(ex, outlive)
    assert bench.leases.slots() == {"r": other.task_id}
    eventually(lambda: bench.named("lease.lost"))


def start(bench: Bench, ex: Execution, holder: str = "h") -> None:
    """Let ``ex`` run, elsewhere."""
    question = ex.start(holder)
    assert question is not None
    assert bench.leases.start(question).answer == "granted"


def test_loss_is_told_to_the_body_and_fails_nothing(bench: Bench) -> None:
    def body(grant: Any) -> bool:
        assert not grant.lost
        bench.clock.pass_(LEASE)
        with pytest.raises(LeaseLostError):
            grant.check()
        return bool(grant.lost)

    assert bench.run(delivery(), body) == Returned(True)


# --- efficiency: what end leaves --------------------------------------------------------------------------------------


def test_redelivery_between_end_and_settle_defers(bench: Bench) -> None:
    bench.run(delivery())
    aside = bench.run(delivery(), never)
    assert (type(aside), aside.why) == (Defer, "ending")


def test_redelivery_after_settle_is_dropped(bench: Bench) -> None:
    ex = delivery()
    bench.run(ex)
    bench.guard.settle(Settle(ex.key, ex.delivery, 3600))
    assert bench.run(ex, never) == Drop("settled")


def test_where_no_redelivery_is_possible_no_mark_is_left(bench: Bench) -> None:
    ex = delivery(redelivery_possible=False)
    bench.run(ex)
    assert bench.run(replace(ex, redelivery_possible=True)) == Returned("done")


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), RequeueError()])
def test_message_that_is_given_back_leaves_no_mark(bench: Bench, error: BaseException) -> None:
    with pytest.raises(type(error)):
        bench.run(delivery(), raising(error))
    assert bench.run(delivery()) == Returned("done")


@pytest.mark.parametrize("error", [ValueError(), RetryError()])
def test_error_and_retry_leave_the_mark(bench: Bench, error: Exception) -> None:
    with pytest.raises(type(error)):
        bench.run(delivery(), raising(error))
    assert isinstance(bench.run(delivery(), never), Defer)


def test_body_whose_lease_a_person_released_ends_as_it_would_and_is_not_counted_as_lost(bench: Bench) -> None:
    def released(_grant: Any) -> str:
        (r,) = bench.leases.look(key().digest)
        assert bench.leases.release(r.digest, "r", r.holder, "", by_hand=True)
        return "done"

    assert bench.run(delivery(), released) == Returned("done")
    assert (bench.named("lease.lost"), len(bench.named("lease.freed_by_hand"))) == ([], 1)
    counted = bench.leases.stats()["shop.post"]
    assert (counted["released_by_hand"], counted.get("lost", 0)) == (1, 0)


def test_requeue_gives_q_back(bench: Bench) -> None:
    with pytest.raises(RequeueError):
        bench.run(delivery(), raising(RequeueError()))
    assert bench.leases.slots() == {"q": "task of d1"}


def test_requeue_never_opens_a_window(bench: Bench) -> None:
    """The q of until_expired is the window of a call: only a new call opens one (E10)."""
    ex = delivery(policy=policy(unique="until_expired", window=1))
    with pytest.raises(RequeueError):
        bench.run(ex, raising(RequeueError()))
    assert bench.leases.slots() == {}


def test_end_that_redis_does_not_answer_fails_nothing(bench: Bench) -> None:
    bench.leases.away = {"end"}
    assert bench.run(delivery()) == Returned("done")
    assert [event.fields["operation"] for event in bench.named("store.failed")] == ["end"]


def test_key_of_an_end_that_redis_did_not_answer_is_freed_when_it_answers_again(bench: Bench) -> None:
    bench.leases.away = {"end"}
    bench.run(delivery(redelivery_possible=False))
    assert bench.leases.slots() == {"r": "task of d1"}
    bench.leases.away = set()
    assert bench.run(delivery("d2", redelivery_possible=False)) == Returned("done")
    assert bench.leases.slots() == {}


def test_settle_that_redis_does_not_answer_fails_nothing(bench: Bench) -> None:
    bench.leases.away = {"settle"}
    bench.guard.settle(Settle(key(), "d1", 60))
    assert [event.fields["operation"] for event in bench.named("store.failed")] == ["settle"]


# --- efficiency: what stands in the way -------------------------------------------------------------------------------


def test_twin_steps_aside_by_deferral(bench: Bench) -> None:
    start(bench, delivery())
    aside = bench.run(delivery(), never)
    assert (type(aside), aside.why) == (Defer, "twin")
    assert aside.seconds == pytest.approx(LEASE, rel=0.01)


def test_successor_waits_in_place_for_its_predecessor(bench: Bench) -> None:
    first, retry = delivery(), delivery("d2", task_id="task of d1", seen_before=True)
    start(bench, first)

    def end_soon() -> None:
        if len(bench.slept) == 3:
            bench.leases.release(key().digest, "r", "h")

    bench.during_sleep = end_soon
    assert bench.run(retry) == Returned("done")
    assert bench.slept == list(SUCCESSOR_PAUSES[:3])


def test_successor_of_a_long_predecessor_defers_after_a_second(bench: Bench) -> None:
    start(bench, delivery())
    aside = bench.run(delivery("d2", task_id="task of d1"), never)
    assert (type(aside), aside.why) == (Defer, "successor")
    assert sum(bench.slept) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("on_conflict", "aside"),
    [("skip", Skip("task of d1")), ("raise", Conflict("task of d1"))],
)
def test_conflict_is_settled_as_the_policy_says(bench: Bench, on_conflict: Any, aside: object) -> None:
    start(bench, delivery())
    assert bench.run(delivery("d2", policy=policy(on_conflict=on_conflict)), never) == aside


def test_skipped_call_frees_its_q_and_asks_once_more(bench: Bench) -> None:
    """Whom its q suppressed in the meantime relies on a run that is not over (E14)."""
    ex = delivery("d2")
    bench.enqueue(ex)
    start(bench, delivery())
    bench.leases.asked.clear()
    assert bench.run(ex, never) == Skip("task of d1")
    assert bench.leases.asked == ["start", "release", "start"]
    assert bench.leases.slots() == {"r": "task of d1"}


def test_conflict_that_defers_comes_back_soon(bench: Bench) -> None:
    start(bench, delivery())
    aside = bench.run(delivery("d2", policy=policy(on_conflict="defer")), never)
    assert (aside.why, aside.seconds) == ("busy", 0.25)


def test_redelivered_or_retried_message_is_never_skipped(bench: Bench) -> None:
    start(bench, delivery())
    assert isinstance(bench.run(delivery("d2", seen_before=True), never), Defer)


@pytest.mark.parametrize("on_conflict", ["skip", "defer", "raise"])
def test_awaited_call_waits_for_the_holder_whatever_the_policy(bench: Bench, on_conflict: Any) -> None:
    start(bench, delivery())
    aside = bench.run(delivery("d2", policy=policy(on_conflict=on_conflict), awaited=True), never)
    assert (aside.why, aside.answer_from) == ("awaited", "task of d1")


def test_awaited_call_is_answered_from_the_holders_success(bench: Bench) -> None:
    ex = delivery("d2", awaited=True, answer_from="t1", stored_success=lambda task_id: (True, None))
    assert bench.run(ex, never) == Returned(None)
    assert bench.leases.slots() == {}


def test_awaited_call_waits_for_a_result_that_is_on_its_way_out(bench: Bench) -> None:
    answers = iter([(None, None), (None, None), (True, 7)])
    ex = delivery("d2", awaited=True, answer_from="t1", stored_success=lambda task_id: next(answers))
    assert bench.run(ex, never) == Returned(7)
    assert len(bench.slept) == 2


def test_awaited_call_waits_a_second_for_a_result_that_never_comes(bench: Bench) -> None:
    ex = delivery("d2", awaited=True, answer_from="t1", stored_success=lambda task_id: (None, None))
    assert bench.run(ex) == Returned("done")
    assert sum(bench.slept) == pytest.approx(1)


def test_awaited_call_does_not_wait_for_a_holder_that_is_only_queued(bench: Bench) -> None:
    bench.enqueue(delivery("d1"))
    ex = delivery("d2", awaited=True, answer_from="task of d1", stored_success=lambda task_id: (None, None))
    assert bench.run(ex) == Returned("done")
    assert bench.slept == []


def test_awaited_call_runs_where_the_holder_did_not_succeed(bench: Bench) -> None:
    ex = delivery("d2", awaited=True, answer_from="t1")
    assert bench.run(ex) == Returned("done")


# --- efficiency: Redis is away ----------------------------------------------------------------------------------------


def test_without_redis_the_body_runs_unguarded(bench: Bench) -> None:
    bench.leases.away = {"all"}
    assert bench.run(delivery(), lambda grant: grant.remaining()) == Returned(float("inf"))
    assert bench.named("execution.unguarded")


def test_hold_of_a_delivery_that_ran_without_a_start_is_freed(bench: Bench) -> None:
    """Or it would suppress calls for as long as it lives, and stand for nothing."""
    admit = Enqueue(key(), "shop.post", policy().span, delivery().delivery, "t1", 3600.0)
    assert bench.leases.enqueue(admit).granted
    bench.leases.away = {"start"}
    bench.run(delivery())
    assert bench.leases.slots() == {}


@pytest.mark.parametrize("away", [set(), {"release"}])
def test_start_whose_answer_was_lost_is_taken_back(bench: Bench, away: set[str]) -> None:
    """Or the key is held by nobody until the lease lapses: its own message would be taken for its twin."""
    bench.leases.mute, bench.leases.away = {"start"}, away
    assert bench.run(delivery(), lambda grant: bench.leases.slots()) == Returned({"r": "task of d1"})
    assert bench.leases.slots() == ({"r": "task of d1"} if away else {})
    bench.leases.mute, bench.leases.away = set(), set()
    bench.run(delivery("d2"))
    assert bench.leases.slots() == {}
    assert bench.leases.stats()["shop.post"].get("expired", 0) == 0


def test_start_that_was_taken_back_counts_as_begun_only_where_a_body_was(bench: Bench) -> None:
    bench.hold(delivery("other", fenced(), key=key("another")), "h2")
    bench.leases.mute = {"start"}
    assert isinstance(bench.run(delivery(policy=fenced()), never), Defer), "the account is another's"
    bench.leases.mute = set()
    counters = bench.leases.stats()["shop.post"]
    assert (counters["granted"], begun_of(counters), bench.leases.slots()) == (1, 0, {})
    bench.leases.mute = {"start"}
    bench.run(delivery("d2"))
    assert begun_of(bench.leases.stats()["shop.post"]) == 1


def test_message_that_waits_keeps_its_place_until_it_leaves_it() -> None:
    waits, ex = Defer(1.0, "busy", limit=0), replace(delivery(), waiting_since=7)
    assert in_line_since(ex, waits, Deferred(False, 1, 7)) == 7
    assert in_line_since(replace(ex, waiting_since=0), waits, Deferred(False, 1, 9)) == 9
    assert in_line_since(ex, waits, None) == 7, "the store did not answer: it may be in the line"
    assert in_line_since(ex, replace(waits, limit=None), Deferred(False, 0, 7)) == 7, (
        "a twin waits for itself"
    )


def test_window_of_a_delivery_that_ran_without_a_start_stays(bench: Bench) -> None:
    """It is there to outlive the run."""
    window = policy(unique="until_expired", window=60)
    admit = Enqueue(key(), "shop.post", window.span, delivery().delivery, "t1", 60.0)
    assert bench.leases.enqueue(admit).granted
    bench.leases.away = {"start"}
    bench.run(delivery(policy=window, redelivery_possible=True))
    assert bench.leases.slots() == {"q": "t1"}


def test_without_redis_a_strict_task_defers(bench: Bench) -> None:
    bench.leases.away = {"all"}
    aside = bench.run(delivery(policy=policy(on_store_error="raise")), never)
    assert (type(aside), aside.why) == (Defer, "store_unavailable")
    assert not bench.named("execution.unguarded")
    assert [event.fields["operation"] for event in bench.named("store.failed")] == ["start"]
    bench.leases.away = set()
    bench.run(delivery("d2"))
    assert bench.leases.stats()["shop.post"].get("unguarded", 0) == 0


def test_grant_that_arrives_after_its_window_is_released_and_not_believed(bench: Bench) -> None:
    bench.leases.late = LEASE
    assert bench.run(delivery(), lambda grant: bench.leases.slots()) == Returned({})
    assert bench.named("execution.unguarded")


def test_late_grant_leaves_no_mark_for_the_delivery_it_defers(bench: Bench) -> None:
    """Its body was not entered, so nothing is ending (E8a)."""
    strict = delivery(policy=policy(on_store_error="raise"))
    bench.leases.late = LEASE - 0.1
    assert bench.run(strict, never).why == "store_unavailable"
    bench.leases.late = 0.0
    assert bench.run(strict) == Returned("done")


# --- admission --------------------------------------------------------------------------------------------------------


@pytest.fixture
def admission(bench: Bench) -> Admission:
    return Admission(bench.leases)


def call(name: str = "c1", **fields: Any) -> Call:
    span = policy().span
    mode: Mode = "awaited" if fields.get("awaited") else "new"
    hold = queued_hold(3600.0, delay=fields.pop("delay", 0.0), expires=fields.pop("expires", None))
    question = Enqueue(key(), "shop.post", span, name, f"task of {name}", hold, mode)
    defaults: dict[str, Any] = {
        "awaited": False,
        "raises": False,
        "strict": False,
        "queue_hold": 3600.0,
        "revoked": lambda task_id: False,
    }
    return Call(question=question, **{**defaults, **fields})


def admit(admission: Admission, call: Call) -> Permit:
    return admission.ask(call)()


def test_first_call_is_admitted_in_one_round_trip(bench: Bench, admission: Admission) -> None:
    permit = admit(admission, call())
    assert (permit.status, permit.publish, bench.leases.asked) == ("enqueued", True, ["begin_enqueue"])


def test_second_call_is_told_who_holds_the_key(bench: Bench, admission: Admission) -> None:
    admit(admission, call())
    permit = admit(admission, call("c2"))
    assert permit.by is not None
    assert (permit.status, permit.reason, permit.by.task_id) == ("duplicate", "queued", "task of c1")
    assert not permit.publish


def test_call_while_another_runs_is_told_so(bench: Bench, admission: Admission) -> None:
    start(bench, delivery())
    assert admit(admission, call("c2")).reason == "running"


def test_duplicate_raises_where_the_policy_says_so(admission: Admission) -> None:
    admit(admission, call())
    with pytest.raises(DuplicateError) as raised:
        admit(admission, call("c2", raises=True))
    assert raised.value.args == ("shop.post:1", "task of c1")


def test_awaited_duplicate_is_published_and_never_raises(admission: Admission) -> None:
    admit(admission, call())
    permit = admit(admission, call("c2", raises=True, awaited=True))
    assert (permit.status, permit.publish) == ("awaiting", True)


def test_hold_outlives_the_delay_but_not_the_expiry(bench: Bench, admission: Admission) -> None:
    admit(admission, call(delay=600.0))
    assert left(bench) == 4200.0
    admission.withdraw(key().digest, "c1")
    admit(admission, call(delay=600.0, expires=700.0))
    assert left(bench) == 700.0


def left(bench: Bench) -> float:
    return bench.leases.look(key().digest)[0].left


def test_revoked_delayed_hold_is_no_hold(admission: Admission) -> None:
    admit(admission, call(delay=600.0))
    assert admit(admission, call("c2", revoked=lambda task_id: task_id == "task of c1")).status == "enqueued"


def test_backend_is_not_asked_about_a_hold_without_delay(admission: Admission) -> None:
    def asked(task_id: str) -> bool:
        raise AssertionError("a round trip for every duplicate")

    admit(admission, call())
    assert admit(admission, call("c2", revoked=asked)).status == "duplicate"


def test_without_redis_calls_are_published_unguarded(bench: Bench, admission: Admission) -> None:
    bench.leases.away = {"all"}
    permit = admit(admission, call())
    assert (permit.status, permit.reason, permit.publish) == ("unguarded", "store_unavailable", True)


def test_hold_that_a_hung_redis_takes_when_it_wakes_does_not_suppress_the_next_call(
    bench: Bench, admission: Admission
) -> None:
    bench.leases.away = {"begin_enqueue"}
    first = call()
    admit(admission, first)
    bench.leases.away = set()
    bench.leases.enqueue(first.question)  # what it was sent and did not answer
    assert admit(admission, call("c2")).status == "enqueued"


def test_without_redis_a_strict_call_raises_unless_awaited(bench: Bench, admission: Admission) -> None:
    bench.leases.away = {"all"}
    with pytest.raises(StoreUnavailableError):
        admit(admission, call(strict=True))
    assert not bench.named("call.unguarded")
    assert admit(admission, call(strict=True, awaited=True)).publish


def test_withdrawn_call_frees_only_its_own_hold(bench: Bench, admission: Admission) -> None:
    admit(admission, call())
    admission.withdraw(key().digest, "another")
    assert bench.leases.slots() == {"q": "task of c1"}
    admission.withdraw(key().digest, "c1")
    assert bench.leases.slots() == {}


def test_withdrawing_without_redis_fails_nothing(bench: Bench, admission: Admission) -> None:
    bench.leases.away = {"all"}
    admission.withdraw(key().digest, "c1")
    assert admission.succeed(replace(call().question, seq=7)) == 7
    assert admission.defer(Deferral(key(), "task", SPANS["until_executed"], "c1", 60.0)) is None
    admission.confirm(key(), "c1", published=True)
    operations = [event.fields["operation"] for event in bench.named("store.failed")]
    assert operations == ["release", "extend", "extend", "confirm"]


# --- correctness: claim -----------------------------------------------------------------------------------------------


def post(name: str = "d1", **fields: Any) -> Execution:
    """A delivery of the correctness tier."""
    return delivery(name, **{"policy": fenced(), **fields})


def write(bench: Bench, value: Any = "row") -> Callable[[Any], Any]:
    def body(grant: Any) -> Any:
        grant.connection.append(value)
        return value

    return body


def test_body_and_ledger_commit_together(bench: Bench) -> None:
    assert bench.run(post(), write(bench)) == Returned("row")
    assert bench.database.rows == ["row"]
    assert entry(bench).state == "succeeded"


def entry(bench: Bench) -> Any:
    (found,) = bench.ledger.entry_of.values()
    return found


def test_grant_carries_the_token_and_attempt(bench: Bench) -> None:
    result = bench.run(post(), lambda grant: [grant.token, grant.attempt, grant.resource, grant.headers()])
    assert result.value == [1, 1, "account:1", {"Fencing-Token": "1"}]


def test_both_stores_know_a_start_by_one_holder(bench: Bench) -> None:
    bench.run(post(), lambda grant: bench.events.append(holder_of(bench)))  # type: ignore[arg-type]
    assert bench.ledger.claims[0].holder in bench.events


def test_finished_key_answers_with_its_result(bench: Bench) -> None:
    bench.run(post(), write(bench, {"a": [1]}))
    assert bench.run(post("d2"), never) == Returned({"a": [1]}, counter="replayed")


def test_falsy_results_are_replayed_as_they_were(bench: Bench) -> None:
    bench.run(post(), lambda grant: None)
    assert bench.run(post("d2"), never).value is None


def test_result_that_cannot_be_recorded_is_marked_alike_in_run_and_replay(bench: Bench) -> None:
    first = bench.run(post(), lambda grant: object())
    assert (
        first.value
        == bench.run(post("d2"), never).value
        == {
            "once_fenced": "result_omitted",
            "reason": "not_serialisable",
        }
    )


def test_replay_for_zero_answers_the_same_call_and_runs_the_next(bench: Bench) -> None:
    fresh = fenced(replay_for=0)
    bench.run(post(policy=fresh), write(bench, 1))
    assert bench.run(post("deferred", policy=fresh, run="d1"), never).value == 1
    assert bench.run(post("d2", policy=fresh), write(bench, 2)).value == 2


def test_busy_fence_defers_and_gives_q_back(bench: Bench) -> None:
    hold_elsewhere(bench)
    ex = post()
    bench.enqueue(ex)
    aside = bench.run(ex, never)
    assert (type(aside), aside.why, aside.seconds, aside.limit) == (Defer, "fence_busy", 0.25, 0)
    assert aside.resource == ex.resource
    counted = bench.leases.stats()[ex.task]
    assert (counted["granted"], begun_of(counted)) == (1, 0)
    assert bench.leases.slots() == {"q": ex.task_id}


def test_bodies_are_counted_when_they_begin_and_not_when_they_are_answered(bench: Bench) -> None:
    begun = []
    bench.run(post(), lambda grant: begun.append(begun_of(bench.leases.stats()["shop.post"])))
    bench.run(post("d2"), never)  # answered from the ledger
    counted = bench.leases.stats()["shop.post"]
    assert (begun, begun_of(counted), counted["granted"], counted["replayed"]) == ([1], 1, 2, 1)


def hold_elsewhere(bench: Bench, **fields: Any) -> Held:
    """Another key of the same resource runs on another machine."""
    other = post("other", **{"key": key("shop.post:2"), **fields})
    return bench.hold(other, "other holder")


def test_twin_of_a_fence_waits_for_its_lease(bench: Bench) -> None:
    hold_elsewhere(bench, key=key())
    assert bench.run(post(), never).seconds == pytest.approx(LEASE)


def test_call_whose_resource_is_busy_stays_queued_since_it_was_made(bench: Bench) -> None:
    """The first deferral tells since when it waits, later ones know; the call is older than both."""
    bench.hold(delivery("d2", key=key("other")), "h2")
    bench.enqueue(ex := delivery(policy=fenced()))
    made = bench.leases.look(ex.digest)[0].since
    for waiting_since in (0, round((made + 5) * 1000)):
        bench.clock.pass_(5)
        assert isinstance(bench.run(replace(ex, waiting_since=waiting_since), never), Defer)
        (queued,) = bench.leases.look(ex.digest)
        assert (queued.slot, queued.since) == ("q", made)


@pytest.mark.parametrize("on_conflict", ["skip", "raise"])
def test_redis_busy_always_defers(bench: Bench, on_conflict: Any) -> None:
    start(bench, delivery())
    assert isinstance(bench.run(post("d2", policy=fenced(on_conflict=on_conflict)), never), Defer)


def test_without_redis_the_fence_still_decides(bench: Bench) -> None:
    bench.leases.away = {"all"}
    assert bench.run(post(policy=fenced(on_store_error="raise")), write(bench)).value == "row"
    assert bench.run(post("d2"), never).value == "row"


def test_without_postgres_the_message_is_deferred(bench: Bench) -> None:
    bench.ledger.away = {"claim"}
    aside = bench.run(post(), never)
    assert (type(aside), aside.why) == (Defer, "store_unavailable")


def test_key_with_another_fingerprint_is_reuse(bench: Bench) -> None:
    bench.run(post(fingerprint="aa"))
    with pytest.raises(KeyReusedError):
        bench.run(post("d2", fingerprint="bb"), never)


def test_final_error_is_recorded_and_raised_again(bench: Bench) -> None:
    final = fenced(final_errors=(ZeroDivisionError,))
    with pytest.raises(ZeroDivisionError):
        bench.run(post(policy=final), lambda grant: 1 / 0)
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        bench.run(post("d2", policy=final), never)
    with pytest.raises(RecordedError, match="ZeroDivisionError"):
        bench.run(post("d3"), never)


def test_other_errors_leave_the_key_free_to_run_again(bench: Bench) -> None:
    with pytest.raises(ZeroDivisionError):
        bench.run(post(), lambda grant: 1 / 0)
    assert bench.run(post("d2"), lambda grant: grant.attempt) == Returned(2)


def test_key_that_kills_its_holders_is_given_up(bench: Bench) -> None:
    held = hold_elsewhere(bench, key=key(), policy=fenced(max_attempts=1))
    bench.ledger.take_over(held)
    bench.clock.pass_(LEASE)
    with pytest.raises(ExhaustedError):
        bench.run(post(policy=fenced(max_attempts=1)), never)


def test_correctness_tier_without_a_database_is_an_error_of_configuration(bench: Bench) -> None:
    with pytest.raises(ConfigError, match="no database"):
        Guard(bench.leases).run(post(), never)


# --- correctness: after an error --------------------------------------------------------------------------------------


def test_error_rolls_back_and_frees_the_fence(bench: Bench) -> None:
    def body(grant: Any) -> None:
        write(bench)(grant)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        bench.run(post(), body)
    assert (bench.database.rows, entry(bench).state) == ([], "retryable")
    assert bench.ledger.fence_of["account:1"].holder is None


def test_commit_whose_answer_was_lost_is_a_success(bench: Bench) -> None:
    bench.database.fails = {"committed": ConnectionLostError()}
    assert bench.run(post(), write(bench)) == Returned("row")
    assert bench.named("commit.confirmed")


def test_hook_that_raises_after_commit_fails_nothing(bench: Bench) -> None:
    bench.database.fails = {"committed": ValueError("on_commit hook")}
    assert bench.run(post(), write(bench)) == Returned("row")


def test_process_on_its_way_out_is_not_held_up_by_a_commit(bench: Bench) -> None:
    """The message is given back; its redelivery is answered from the ledger."""
    bench.database.fails = {"committed": SystemExit(0)}
    with pytest.raises(SystemExit):
        bench.run(post(), write(bench))
    assert bench.run(post(), never) == Returned("row", counter="replayed")


@pytest.mark.parametrize("step", ["begin", "complete", "commit"])
def test_lost_connection_makes_a_new_attempt_not_a_failure(bench: Bench, step: str) -> None:
    bench.database.fails = {step: ConnectionLostError()}
    aside = bench.run(post(), write(bench))
    assert (type(aside), aside.counter) == (Again, "fenced_off")
    assert bench.database.rows == []


def test_ledger_that_cannot_be_asked_defers_the_same_message(bench: Bench) -> None:
    bench.database.fails = {"committed": ConnectionLostError()}
    bench.ledger.away = {"abandon"}
    aside = bench.run(post(), write(bench))
    assert (type(aside), aside.why) == (Defer, "store_unavailable")
    bench.ledger.away = set()
    assert bench.run(post(), never).value == "row"


def test_endless_new_attempts_end_in_a_failure(bench: Bench) -> None:
    bench.database.fails = {"commit": ConnectionLostError("server closed the connection")}
    with pytest.raises(ConnectionLostError):
        bench.run(post(republished=5), write(bench))


def held_by(bench: Bench) -> Held:
    claim = bench.ledger.claims[-1]
    fence = bench.ledger.fence_of[claim.operation.resource]
    return Held(claim.operation, claim.holder, fence.token, 1)


def test_zombie_taken_over_by_its_twin_leaves_the_result_alone(bench: Bench) -> None:
    bench.database.meanwhile = {"complete": lambda: bench.ledger.take_over(held_by(bench))}
    assert bench.run(post(), write(bench)) == Drop("taken_over", counter="fenced_off")
    assert bench.database.rows == []


def test_zombie_whose_key_another_call_has_comes_back_for_the_answer(bench: Bench) -> None:
    def taken_over() -> None:
        held = held_by(bench)
        bench.ledger.take_over(held, replace(held.operation, task_id="another call"))

    bench.database.meanwhile = {"complete": taken_over}
    aside = bench.run(post(), write(bench))
    assert (type(aside), aside.why) == (Defer, "taken_over")


def test_zombie_whose_key_another_call_has_finished_answers_from_the_ledger(bench: Bench) -> None:
    def finished() -> None:
        held = held_by(bench)
        bench.ledger.take_over(held, replace(held.operation, task_id="another call"))
        found = entry(bench)
        found.state, found.result = "succeeded", '"theirs"'

    bench.database.meanwhile = {"complete": finished}
    assert bench.run(post(), write(bench)) == Returned("theirs", counter="fenced_off")
    assert bench.database.rows == []


def test_zombie_whose_resource_another_key_took_is_a_new_attempt(bench: Bench) -> None:
    def taken() -> None:
        bench.ledger.fence_of["account:1"].until = 0.0
        hold_elsewhere(bench)

    bench.database.meanwhile = {"complete": taken}
    assert isinstance(bench.run(post(), write(bench)), Again)
    assert bench.named("fence.rejected")


def test_whatever_the_body_makes_of_being_fenced_off_the_ledger_decides(bench: Bench) -> None:
    def body(grant: Any) -> None:
        bench.ledger.take_over(held_by(bench))
        raise ValueError("swallowed by the body's own except")

    assert isinstance(bench.run(post(), body), Drop)


def test_published_retry_stays_a_retry(bench: Bench) -> None:
    def body(grant: Any) -> None:
        bench.ledger.take_over(held_by(bench))
        raise RetryError

    with pytest.raises(RetryError):
        bench.run(post(), body)


def test_system_exit_is_never_turned_into_an_answer(bench: Bench) -> None:
    bench.database.fails = {"commit": SystemExit(0)}
    with pytest.raises(SystemExit):
        bench.run(post(), write(bench))
    assert bench.ledger.abandoned[0].state == "retryable"


def test_system_exit_passes_where_the_ledger_cannot_be_asked(bench: Bench) -> None:
    bench.database.fails = {"commit": SystemExit(0)}
    bench.ledger.away = {"abandon"}
    with pytest.raises(SystemExit):
        bench.run(post(), write(bench))


def test_lost_connection_is_never_recorded_as_final(bench: Bench) -> None:
    bench.database.fails = {"commit": ConnectionLostError()}
    bench.run(post(policy=fenced(final_errors=(ConnectionLostError,))), write(bench))
    assert bench.ledger.abandoned[0].state == "retryable"


def test_superseded_fence_is_told_to_the_body(bench: Bench) -> None:
    def body(grant: Any) -> None:
        grant._belief.answered("lost", bench.clock())
        grant.check()

    with pytest.raises(FencedOffError):
        bench.run(post(), body)


def test_lapsed_fence_that_nobody_took_may_complete(bench: Bench) -> None:
    def body(grant: Any) -> bool:
        bench.clock.pass_(10 * LEASE)
        return bool(grant.lost)

    assert bench.run(post(), body) == Returned(False)
