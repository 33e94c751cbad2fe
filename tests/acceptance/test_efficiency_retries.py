"""One call, many deliveries: retries, reused task ids, redeliveries, revokes."""

from __future__ import annotations

from collections.abc import Mapping

import celery
import pytest
from celery.exceptions import TaskRevokedError

from celery_once_fenced import explain, release
from celery_once_fenced.runtime import runtime_of
from tests.acceptance.workers import Site, Trial, eventually


@pytest.fixture(scope="module")
def trials(site: Site) -> Mapping[str, Trial]:
    """All that take a while, begun at once."""
    return {
        "retry": site.begin("early", "retry 1", "sleep 0"),
        "retry_is_a_call": site.begin("early", "retry 1", "sleep 0", variant="retry_is_a_call"),
        "autoretry": site.begin("autoretry", "fail", "fail", "sleep 0"),
        "late": site.begin("autoretry_late", "fail", "fail", "sleep 0"),
        "task_id_is_identity": site.begin(
            "autoretry_late", "fail", "fail", "sleep 0", variant="task_id_is_identity"
        ),
    }


# --- retries ----------------------------------------------------------------------------------------------------------


def retries_run_until_one_succeeds(trial: Trial, runs: int, within: float = 20) -> None:
    assert trial.value(within) == f"{trial.label}#{runs}"
    assert trial.runs == runs
    assert trial.again().outcome.status == "enqueued"


def test_key_is_held_while_a_retry_waits(trials: Mapping[str, Trial]) -> None:
    trial = trials["retry"].has_run(1)
    eventually(lambda: trial.state == "RETRY")
    second = trial.again()
    assert (second.outcome.status, second.id) == ("duplicate", trial.result.id)


@pytest.mark.parametrize(("name", "runs"), [("retry", 2), ("autoretry", 3), ("late", 3)])
def test_retries_run_until_one_succeeds(trials: Mapping[str, Trial], name: str, runs: int) -> None:
    retries_run_until_one_succeeds(trials[name], runs)


def test_hold_of_a_waiting_retry_covers_its_countdown(site: Site) -> None:
    trial = site.begin("brief_hold", "retry 30").has_run(1)
    eventually(lambda: trial.running == "")
    (hold,) = site.holds(trial.task, trial.label).values()
    assert hold.left > 28


def test_retry_that_overtakes_its_own_end_waits_for_it(site: Site) -> None:
    trial = site.begin("late", "retry_then_linger 0.5", "sleep 0.2")
    assert trial.value() == f"{trial.label}#2"
    assert site.stage.most_at_once(trial.label) == 1


def task_id_can_be_used_again(site: Site, variant: str = "good", within: float = 10) -> None:
    trial = site.begin("late", variant=variant, task_id=f"nightly-{variant}")
    assert trial.value() == f"{trial.label}#1"
    trial.again(task_id=trial.result.id)
    trial.has_run(2, within)


def test_task_id_can_be_used_again(site: Site) -> None:
    task_id_can_be_used_again(site)


def test_the_task_id_as_identity_is_caught(site: Site) -> None:
    with pytest.raises(AssertionError):
        task_id_can_be_used_again(site, "task_id_is_identity", within=1)


def test_waiting_for_a_slot_uses_up_no_retries(site: Site) -> None:
    first = site.begin("serial", "hold", "sleep 0").has_run(1)
    with site.counted(first.task, "deferred", times=2):
        second = first.again("sleep 0")
    first.release()
    assert second.get(timeout=10) == f"{first.label}#2"
    assert {note.retries for note in site.stage.journal(first.label)} == {0}


# --- duplicates in the worker -----------------------------------------------------------------------------------------


def skipped_duplicate_releases_nothing(trial: Trial) -> None:
    trial.has_run(1)
    for _ in range(3):  # the hook of one has certainly run when the next one is answered
        skipped = trial.site.app.send_task(trial.task.name, (trial.label,))
        skipped.get(timeout=10, propagate=False)
        assert skipped.state == "REVOKED"
    assert trial.again().outcome.reason == "running"


def test_skipped_duplicate_releases_nothing(site: Site) -> None:
    trial = site.begin("early", "hold")
    skipped_duplicate_releases_nothing(trial)
    with pytest.raises(TaskRevokedError, match=trial.result.id):
        site.app.send_task(trial.task.name, (trial.label,)).get(timeout=10)
    assert trial.release().value() == f"{trial.label}#1"


def test_a_hook_that_releases_for_everybody_is_caught(site: Site) -> None:
    trial = site.begin("early", "hold", variant="releases_what_it_never_had")
    with pytest.raises(AssertionError):
        skipped_duplicate_releases_nothing(trial)
    trial.release()


def twin_of_a_running_message_leaves_its_result_alone(site: Site, variant: str = "good") -> Trial:
    trial, message = site.parked("tracked", "hold", variant=variant)
    site.deliver(message)
    trial.has_run(1)
    with site.counted(trial.task, "twin"):
        site.deliver(message, redelivered=True)
    assert trial.state == "STARTED"
    return trial


