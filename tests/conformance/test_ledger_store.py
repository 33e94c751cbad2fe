"""What every ledger store must do, told in behaviour and by its Protocol alone (rules C… and L… of the protocol).

A driver joins by a factory in ``DRIVERS``: a context manager that gives a ``Ledger``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from celery_once_fenced.errors import FencedOffError, GrantError, OutcomeUnknownError
from celery_once_fenced.stores import Completion, EffectFinish, EffectStart, EffectStarted, Held
from tests.fixtures.ledger import Ledger, eventually, fresh, ledger_at, operation


@pytest.fixture(scope="module")
def ledger(module_postgres_url: str) -> Iterator[Ledger]:
    with ledger_at(module_postgres_url) as opened:
        yield opened


def start_effect(
    ledger: Ledger, held: Held, on_unknown: str = "hold", own: str | None = None
) -> EffectStarted:
    return ledger.store.effect_start(EffectStart(held, "gateway", on_unknown, own))


def finish_effect(ledger: Ledger, held: Held, state: str = "done", result: str | None = '"receipt"') -> bool:
    return ledger.store.effect_finish(
        EffectFinish(held.operation.digest, "gateway", held.holder, state, result)
    )


def prune(ledger: Ledger, grace: float = -1.0) -> None:
    while ledger.store.prune(grace, batch=100):
        pass


# --- claim ------------------------------------------------------------------------------------------------------------


def test_a_free_key_is_granted_as_its_first_attempt(ledger: Ledger) -> None:
    claimed = ledger.claim(operation())
    assert (claimed.verdict, claimed.attempt, claimed.takeovers) == ("granted", 1, 0)
    assert claimed.token is not None


def test_tokens_of_a_resource_rise_with_every_acquisition(ledger: Ledger) -> None:
    resource = fresh("account")
    tokens = []
    for _ in range(3):
        held = ledger.hold(operation(resource=resource))
        ledger.run(held)
        tokens.append(held.token)
    assert tokens == sorted(set(tokens))


def test_a_live_key_is_busy_for_a_twin_until_its_lease_lapses(ledger: Ledger) -> None:
    op = operation()
    ledger.hold(op, lease=60)
    answer = ledger.claim(op)
    assert (answer.verdict, answer.task_id, answer.same_key) == ("busy", op.task_id, True)
    assert 50 < answer.wait <= 60


def test_a_resource_held_for_another_key_is_busy_but_no_twin(ledger: Ledger) -> None:
    resource = fresh("account")
    ledger.hold(operation("first " + resource, resource))
    answer = ledger.claim(operation("second " + resource, resource))
    assert (answer.verdict, answer.same_key) == ("busy", False)
    assert answer.task_id == f"task of first {resource}"


def test_a_claim_whose_reply_was_lost_is_granted_again_with_a_higher_token_and_the_same_attempt(
    ledger: Ledger,
) -> None:
    op = operation()
    first, second = (ledger.claim(op, "one holder") for _ in range(2))
    assert (second.verdict, second.attempt, second.takeovers) == ("granted", 1, 0)
    assert (second.token or 0) > (first.token or 0) > 0


def test_a_lapsed_holder_is_taken_over_with_a_higher_token(ledger: Ledger) -> None:
    op = operation()
    first = ledger.hold(op, lease=0.02)
    answer = eventually(lambda: (got := ledger.claim(op)).verdict == "granted" and got)
    assert answer.token > first.token
    assert (answer.attempt, answer.takeovers) == (2, 1)


def test_a_key_taken_over_too_often_is_exhausted_and_stays_so(ledger: Ledger) -> None:
    op = operation()
    for _ in range(3):
        ledger.lapsed(op)
    answers = [ledger.claim(op, max_takeovers=2) for _ in range(2)]
    assert [(answer.verdict, answer.takeovers) for answer in answers] == [("exhausted", 2)] * 2
    assert json.loads(answers[1].error or "")["type"] == "celery_once_fenced.errors.ExhaustedError"


def test_the_holder_of_an_exhausted_key_cannot_complete(ledger: Ledger) -> None:
    held = ledger.lapsed(operation())
    ledger.claim(held.operation, max_takeovers=0)
    with pytest.raises(FencedOffError):
        ledger.run(held)


def test_handled_retries_do_not_exhaust_a_key(ledger: Ledger) -> None:
    op = operation()
    for attempt in (1, 2, 3):
        held = ledger.hold(op, max_takeovers=0)
        assert held.attempt == attempt
        ledger.abandon(held)


def test_a_claim_under_another_resource_is_key_reuse_until_the_key_has_finished(ledger: Ledger) -> None:
    key = fresh("key")
    held = ledger.hold(operation(key, "resource one of " + key))
    moved = operation(key, "resource two of " + key)
    assert ledger.claim(moved).verdict == "key_reused"
    ledger.run(held)
    assert ledger.claim(moved).verdict == "completed"


@pytest.mark.parametrize("finished", [False, True], ids=["running", "succeeded"])
def test_another_fingerprint_is_key_reuse_before_anything_else(ledger: Ledger, finished: bool) -> None:
    held = ledger.hold(operation(task_id="the first"))
    if finished:
        ledger.run(held)
    answer = ledger.claim(operation(held.operation.key, fingerprint=b"g" * 32))
    assert (answer.verdict, answer.task_id, answer.result) == ("key_reused", "the first", None)


@pytest.mark.parametrize("fingerprints", [(None, b"f" * 32), (b"f" * 32, None)])
def test_a_fingerprint_switched_on_or_off_is_no_key_reuse(
    ledger: Ledger, fingerprints: tuple[bytes | None, bytes | None]
) -> None:
    held = ledger.hold(operation(fingerprint=fingerprints[0]))
    ledger.run(held)
    assert ledger.claim(operation(held.operation.key, fingerprint=fingerprints[1])).verdict == "completed"


# --- complete and replay ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("result", ["null", "0", '""', "NaN", r'"\u0000 \ud800"', "[]"])
def test_a_result_is_replayed_as_it_was_recorded(ledger: Ledger, result: str) -> None:
    held = ledger.hold(operation())
    ledger.run(held, Completion(result, None, 3600))
    answer = ledger.claim(held.operation)
    assert (answer.verdict, answer.result, answer.omitted) == ("completed", result, None)
    assert answer.task_id == held.operation.task_id


def test_a_result_that_was_omitted_is_replayed_as_omitted(ledger: Ledger) -> None:
    held = ledger.hold(operation())
    ledger.run(held, Completion(None, "too_large", 3600))
    answer = ledger.claim(held.operation)
    assert (answer.verdict, answer.result, answer.omitted) == ("completed", None, "too_large")


def test_only_the_execution_that_completed_adds_a_result_later(ledger: Ledger) -> None:
    held = ledger.hold(operation())
    later = Completion('"later"', None, 3600)
    assert not ledger.store.record(held, later)
    ledger.run(held, Completion(None, "not_recorded", 3600))
    assert not ledger.store.record(Held(held.operation, "another", held.token, held.attempt), later)
    assert ledger.store.record(held, later)
    assert ledger.claim(held.operation).result == '"later"'


def test_an_entry_that_answers_later_calls_no_more_still_answers_its_own_run(ledger: Ledger) -> None:
    op = operation(run="first")
    ledger.run(ledger.hold(op), Completion("1", None, retention=3600, replay=0.0))
    assert ledger.claim(op).verdict == "completed"
    assert ledger.claim(replace(op, run="second")).verdict == "granted"


def test_a_key_runs_again_once_its_retention_is_over(ledger: Ledger) -> None:
    held = ledger.hold(operation())
    ledger.run(held, Completion("1", None, 0))
    again = ledger.hold(operation(held.operation.key, fingerprint=b"g" * 32))
    assert again.attempt == 1
    assert again.token > held.token


def test_a_lapsed_lease_that_nobody_took_over_completes(ledger: Ledger) -> None:
    held = ledger.lapsed(operation())
    ledger.run(held)
    assert ledger.writes(held.operation) == [held.token]


def test_a_zombie_is_refused_before_it_writes(ledger: Ledger) -> None:
    held = ledger.lapsed(operation())
    ledger.hold(held.operation)
    with pytest.raises(FencedOffError), ledger.database.transaction(held):
        pytest.fail("the body was entered")


def test_a_late_complete_takes_the_writes_back(ledger: Ledger) -> None:
    held = ledger.hold(operation())

    def superseded(_: object) -> None:
        ledger.expire(held.operation.resource)
        prune(ledger)

    with pytest.raises(FencedOffError):
        ledger.run(held, meanwhile=superseded)
    assert ledger.writes(held.operation) == []


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_a_body_that_ends_its_transaction_is_told_of_atomic_false(ledger: Ledger, ending: str) -> None:
    held = ledger.hold(operation())
    with pytest.raises(GrantError, match="atomic=False"):
        ledger.run(held, meanwhile=lambda connection: getattr(connection, ending)())


# --- abandon: what is true after an error -----------------------------------------------------------------------------


def test_after_a_handled_error_the_key_is_free_for_its_next_attempt(ledger: Ledger) -> None:
    held = ledger.hold(operation())
    reply = ledger.abandon(held)
    assert (reply.state, reply.ours, reply.fence_ours) == ("retryable", True, True)
    answer = ledger.claim(held.operation)
    assert (answer.verdict, answer.attempt, answer.takeovers) == ("granted", 2, 0)


def test_a_final_error_answers_later_calls(ledger: Ledger) -> None:
    held = ledger.hold(operation())
    assert ledger.abandon(held, "failed", error='{"type": "CardDeclined"}').state == "failed"
    answer = ledger.claim(held.operation)
    assert (answer.verdict, answer.error) == ("failed_final", '{"type": "CardDeclined"}')


def test_a_final_error_is_forgotten_after_its_retention(ledger: Ledger) -> None:
    held = ledger.hold(operation())
    ledger.abandon(held, "failed", retention=0)
    assert ledger.hold(held.operation).attempt == 1


@pytest.mark.parametrize("state", ["retryable", "failed"])
def test_abandon_asked_twice_answers_the_same(ledger: Ledger, state: str) -> None:
    held = ledger.hold(operation())
    assert ledger.abandon(held, state) == ledger.abandon(held, state)


def test_a_commit_that_did_happen_is_found_out(ledger: Ledger) -> None:
    held = ledger.hold(operation())
    ledger.run(held)
    reply = ledger.abandon(held)
    assert (reply.state, reply.ours, reply.result) == ("succeeded", True, '"done"')


def test_a_zombie_learns_who_took_over_and_changes_nothing(ledger: Ledger) -> None:
    held = ledger.lapsed(operation())
    successor = ledger.hold(operation(held.operation.key, task_id="the second"))
    reply = ledger.abandon(held)
    assert (reply.state, reply.ours, reply.fence_ours, reply.task_id) == (
        "taken_over",
        False,
        False,
        "the second",
    )
    ledger.run(successor)


def test_a_zombie_is_given_its_successors_result(ledger: Ledger) -> None:
    held = ledger.lapsed(operation())
    ledger.run(ledger.hold(held.operation))
    reply = ledger.abandon(held)
    assert (reply.state, reply.ours, reply.result) == ("succeeded", False, '"done"')


def test_an_attempt_learns_that_another_key_took_the_resource(ledger: Ledger) -> None:
    resource = fresh("account")
    held = ledger.lapsed(operation(resource=resource))
    other = ledger.hold(operation(resource=resource))
    reply = ledger.abandon(held)
    assert (reply.state, reply.ours, reply.fence_ours) == ("retryable", True, False)
    ledger.run(other)


def test_a_final_error_counts_only_while_the_fence_is_ours(ledger: Ledger) -> None:
    held = ledger.lapsed(operation(resource=fresh("account")))
    ledger.run(ledger.hold(operation(resource=held.operation.resource)))
    assert ledger.abandon(held, "failed").state == "retryable"


def test_an_entry_that_is_gone_is_nobodys(ledger: Ledger) -> None:
    held = Held(operation(), "nobody", 1, 1)
    reply = ledger.abandon(held)
    assert (reply.state, reply.ours, reply.fence_ours) == ("taken_over", False, False)


# --- renewal ----------------------------------------------------------------------------------------------------------


def test_renewal_answers_each_lease_in_the_order_asked(ledger: Ledger) -> None:
    kept, lost, lapsed = ledger.hold(operation()), ledger.lapsed(operation()), ledger.lapsed(operation())
    ledger.hold(lost.operation)
    assert ledger.renew(lost, kept, lapsed) == ["lost", "renewed", "renewed"]
    assert ledger.renew() == []


def test_a_renewed_lease_is_longer_and_its_token_the_same(ledger: Ledger) -> None:
    held = ledger.lapsed(operation())
    ledger.renew(held, lease=30)
    assert 25 < ledger.claim(held.operation).wait <= 30
    ledger.run(held)


# --- effects ----------------------------------------------------------------------------------------------------------


def test_a_recorded_effect_is_replayed_by_the_next_attempt(ledger: Ledger) -> None:
    first = ledger.hold(operation())
    assert start_effect(ledger, first).verdict == "go"
    assert finish_effect(ledger, first)
    ledger.abandon(first)
    replayed = start_effect(ledger, ledger.hold(first.operation))
    assert (replayed.verdict, replayed.result) == ("done", '"receipt"')


def test_complete_refuses_while_an_effect_is_unknown(ledger: Ledger) -> None:
    held = ledger.hold(operation())
    start_effect(ledger, held)
    with pytest.raises(OutcomeUnknownError, match="gateway"):
        ledger.run(held)


def test_an_attempt_that_swallowed_an_unknown_outcome_may_not_call_again(ledger: Ledger) -> None:
    held = ledger.hold(operation())
    start_effect(ledger, held, "rerun")
    assert start_effect(ledger, held, "rerun").verdict == "unknown"


def test_an_unknown_outcome_puts_the_key_in_doubt(ledger: Ledger) -> None:
    held = ledger.hold(operation())
    start_effect(ledger, held)
    reply = ledger.abandon(held, message="the message")
    assert (reply.state, reply.effect) == ("in_doubt", "gateway")
    answer = ledger.claim(held.operation)
    assert (answer.verdict, answer.effect, answer.since) == ("in_doubt", "gateway", reply.since)
    entry = ledger.store.look(held.operation.digest)
    assert entry is not None
    assert (entry["message"], entry["retain_until"]) == ("the message", None)


def test_a_takeover_in_the_middle_of_an_effect_is_in_doubt_and_shuts_the_old_holder_out(
    ledger: Ledger,
) -> None:
    held = ledger.lapsed(operation())
    start_effect(ledger, held)
    answers = [ledger.claim(held.operation, message="again") for _ in range(2)]
    assert [(answer.verdict, answer.effect) for answer in answers] == [("in_doubt", "gateway")] * 2
    assert start_effect(ledger, held).verdict == "fenced"
    assert ledger.renew(held) == ["lost"]


@pytest.mark.parametrize("own", [None, "fail"])
def test_the_policy_fail_ends_the_key(ledger: Ledger, own: str | None) -> None:
    held = ledger.lapsed(operation())
    policy = "hold" if own else "fail"
    start_effect(ledger, held, policy, own)
    answers = [ledger.claim(held.operation, on_unknown=policy) for _ in range(2)]
    assert [answer.verdict for answer in answers] == ["failed_final"] * 2
    assert "OutcomeUnknownError" in (answers[0].error or "")


def test_the_policy_rerun_calls_again_with_the_same_downstream_key(ledger: Ledger) -> None:
    held = ledger.lapsed(operation())
    first = start_effect(ledger, held, "rerun")
    second = start_effect(ledger, ledger.hold(held.operation, on_unknown="rerun"), "rerun")
    assert (second.verdict, second.downstream_key) == ("go", first.downstream_key)


def test_the_policy_probe_is_told_whose_call_to_ask_about(ledger: Ledger) -> None:
    held = ledger.lapsed(operation())
    first = start_effect(ledger, held, "probe")
    second = start_effect(ledger, ledger.hold(held.operation, on_unknown="probe"), "probe")
    assert (second.verdict, second.downstream_key, second.holder) == (
        "unknown",
        first.downstream_key,
        held.holder,
    )
    assert finish_effect(ledger, held)


def test_a_certain_failure_is_called_again_with_a_new_downstream_key(ledger: Ledger) -> None:
    held = ledger.hold(operation())
    first = start_effect(ledger, held)
    assert finish_effect(ledger, held, "failed", None)
    second = start_effect(ledger, held)
    assert second.verdict == "go"
    assert second.downstream_key != first.downstream_key


def test_a_late_receipt_still_counts(ledger: Ledger) -> None:
    held = ledger.lapsed(operation())
    start_effect(ledger, held)
    ledger.claim(held.operation)
    assert finish_effect(ledger, held)


def test_a_receipt_for_an_effect_started_again_does_not_count(ledger: Ledger) -> None:
    held = ledger.lapsed(operation())
    start_effect(ledger, held, "rerun")
    start_effect(ledger, ledger.hold(held.operation, on_unknown="rerun"), "rerun")
    assert not finish_effect(ledger, held)


def test_an_interrupted_effect_counts_more_than_too_many_takeovers(ledger: Ledger) -> None:
    held = ledger.lapsed(operation())
    start_effect(ledger, held)
    assert ledger.claim(held.operation, max_takeovers=0).verdict == "in_doubt"


# --- people -----------------------------------------------------------------------------------------------------------


def test_a_forced_release_shuts_out_the_holder_that_was_named(ledger: Ledger) -> None:
    held = ledger.hold(operation())
    token = ledger.store.force_release(held.operation.resource, held.holder, "stuck", "ann")
    assert token is not None
    assert token > held.token
    with pytest.raises(FencedOffError):
        ledger.run(held)


def test_a_forced_release_leaves_another_holder_alone(ledger: Ledger) -> None:
    held = ledger.lapsed(operation())
    successor = ledger.hold(held.operation)
    assert ledger.store.force_release(held.operation.resource, held.holder, "too late") is None
    ledger.run(successor)


def test_held_fences_are_listed_and_free_ones_are_not(ledger: Ledger) -> None:
    held, done = ledger.hold(operation(), worker="w7@host"), ledger.hold(operation())
    ledger.run(done)
    listed = {fence.resource: fence for fence in ledger.store.fences()}
    assert done.operation.resource not in listed
    shown = listed[held.operation.resource]
    assert (shown.token, shown.holder, shown.digest) == (held.token, held.holder, held.operation.digest)
    assert (shown.worker, shown.key) == ("w7@host", held.operation.key)
    assert 50 < shown.left <= 60


def test_an_entry_is_found_by_its_readable_key(ledger: Ledger) -> None:
    op = ledger.hold(operation()).operation
    assert ledger.store.find(op.key) == op.digest
    assert ledger.store.find("never used") is None
    assert ledger.store.look(b"\0" * 32) is None


# --- prune ------------------------------------------------------------------------------------------------------------


def test_tokens_do_not_go_back_when_a_fence_was_pruned(ledger: Ledger) -> None:
    held = ledger.hold(operation())
    ledger.run(held, Completion("1", None, 0))
    prune(ledger)
    assert ledger.hold(held.operation).token > held.token


def test_prune_keeps_what_is_running_in_doubt_or_retained(ledger: Ledger) -> None:
    running, retained, doubtful = (ledger.hold(operation()) for _ in range(3))
    ledger.run(retained)
    start_effect(ledger, doubtful)
    ledger.abandon(doubtful, retention=0)
    prune(ledger)
    for held in (running, retained, doubtful):
        assert ledger.store.look(held.operation.digest) is not None


def test_prune_drops_what_is_finished_and_no_longer_retained(ledger: Ledger) -> None:
    done, failed, retryable = (ledger.hold(operation()) for _ in range(3))
    ledger.run(done, Completion("1", None, 0))
    ledger.abandon(failed, "failed", retention=0)
    ledger.abandon(retryable, retention=0)
    prune(ledger)
    for held in (done, failed, retryable):
        assert ledger.store.look(held.operation.digest) is None


def test_prune_keeps_a_retryable_entry_whose_effects_must_not_be_repeated(ledger: Ledger) -> None:
    held = ledger.hold(operation())
    start_effect(ledger, held)
    finish_effect(ledger, held)
    ledger.abandon(held, retention=0)
    prune(ledger)
    assert start_effect(ledger, ledger.hold(held.operation)).verdict == "done"
