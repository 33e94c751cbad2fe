"""What enters the gate in the worker, and what does not (E10, E14, E16, W1, W9)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from celery_once_fenced import DuplicateError, GrantError
from tests.acceptance.workers import Site, eventually

ROUNDS = 1000


# --- messages without a header ----------------------------------------------------------------------------------------

SENDER = """
import json, sys
from celery import Celery
app = Celery(set_as_current=False)
app.conf.update(json.loads(sys.argv[1]))
ids = [app.send_task(sys.argv[2], (sys.argv[3], "sleep 0.2")).id for _ in range(4)]
print(json.dumps(ids))
"""
"""A process that never imported the tasks, as beat or another service may be."""


def sent_by_name_they_run_one_at_a_time(site: Site, label: str, variant: str = "good") -> None:
    settings = {name: site.settings[name] for name in site.settings if not name.startswith("once_fenced")}
    command = [sys.executable, "-c", SENDER, json.dumps(settings), f"{variant}.serial", label]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    eventually(lambda: site.stage.events(label).count("returned") == 4, 15)
    assert site.stage.most_at_once(label) == 1


def test_messages_sent_by_a_stranger_run_one_at_a_time(site: Site, label: str) -> None:
    sent_by_name_they_run_one_at_a_time(site, label)


def test_a_lock_that_only_callers_take_is_caught(site: Site, label: str) -> None:
    with pytest.raises(AssertionError):
        sent_by_name_they_run_one_at_a_time(site, label, "locks_only_the_call")


def test_messages_sent_by_name_are_skipped_while_one_runs(site: Site) -> None:
    trial = site.begin("early", "hold").has_run(1)
    sent = [site.app.send_task("good.early", (trial.label,)) for _ in range(4)]
    assert [result.get(timeout=10, propagate=False) and result.state for result in sent] == ["REVOKED"] * 4
    trial.release()
    assert (trial.value(), trial.runs) == (f"{trial.label}#1", 1)


def test_conflict_raises_where_it_should_and_the_worker_lives_on(site: Site) -> None:
    trial = site.begin("raises", "hold").has_run(1)
    with pytest.raises(DuplicateError) as caught:
        site.app.send_task("good.raises", (trial.label,)).get(timeout=10)
    assert (caught.value.key, caught.value.task_id) == (f"good.raises:{trial.label}", trial.result.id)
    trial.release()
    assert trial.value() == f"{trial.label}#1"


def test_conflict_is_deferred_where_it_should(site: Site) -> None:
    trial = site.begin("defers", "hold").has_run(1)
    with site.counted(trial.task, "deferred"):
        sent = site.app.send_task("good.defers", (trial.label,))
    trial.release()
    assert sent.get(timeout=10) == f"{trial.label}#2"


def test_error_of_a_duplicate_crosses_processes(site: Site) -> None:
    trial = site.begin("raises", "hold").has_run(1)
    caller = site.task("early").delay(trial.label, "call raises")
    with pytest.raises(DuplicateError, match=trial.result.id):
        caller.get(timeout=10)
    trial.release()
    assert site.begin("early").value()


# --- ways around ------------------------------------------------------------------------------------------------------


def test_once_false_and_a_key_of_none_are_not_guarded(site: Site) -> None:
    trial = site.begin("early", "hold").has_run(1)
    bypassing = trial.again("hold", once=False)
    unkeyed = [site.task("no_key").delay(trial.label, "hold") for _ in range(2)]
    trial.has_run(4)
    assert [call.outcome.status for call in (bypassing, *unkeyed)] == ["unguarded"] * 3
    assert [call.outcome.reason for call in (bypassing, *unkeyed)] == ["bypassed", "no_key", "no_key"]
    trial.release()
    assert bypassing.get(timeout=10)


def test_retry_of_a_bypassing_call_bypasses_too(site: Site) -> None:
    trial = site.begin("early", "hold").has_run(1)
    bypassing = trial.again("", "retry 0.2", "sleep 0", once=False)
    assert bypassing.get(timeout=10) == f"{trial.label}#3"
    trial.release()


def test_once_key_is_the_key_of_one_call(site: Site) -> None:
    trial = site.begin("early", "hold", once_key="mine").has_run(1)
    assert trial.task.apply_async(("other",), once_key="mine").outcome.status == "duplicate"
    assert trial.task.si("another").set(once_key="mine").apply_async().outcome.task_id == trial.result.id
    assert trial.again().outcome.status == "enqueued"
    trial.release()


def test_signatures_of_unknown_tasks_carry_once_and_once_key(site: Site) -> None:
    trial = site.begin("early", "hold", once_key="yours").has_run(1)
    named = site.stranger.signature("good.early", (trial.label,))
    skipped = named.clone().set(once_key="yours").apply_async()
    skipped.get(timeout=10, propagate=False)
    bypassing = named.clone((), {}).set(once=False, once_key="yours").apply_async()
    assert (skipped.state, bypassing.get(timeout=10)) == ("REVOKED", f"{trial.label}#2")
    trial.release()


def test_calls_in_the_same_process_are_no_deliveries(site: Site, label: str) -> None:
    queued, _ = site.parked("early")
    holds = site.holds(queued.task, queued.label)
    assert queued.task(queued.label) == f"{queued.label}#1"
    assert queued.task.apply((queued.label,)).get() == f"{queued.label}#2"
    assert site.holds(queued.task, queued.label).keys() == holds.keys() == {"q"}
    assert queued.again().outcome.status == "duplicate"


def test_task_that_calls_itself_runs_its_body(site: Site) -> None:
    with site.counted(site.task("early"), "released"):
        trial = site.begin("early", "call_itself")
    assert trial.value() == f"{trial.label}#2"


@pytest.mark.parametrize("how", ["map", "starmap", "chunks"])
def test_map_starmap_and_chunks_are_not_guarded(site: Site, how: str, label: str) -> None:
    task = site.task("early")
    if how == "map":
        result = task.map([label, label]).delay()
    elif how == "starmap":
        result = task.starmap([(label,), (label,)]).delay()
    else:
        result = task.chunks([(label,), (label,)], 2).delay()
    result.get(timeout=10)
    assert site.stage.runs(label) == 2


def test_eager_calls_share_nothing(site: Site, label: str) -> None:
    eager = site.through(task_always_eager=True)
    result = eager.task("early").delay(label)
    assert (result.get(), result.outcome.status) == (f"{label}#1", "unguarded")
    assert eager.holds(eager.task("early"), label) == {}


def test_grant_is_refused_outside_a_task() -> None:
    from celery_once_fenced import current_grant

    with pytest.raises(GrantError):
        current_grant()


# --- the result is out ------------------------------------------------------------------------------------------------


def next_call_runs(site: Site, label: str, variant: str = "good") -> None:
    """``t.delay(x).get(); t.delay(x)``, and so on."""
    task = site.task("all_arguments", variant)
    for _ in range(ROUNDS):
        result = task.delay(label)
        assert result.outcome.status == "enqueued"
        result.get(timeout=10, interval=0.001)
    assert site.stage.runs(label) == ROUNDS


def test_key_is_free_before_the_result_is_out(site: Site, label: str) -> None:
    next_call_runs(site, label)


def test_freeing_the_key_after_the_result_is_caught(site: Site, label: str) -> None:
    with pytest.raises(AssertionError):
        next_call_runs(site, label, "ends_in_postrun")