def test_twin_of_a_running_message_steps_aside_and_is_dropped_later(site: Site) -> None:
    trial = twin_of_a_running_message_leaves_its_result_alone(site)
    with site.counted(trial.task, "done"):
        assert trial.release().value() == f"{trial.label}#1"
    assert (trial.runs, trial.state) == (1, "SUCCESS")


def test_span_without_a_running_slot_sees_its_twin_too(site: Site) -> None:
    trial, message = site.parked("until_executing_late", "hold")
    site.deliver(message)
    trial.has_run(1)
    with site.counted(trial.task, "twin"):
        site.deliver(message, redelivered=True)
    with site.counted(trial.task, "done"):
        trial.release()
    assert (trial.runs, trial.value()) == (1, f"{trial.label}#1")


def test_message_that_the_body_gives_back_runs_again(site: Site) -> None:
    trial = site.begin("late", "requeue", "hold").has_run(2)
    assert trial.again().outcome.task_id == trial.result.id
    assert trial.release().value() == f"{trial.label}#2"


def test_redelivery_of_a_message_that_the_body_ignored_is_dropped(site: Site) -> None:
    trial, message = site.parked("tracked", "ignore")
    site.deliver(message)
    eventually(lambda: "Ignore" in site.stage.events(trial.label) and trial.running == "")
    with site.counted(trial.task, "done"):
        site.deliver(message, redelivered=True)
    assert trial.runs == 1


def late_redelivery_of_a_failure_leaves_its_result_alone(site: Site, variant: str = "good") -> None:
    trial, message = site.parked("tracked", "fail", variant=variant)
    site.deliver(message)
    eventually(lambda: trial.state == "FAILURE")
    with site.counted(trial.task, "done"):
        site.deliver(message, redelivered=True)
    assert (trial.runs, trial.state) == (1, "FAILURE")


def test_late_redelivery_of_a_failure_leaves_its_result_alone(site: Site) -> None:
    late_redelivery_of_a_failure_leaves_its_result_alone(site)


def test_storing_started_before_the_gate_is_caught(site: Site) -> None:
    with pytest.raises(AssertionError):
        late_redelivery_of_a_failure_leaves_its_result_alone(site, "started_before_the_gate")


def test_redelivered_message_of_another_call_is_deferred_not_skipped(site: Site) -> None:
    late, message = site.parked("early", "sleep 0")
    eventually(lambda: site.runtime.leases.release(site.digest(late.task, late.label), "q", late.queued))
    holder = late.task.delay(late.label, "hold")
    late.has_run(1)
    with site.counted(late.task, "deferred"):
        site.deliver(message, redelivered=True)
    late.release()
    assert holder.get(timeout=10) == f"{late.label}#1"
    assert late.value() == f"{late.label}#2"


def test_message_that_never_entered_the_gate_frees_its_key(site: Site) -> None:
    trial = site.begin("never_entered")
    eventually(lambda: trial.state == "FAILURE")
    eventually(lambda: trial.queued == "")


# --- revoked and purged -----------------------------------------------------------------------------------------------


def test_call_revoked_before_it_ran_frees_its_key(site: Site) -> None:
    trial, message = site.parked("early")
    site.app.control.revoke(trial.result.id, reply=True, timeout=5, limit=1)
    assert trial.again().outcome.status == "duplicate"
    site.deliver(message)
    eventually(lambda: trial.queued == "")
    assert trial.again().outcome.status == "enqueued"
    trial.has_run(1)


def test_revoked_holder_with_a_long_countdown_is_no_holder(site: Site) -> None:
    trial = site.begin("early", countdown=600)
    eventually(lambda: site.redis.hlen(f"{site.name}.unacked") > 0)
    site.app.control.revoke(trial.result.id, reply=True, timeout=5, limit=1)
    if celery.VERSION < (5, 6):  # since then the worker stores it at once, not when the countdown ends
        site.app.backend.mark_as_revoked(trial.result.id, "revoked")
    eventually(lambda: trial.state == "REVOKED")
    assert trial.again().outcome.status == "enqueued"
    trial.has_run(1)


def test_hold_of_a_purged_call_is_bounded_and_can_be_released_by_hand(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(runtime_of(site.app).__dict__, "ledger", None)  # other tests set Django up
    trial, _ = site.parked("early")
    site.app.set_current()
    (hold,) = explain(site.digest(trial.task, trial.label)).holds
    assert 0 < hold.left <= 30
    assert release(hold.digest, hold.holder)
    assert trial.again().outcome.status == "enqueued"


# --- the broken ones, whose time has passed by now --------------------------------------------------------------------


def test_a_retry_that_meets_its_own_lock_is_caught(trials: Mapping[str, Trial]) -> None:
    with pytest.raises(AssertionError):
        retries_run_until_one_succeeds(trials["retry_is_a_call"], 2, within=5)


def test_the_task_id_as_identity_of_retries_is_caught(trials: Mapping[str, Trial]) -> None:
    with pytest.raises(AssertionError):
        retries_run_until_one_succeeds(trials["task_id_is_identity"], 3, within=5)
