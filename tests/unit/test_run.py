"""One delivery as data: what it asks of the lease store, how long it steps aside."""

from __future__ import annotations

import pytest

from celery_once_fenced.run import Defer, back_off
from tests.fixtures.deliveries import delivery, fenced, key, policy

NO_R = [policy(unique="until_executing"), policy(unique="until_expired", window=60)]


def test_start_asks_for_the_slot_of_the_key() -> None:
    question = delivery().start("holder")
    assert question is not None
    assert (question.slot, question.holder, question.redelivery) == (key().digest, "holder", True)


@pytest.mark.parametrize("span", NO_R, ids=lambda policy: policy.unique)
def test_span_without_r_sees_its_twin_in_a_slot_of_the_delivery(span: object) -> None:
    question = delivery("d7", policy=span).start("holder")
    assert question is not None
    assert question.slot == "d7"
    assert (question.span.needs_r, question.span.sets_r) == (True, True)


def test_without_redelivery_until_executing_only_frees_q() -> None:
    question = delivery(policy=NO_R[0], redelivery_possible=False).start("holder")
    assert question is not None
    assert (question.slot, question.span.sets_r) == (key().digest, False)


def test_without_redelivery_until_expired_asks_nothing() -> None:
    assert delivery(policy=NO_R[1], redelivery_possible=False).start("holder") is None


def test_q_goes_back_for_the_hold_and_the_delay() -> None:
    assert delivery(policy=policy(queue_hold=100)).requeue_hold(7.0) == 107.0


@pytest.mark.parametrize("unique", ["until_expired", "while_executing"])
def test_q_that_start_did_not_take_does_not_go_back(unique: str) -> None:
    window = {"window": 60} if unique == "until_expired" else {}
    assert delivery(policy=policy(unique=unique, **window)).requeue_hold(7.0) == 0.0


def test_succeeded_entry_answers_later_calls_for_replay_for_and_its_own_run_as_long_as_it_may_come_again() -> (
    None
):
    short, none = delivery(policy=fenced(replay_for=60)), delivery(policy=fenced(replay_for=0))
    assert (short.replay, short.retention) == (60, 3600)
    assert (none.replay, none.retention) == (None, 3600)


def test_failed_entry_is_kept_at_least_while_it_may_be_redelivered() -> None:
    assert delivery(policy=fenced(replay_for=60)).failure_retention == 3600
    assert delivery(policy=fenced(replay_for="1d")).failure_retention == 86400


def test_back_off_grows_with_the_deferrals_of_the_message() -> None:
    assert back_off(delivery(deferrals=3), 60.0, "busy", 0.0) == Defer(2.0, "busy")


def test_back_off_of_a_twin_waits_for_the_lease() -> None:
    assert back_off(delivery(deferrals=3), 60.0, "twin", 0.0, twin=True).seconds == 60.0


def test_back_off_stays_within_half_the_visibility_timeout() -> None:
    assert back_off(delivery(visibility_timeout=10.0), 60.0, "twin", 0.0, twin=True).seconds == 5.0
