"""What every ledger store must do for effects, in doubt and the outbox, by its Protocol alone (L4, L5, L9, L14).

Started, finished and interrupted effects in the ordinary course are in ``test_ledger_store``; here is what may go wrong.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from celery_once_fenced.errors import OutcomeUnknownError
from celery_once_fenced.stores import (
    EffectFinish,
    EffectStart,
    EffectStarted,
    Held,
    Resolution,
    Resolved,
)
from celery_once_fenced.stores.postgres import schema_sql
from tests.fixtures.ledger import DONE, Ledger, fresh, ledger_at, operation


@pytest.fixture(scope="module")
def ledger(module_postgres_url: str) -> Iterator[Ledger]:
    with ledger_at(module_postgres_url) as opened:
        yield opened


def start(
    ledger: Ledger, held: Held, on_unknown: str = "hold", own: str | None = None, name: str = "gateway"
) -> EffectStarted:
    return ledger.store.effect_start(EffectStart(held, name, on_unknown, own))


def finish(
    ledger: Ledger, held: Held, state: Any = "done", result: str | None = '"receipt"', name: str = "gateway"
) -> bool:
    error = None if state == "done" else '{"type": "Declined"}'
    return ledger.store.effect_finish(
        EffectFinish(held.operation.digest, name, held.holder, state, result, error)
    )


def in_doubt(ledger: Ledger, message: str | None = "the message", **options: Any) -> Held:
    held = ledger.hold(operation(**options))
    start(ledger, held)
    assert ledger.abandon(held, message=message).state == "in_doubt"
    return held


def resolve(ledger: Ledger, held: Held, state: Any, **options: Any) -> Resolved:
    defaults = {"result": None, "error": None, "retention": 3600.0, "actor": "ada", "reason": "seen"}
    return ledger.store.resolve(Resolution(held.operation.digest, state, **{**defaults, **options}))


def events(ledger: Ledger, kind: str, held: Held) -> list[tuple[str, Any]]:
    rows = ledger.execute(
        "select actor, detail from once_fenced_event where kind = %s and key_digest = %s order by id",
        (kind, held.operation.digest),
    )
    return [(actor, json.loads(detail)) for actor, detail in rows]


# --- effects ----------------------------------------------------------------------------------------------------------


def test_started_is_committed_before_the_answer(ledger: Ledger) -> None:
    held = ledger.hold(operation())
    answer = start(ledger, held)
    (row,) = ledger.execute(
        "select state, downstream_key, holder from once_fenced_effect where key_digest = %s",
        (held.operation.digest,),
    )
    assert row == ("started", answer.downstream_key, held.holder)


def test_only_the_highest_token_starts_a_step(ledger: Ledger) -> None:
    first = ledger.lapsed(operation())
    second = ledger.hold(first.operation)
    assert start(ledger, first).verdict == "fenced"
    assert start(ledger, second).verdict == "go"


def test_no_step_is_started_after_the_commit(ledger: Ledger) -> None:
    held = ledger.hold(operation())
    ledger.run(held)
    assert start(ledger, held).verdict == "fenced"


def test_two_that_start_the_same_step_at_once_get_one_go(ledger: Ledger) -> None:
    held = ledger.hold(operation())
    met = threading.Barrier(2, timeout=5)

    def ask(_: int) -> EffectStarted:
        met.wait()
        return start(ledger, held)

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(ask, range(2)))
    assert sorted(answer.verdict for answer in answers) == ["go", "unknown"]
    assert {answer.downstream_key for answer in answers} == {answers[0].downstream_key}
    assert {answer.holder for answer in answers} == {held.holder}


def test_claim_does_not_wait_for_a_start_in_flight(ledger: Ledger) -> None:
    held = ledger.hold(operation())
    start(ledger, held)
    assert ledger.claim(held.operation).verdict == "busy"
    assert ledger.renew(held) == ["renewed"]


def test_downstream_key_survives_every_unknown_outcome_and_no_certain_failure(ledger: Ledger) -> None:
    op, keys = operation(), []
    for ending in ("lapse", "lapse", "failed", "lapse"):
        held = ledger.hold(op, on_unknown="rerun")
        keys.append(start(ledger, held, "rerun").downstream_key)
        if ending == "failed":
            finish(ledger, held, "failed", None)
        ledger.expire(op.resource)
    assert keys[0] == keys[1] == keys[2] != keys[3]


def test_a_certain_failure_lets_the_key_succeed_without_the_step(ledger: Ledger) -> None:
    held = ledger.hold(operation())
    start(ledger, held)
    finish(ledger, held, "failed", None)
    ledger.run(held)
    assert ledger.claim(held.operation).verdict == "completed"


def test_policy_of_the_step_is_asked_before_that_of_the_task(ledger: Ledger) -> None:
    held = ledger.lapsed(operation())
    start(ledger, held, "hold", "rerun", name="harmless")
    assert ledger.hold(held.operation, on_unknown="hold").attempt == 2


def test_strictest_of_several_unknown_steps_decides(ledger: Ledger) -> None:
    held = ledger.lapsed(operation())
    for name, own in (("a", "rerun"), ("b", "fail"), ("c", "hold")):
        start(ledger, held, "rerun", own, name=name)
    answer = ledger.claim(held.operation, on_unknown="rerun")
    assert (answer.verdict, answer.effect) == ("in_doubt", "c")


def test_outcome_that_comes_too_late_is_kept_for_people(ledger: Ledger) -> None:
    held = ledger.lapsed(operation())
    start(ledger, held, "rerun")
    start(ledger, ledger.hold(held.operation, on_unknown="rerun"), "rerun")
    assert not finish(ledger, held)
    ((_, told),) = events(ledger, "effect.late_outcome", held)
    assert (told["effect"], told["state"], told["result"]) == ("gateway", "done", '"receipt"')


def test_finished_outcome_does_not_change(ledger: Ledger) -> None:
    held = ledger.hold(operation())
    start(ledger, held)
    assert finish(ledger, held)
    assert not finish(ledger, held, result='"another"')
    assert start(ledger, held).result == '"receipt"'


@pytest.mark.parametrize("result", ["null", "NaN", r'"\u0000 \ud800"'])
def test_any_ascii_json_is_kept_as_it_is(ledger: Ledger, result: str) -> None:
    held = ledger.hold(operation())
    start(ledger, held)
    finish(ledger, held, result=result)
    assert start(ledger, held).result == result


# --- in doubt ---------------------------------------------------------------------------------------------------------


def test_probe_that_cannot_know_is_in_doubt_whatever_the_policy(ledger: Ledger) -> None:
    held = ledger.hold(operation(), on_unknown="probe")
    start(ledger, held, "probe")
    assert ledger.abandon(held, on_unknown="doubt").state == "in_doubt"


@pytest.mark.parametrize("policy", ["rerun", "probe"])
def test_unknown_outcome_of_these_policies_is_left_to_the_next_attempt(ledger: Ledger, policy: str) -> None:
    held = ledger.hold(operation())
    start(ledger, held, policy)
    assert ledger.abandon(held, on_unknown=policy).state == "retryable"
    with pytest.raises(OutcomeUnknownError):
        ledger.run(ledger.hold(held.operation, on_unknown=policy))


def test_resolved_as_succeeded_answers_with_its_result(ledger: Ledger) -> None:
    held = in_doubt(ledger)
    assert resolve(ledger, held, "succeeded", result="[7]") == Resolved(True)
    answer = ledger.claim(held.operation)
    assert (answer.verdict, answer.result) == ("completed", "[7]")


def test_resolved_as_failed_answers_with_its_error(ledger: Ledger) -> None:
    held = in_doubt(ledger)
    resolve(ledger, held, "failed", error='{"type": "resolved"}')
    answer = ledger.claim(held.operation)
    assert (answer.verdict, answer.error) == ("failed_final", '{"type": "resolved"}')


def test_run_again_calls_with_the_same_key_and_hands_out_the_message(ledger: Ledger) -> None:
    held = in_doubt(ledger)
    before = start_key(ledger, held)
    assert resolve(ledger, held, "retryable") == Resolved(True, "the message", held.operation.task_id)
    again = start(ledger, ledger.hold(held.operation))
    assert (again.verdict, again.downstream_key) == ("go", before)


def start_key(ledger: Ledger, held: Held) -> str:
    ((key,),) = ledger.execute(
        "select downstream_key from once_fenced_effect where key_digest = %s", (held.operation.digest,)
    )
    return str(key)


def test_message_that_is_to_run_again_is_in_the_outbox(ledger: Ledger) -> None:
    held = in_doubt(ledger, message=fresh("message"))
    text = resolve(ledger, held, "retryable").message
    assert text not in {message.message for message in ledger.store.outbox_take("", 60.0)}
    assert text in {message.message for message in ledger.store.outbox_take("", 0.0, 1000)}


def test_message_of_another_app_is_left_to_that_apps_sweep(ledger: Ledger) -> None:
    held = in_doubt(ledger, message=fresh("message"), namespace="its own")
    assert resolve(ledger, held, "retryable", namespace="another") == Resolved(True)
    assert taken(ledger, namespace="its own") == {held.operation.task_id}


@pytest.mark.parametrize("state", ["succeeded", "failed", "retryable"])
def test_decision_is_made_once_and_says_who_and_why(ledger: Ledger, state: str) -> None:
    held = in_doubt(ledger)
    assert resolve(ledger, held, state, reason="first", result="1" if state == "succeeded" else None).done
    assert resolve(ledger, held, "failed", reason="second") == Resolved(False)
    ((actor, told),) = events(ledger, "ledger.resolved", held)
    assert (actor, told) == ("ada", {"state": state, "reason": "first"})


def test_only_what_is_in_doubt_is_resolved(ledger: Ledger) -> None:
    running, done = ledger.hold(operation()), ledger.hold(operation())
    ledger.run(done)
    for held in (running, done, replace(done, operation=operation())):
        assert resolve(ledger, held, "failed") == Resolved(False)


def test_receipt_of_the_old_holder_counts_after_it_was_told_to_run_again(ledger: Ledger) -> None:
    held = in_doubt(ledger)
    resolve(ledger, held, "retryable")
    assert finish(ledger, held)
    assert start(ledger, ledger.hold(held.operation)).verdict == "done"


def test_receipt_after_the_step_was_called_again_does_not(ledger: Ledger) -> None:
    held = in_doubt(ledger)
    resolve(ledger, held, "retryable")
    start(ledger, ledger.hold(held.operation))
    assert not finish(ledger, held)


def test_run_again_that_is_interrupted_again_is_in_doubt_again(ledger: Ledger) -> None:
    held = in_doubt(ledger)
    resolve(ledger, held, "retryable")
    second = ledger.lapsed(held.operation)
    start(ledger, second)
    assert ledger.claim(held.operation, message="again").verdict == "in_doubt"


def test_first_claim_with_a_message_leaves_one_that_can_run_again(ledger: Ledger) -> None:
    held = ledger.lapsed(operation())
    start(ledger, held)
    other = replace(held.operation, task_id="another call")
    assert ledger.claim(other).verdict == "in_doubt"
    assert ledger.claim(other, message="of another").verdict == "in_doubt"
    assert ledger.claim(held.operation, message="too late").verdict == "in_doubt"
    assert resolve(ledger, held, "retryable") == Resolved(True, "of another", "another call")


def test_key_is_found_in_doubt_before_it_is_found_elsewhere(ledger: Ledger) -> None:
    """Under ``replay_for=0`` each call of a key is an entry of its own."""
    doubtful = in_doubt(ledger)
    later = ledger.hold(replace(operation(resource=fresh("account")), key=doubtful.operation.key))
    assert ledger.store.find(doubtful.operation.key) == doubtful.operation.digest
    resolve(ledger, doubtful, "failed")
    assert ledger.store.find(doubtful.operation.key) == later.operation.digest


# --- forget -----------------------------------------------------------------------------------------------------------


def test_forgotten_key_runs_from_the_start(ledger: Ledger) -> None:
    held = ledger.hold(operation())
    start(ledger, held)
    finish(ledger, held)
    ledger.run(held)
    assert ledger.store.forget(held.operation.digest, "wrong price", "ada")
    assert events(ledger, "ledger.forgotten", held) == [
        ("ada", {"state": "succeeded", "reason": "wrong price"})
    ]
    again = ledger.hold(held.operation)
    assert (again.attempt, start(ledger, again).verdict) == (1, "go")


def test_running_or_doubtful_key_is_not_forgotten(ledger: Ledger) -> None:
    for held in (ledger.hold(operation()), in_doubt(ledger)):
        assert not ledger.store.forget(held.operation.digest, "no")
        assert ledger.store.look(held.operation.digest) is not None


# --- outbox -----------------------------------------------------------------------------------------------------------


def send(ledger: Ledger, *ids: str, commits: bool = True, namespace: str = "") -> None:
    held = ledger.hold(operation(namespace=namespace))
    with ledger.database.transaction(held) as body:
        for task_id in ids:
            body.put(held, task_id, f"message of {task_id}")
        if commits:
            body.complete(held, DONE)
        else:
            body.connection.rollback()


def taken(ledger: Ledger, age: float = 0.0, namespace: str = "") -> set[str]:
    return {message.task_id for message in ledger.store.outbox_take(namespace, age, 1000)}


def mine(ledger: Ledger, *ids: str) -> list[str]:
    return sorted(message.task_id for message in ledger.store.outbox_mine(ids))


def test_message_is_there_if_and_only_if_its_body_commits(ledger: Ledger) -> None:
    kept, lost = fresh("kept"), fresh("lost")
    send(ledger, kept)
    send(ledger, lost, commits=False)
    assert mine(ledger, kept, lost) == [kept]


def test_savepoint_that_is_rolled_back_takes_its_message_along(ledger: Ledger) -> None:
    held, kept, lost = ledger.hold(operation()), fresh("kept"), fresh("lost")
    with ledger.database.transaction(held) as body:
        body.put(held, kept, "kept")
        body.connection.execute("savepoint s")
        body.put(held, lost, "lost")
        body.connection.execute("rollback to s")
        body.complete(held, DONE)
    assert mine(ledger, kept, lost) == [kept]


def test_ones_own_messages_are_not_swept_for_a_while(ledger: Ledger) -> None:
    task_id = fresh("task")
    send(ledger, task_id)
    assert mine(ledger, task_id) == [task_id]
    assert task_id not in taken(ledger, age=60.0)


def test_message_that_a_sweep_has_taken_is_left_to_it(ledger: Ledger) -> None:
    task_id = fresh("task")
    send(ledger, task_id)
    assert task_id in taken(ledger)
    assert mine(ledger, task_id) == []


def test_two_sweeps_take_a_message_once(ledger: Ledger) -> None:
    ids = [fresh("task") for _ in range(20)]
    send(ledger, *ids)
    ledger.execute("update once_fenced_outbox set created_at = created_at - interval '1 h'")
    with ThreadPoolExecutor(4) as pool:
        found = [one for some in pool.map(lambda _: sorted(taken(ledger, 60.0)), range(4)) for one in some]
    assert sorted(one for one in found if one in ids) == sorted(ids)


def test_confirmed_message_is_not_taken_again(ledger: Ledger) -> None:
    task_id = fresh("task")
    send(ledger, task_id)
    ledger.store.outbox_confirm([task_id])
    assert (task_id in taken(ledger), mine(ledger, task_id)) == (False, [])


def a_sweep_takes_what_its_own_app_has_left(ledger: Ledger) -> None:
    apps = {name: fresh(name) for name in ("shop", "blog")}
    for namespace, task_id in apps.items():
        send(ledger, task_id, namespace=namespace)
    assert {apps[name]: taken(ledger, namespace=name) for name in apps} == {
        one: {one} for one in apps.values()
    }


def test_a_sweep_takes_what_its_own_app_has_left(ledger: Ledger) -> None:
    a_sweep_takes_what_its_own_app_has_left(ledger)


def test_a_sweep_of_all_apps_is_caught(postgres_url: str) -> None:
    naive = schema_sql().replace(" and o.namespace = p_namespace", "")
    with ledger_at(postgres_url, naive) as opened, pytest.raises(AssertionError):
        a_sweep_takes_what_its_own_app_has_left(opened)


def test_prune_drops_what_was_published_and_nothing_else(ledger: Ledger) -> None:
    published, open_ = fresh("published"), fresh("open")
    send(ledger, published, open_)
    ledger.store.outbox_confirm([published])
    while ledger.store.prune(-1):
        pass
    left = {task_id for (task_id,) in ledger.execute("select task_id from once_fenced_outbox")}
    assert left & {published, open_} == {open_}
