"""What is in doubt, and what becomes of it: a person decides, a receipt comes late, nothing is asked twice (L4, L14)."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from celery_once_fenced import InDoubtError, RecordedError, ResultOmitted, forget, resolve, runtime
from celery_once_fenced.errors import ConfigError
from django_celery_once_fenced.models import Effect, Event, Outbox
from example_project.servers import Servers
from tests.acceptance.correctness_posting import Zombie, has_one_effect
from tests.acceptance.effects_gateway import DeclinedError, Gateway
from tests.acceptance.effects_site import SCRIPTS, Charge, EffectsSite, charged_once
from tests.acceptance.workers import eventually


@pytest.fixture(scope="module")
def site(servers: Servers, shop: str) -> Iterator[EffectsSite]:
    site = EffectsSite.on(servers.redis_url, shop)
    with site.worker(concurrency=4):
        yield site
    site.close()


@pytest.fixture(autouse=True)
def resolving_here(site: EffectsSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """The person sits at the test process."""
    monkeypatch.setattr(runtime, "current", lambda: site.runtime)


def in_doubt(site: EffectsSite, name: str = "hold", script: str = SCRIPTS["in the body"]) -> Charge:
    """A call whose first run is told that the time is up, after the gateway has charged."""
    charge = site.charge(name, script.replace("charge", "timeout", 1), script)
    assert isinstance(charge.ends("FAILURE"), InDoubtError)
    return charge


def effect_of(charge: Charge) -> Effect:
    return Effect.objects.get(entry=charge.ledger.pk)


# --- errors out of the call -------------------------------------------------------------------------------------------


def test_time_out_of_a_held_step_is_in_doubt_at_once(site: EffectsSite) -> None:
    charge = in_doubt(site)
    assert (len(charge.requests), charge.entries, charge.ledger.state) == (1, 0, "in_doubt")


def test_time_out_of_a_rerun_step_is_an_error_like_any_other_and_asked_again(site: EffectsSite) -> None:
    charge = site.charge("rerun", "timeout", "charge, post")
    assert isinstance(charge.ends("FAILURE"), TimeoutError)
    charge.call()
    assert charge.value() == charge.balance
    charged_once(charge)
    assert len(charge.requests) == 2


def test_certain_failure_is_raised_and_the_next_attempt_asks_with_a_new_key(site: EffectsSite) -> None:
    charge = site.prepared("hold", "charge, post")
    Gateway.of(site.app).refuses(charge.label)
    charge.call()
    assert isinstance(charge.ends("FAILURE"), DeclinedError)
    assert charge.ledger.state == "retryable"
    charge.call()
    assert charge.value() == charge.balance
    assert (len(set(charge.requests)), charge.charges) == (2, 1)


def test_swallowed_unknown_outcome_does_not_commit(site: EffectsSite) -> None:
    charge = site.charge("hold", "swallow timeout, post")
    assert isinstance(charge.ends("FAILURE"), InDoubtError)
    assert (charge.entries, len(charge.requests)) == (0, 1)


def test_recorded_step_is_not_taken_again_by_a_retry(site: EffectsSite) -> None:
    charge = site.charge("hold", "charge, retry", "charge, fail", "charge, post")
    assert isinstance(charge.ends("FAILURE"), ValueError)
    charge.call()
    charge.value()
    assert (charge.runs, len(charge.requests)) == (3, 1)


@pytest.mark.parametrize("act", ["charge, charge", "charge a, charge b, charge a"])
def test_name_used_twice_in_one_execution_is_refused(site: EffectsSite, act: str) -> None:
    charge = site.charge("hold", f"{act}, post")
    error = charge.ends("FAILURE")
    assert "already called in this execution" in str(error)
    assert charge.entries == 0


def test_write_in_the_bodys_transaction_during_a_step_is_refused(site: EffectsSite) -> None:
    charge = site.charge("hold", "scribble")
    assert "write before or after" in str(charge.ends("FAILURE").__cause__ or charge.result.traceback)
    assert (charge.entries, charge.requests) == (0, [])


# --- a person decides -------------------------------------------------------------------------------------------------


def test_resolved_as_succeeded_answers_later_calls_and_runs_nothing(site: EffectsSite) -> None:
    charge = in_doubt(site)
    assert resolve(
        charge.text, "succeeded", result={"receipt": 7}, reason="it is in their books", actor="ada"
    )
    assert charge.again().get(timeout=10) == {"receipt": 7}
    assert (charge.runs, len(charge.requests), charge.entries) == (1, 1, 0)
    event = Event.objects.get(kind="ledger.resolved", key_digest=charge.ledger.pk)
    assert (event.actor, json.loads(event.detail or "")["reason"]) == ("ada", "it is in their books")


def test_resolved_as_failed_answers_later_calls_with_the_reason(site: EffectsSite) -> None:
    charge = in_doubt(site)
    assert resolve(charge.text, "failed", reason="the customer has gone")
    with pytest.raises(RecordedError, match="ended with resolved: the customer has gone"):
        charge.again().get(timeout=10)
    assert (charge.runs, len(charge.requests)) == (1, 1)


@pytest.mark.parametrize("how", SCRIPTS)
def test_run_again_asks_with_the_same_key_under_the_same_task_id(site: EffectsSite, how: str) -> None:
    charge = in_doubt(site, "hold" if how == "in the body" else "hold_open", SCRIPTS[how])
    before = effect_of(charge).downstream_key
    assert resolve(charge.text, "again", reason="the gateway has no such charge")
    eventually(lambda: charge.ledger.state == "succeeded", what="the second run")
    charged_once(charge)
    has_one_effect(charge)
    assert charge.requests == [before, before]
    eventually(lambda: charge.state == "SUCCESS")


def test_run_again_is_the_same_call_where_each_call_is_its_own(site: EffectsSite) -> None:
    """``replay_for=0``: a new run id would be a new operation, and a new charge (L11)."""
    charge = in_doubt(site, "each_open", SCRIPTS["outside a transaction"])
    assert resolve(charge.text, "again", reason="try again")
    eventually(lambda: charge.ledger.state == "succeeded", what="the second run")
    charged_once(charge)
    assert len(charge.requests) == 2


def test_run_again_keeps_a_key_that_the_call_named(site: EffectsSite) -> None:
    charge = site.prepared("hold", "timeout", "charge, post")
    charge.call(once_key=f"named {charge.label}")
    assert isinstance(charge.ends("FAILURE"), InDoubtError)
    text = charge.result.result.key
    assert resolve(text, "again", reason="try again")
    eventually(lambda: charge.entries == 1, what="the second run")
    charged_once(charge)


def test_run_again_is_published_by_a_sweep_where_the_broker_is_away(
    site: EffectsSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    charge = in_doubt(site)

    def away(*_: object) -> None:
        raise OSError("the broker is away")

    with monkeypatch.context() as patch:
        patch.setattr(site.runtime.post, "publish", away)
        assert resolve(charge.text, "again", reason="try again")
        assert Outbox.objects.get(task_id=charge.result.id).confirmed_at is None
    eventually(lambda: charge.ledger.state == "succeeded", what="the second run")
    charged_once(charge)


def test_decision_is_made_once(site: EffectsSite) -> None:
    charge = in_doubt(site)
    assert resolve(charge.text, "failed", reason="first")
    assert not resolve(charge.text, "again", reason="second")
    assert charge.ledger.state == "failed"


def test_key_in_doubt_is_not_forgotten_but_a_decided_one_is(site: EffectsSite) -> None:
    charge = in_doubt(site)
    assert not forget(charge.text, reason="tidy up")
    resolve(charge.text, "failed", reason="no use")
    assert forget(charge.text, reason="the customer is back")
    charge.call()
    assert charge.value() == charge.balance


def test_decision_needs_a_reason_and_a_result_that_is_json(site: EffectsSite) -> None:
    charge = in_doubt(site)
    for wrong in ({"reason": ""}, {"reason": "x", "result": object()}):
        with pytest.raises(ConfigError):
            resolve(charge.text, "succeeded", **wrong)  # type: ignore[arg-type]
    assert charge.ledger.state == "in_doubt"


# --- a holder that is late --------------------------------------------------------------------------------------------


def test_receipt_of_a_frozen_holder_counts_when_it_runs_again(site: EffectsSite) -> None:
    charge = site.charge("hold", "charge, post", at={"charged": "freeze"})
    zombie = Zombie(charge, charge.frozen("charged")).lapses()
    site.redeliver(charge.result.id)
    charge.ends("FAILURE")
    assert charge.ledger.state == "in_doubt"
    zombie.wakes()
    charge.has_told("effect.finished")
    zombie.was_fenced_off("leave")
    assert (effect_of(charge).state, charge.ledger.state) == ("done", "in_doubt")
    assert resolve(charge.text, "again", reason="its receipt is here")
    eventually(lambda: charge.ledger.state == "succeeded", what="the second run")
    has_one_effect(charge)
    assert len(charge.requests) == 1


def test_frozen_holder_takes_no_step_after_its_successor_has_begun(site: EffectsSite) -> None:
    charge = site.charge("rerun", "hold, charge, post")
    pid = charge.has_run(1).site.stage.journal(charge.label)[-1].pid
    os.kill(pid, signal.SIGSTOP)
    zombie = Zombie(charge, pid).lapses()
    site.redeliver(charge.result.id)
    charge.has_run(2)
    charge.release()
    charge.value()
    zombie.wakes()
    eventually(lambda: charge.ended_in(pid), what="the end of the first")
    assert (len(charge.requests), charge.runs) == (1, 2)
    has_one_effect(charge)


# --- atomic=False -----------------------------------------------------------------------------------------------------


def test_second_block_is_refused_and_the_first_stays(site: EffectsSite) -> None:
    charge = site.charge("hold_open", "open, post, close, open")
    assert ResultOmitted.matches(charge.value())
    assert [event["why"] for event in charge.events("body.failed_after_commit")] == ["GrantError"]
    has_one_effect(charge)


@pytest.mark.parametrize("name", ["hold", "hold_open"])
def test_body_that_opens_no_block_ends_as_done(site: EffectsSite, name: str) -> None:
    charge = site.charge(name, "charge, give done")
    assert charge.value() == charge.again().get(timeout=10) == "done"
    assert (charge.runs, charge.ledger.state) == (1, "succeeded")


def test_block_in_a_body_that_is_one_transaction_is_refused(site: EffectsSite) -> None:
    assert "atomic=False" in str(site.charge("hold", "open, post").ends("FAILURE"))


def test_error_after_the_block_is_told_and_the_task_succeeds(site: EffectsSite) -> None:
    charge = site.charge("hold_open", "charge, open, post, close, fail")
    value = charge.value()
    assert ResultOmitted.matches(value)
    assert charge.again().get(timeout=10) == value
    assert [event["why"] for event in charge.events("body.failed_after_commit")] == ["ValueError"]
    has_one_effect(charge)


def test_retry_after_the_block_is_no_retry(site: EffectsSite) -> None:
    charge = site.charge("hold_open", "open, post, close, retry")
    charge.value()
    assert [event["why"] for event in charge.events("body.failed_after_commit")] == ["GrantError"]
    eventually(site.idle)
    assert charge.runs == charge.deliveries == 1


def test_step_after_the_block_is_refused(site: EffectsSite) -> None:
    charge = site.charge("hold_open", "open, post, close, charge")
    charge.value()
    assert charge.requests == []


@pytest.mark.parametrize("ending", ["retry", "fail"])
def test_block_that_ends_in_an_error_leaves_nothing_and_is_opened_by_the_next_attempt(
    site: EffectsSite, ending: str
) -> None:
    charge = site.charge("hold_open", f"charge, open, post, {ending}", SCRIPTS["outside a transaction"])
    if ending == "fail":
        assert isinstance(charge.ends("FAILURE"), ValueError)
        assert charge.entries == 0
        charge.call()
    assert charge.value() == charge.balance
    has_one_effect(charge)
    assert (charge.runs, len(charge.requests)) == (2, 1)


def test_result_of_a_body_killed_before_it_was_recorded_is_marked(site: EffectsSite) -> None:
    charge = site.charge("hold_open", SCRIPTS["outside a transaction"], at={"recording": "die"})
    value = charge.value()
    assert (value["reason"], charge.again().get(timeout=10)) == ("not_recorded", value)
    has_one_effect(charge)
    assert charge.runs == 1


def test_error_swallowed_in_the_block_does_not_hide_that_its_transaction_is_broken(site: EffectsSite) -> None:
    charge = site.prepared("hold_open", "open, post, swallow divide, close", "open, post, close")
    charge.call()
    charge.ends("FAILURE")
    assert charge.entries == 0
    charge.call()
    charge.value()
    has_one_effect(charge)


def test_body_that_swallows_the_loss_of_its_block_is_not_done(site: EffectsSite) -> None:
    charge = site.charge("hold_open", "charge, swallow lose", SCRIPTS["outside a transaction"])
    assert charge.value() == charge.balance
    has_one_effect(charge)
    assert (charge.runs, len(charge.requests)) == (2, 1)


def test_grant_believes_until_its_fence_is_anothers(site: EffectsSite) -> None:
    charge = site.charge("hold_open", "check")
    assert charge.value() == [True, True]
    late = site.charge("hold_open", "hold, watch", "open, post, close")
    pid = late.has_run(1).site.stage.journal(late.label)[-1].pid
    os.kill(pid, signal.SIGSTOP)
    zombie = Zombie(late, pid).lapses()
    site.redeliver(late.result.id)
    late.value()
    late.release()
    zombie.wakes()
    zombie.was_fenced_off("leave")
    assert "lost True 0" in site.stage.events(late.label)
    has_one_effect(late)
    assert late.state == "SUCCESS"
