"""Calls of a key that is held: what the caller is told, what is held, and for how long."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from typing import Any

import pytest
from kombu.exceptions import OperationalError

from celery_once_fenced import ConfigError, DuplicateError, KeyDerivationError, Once, SingletonTask
from tests.acceptance.app import CROSS, QUEUE_HOLD, WINDOW
from tests.acceptance.workers import PARKED, Site, Trial, eventually

CALLERS = 200


# --- what a call is told ----------------------------------------------------------------------------------------------


def test_second_call_gets_the_result_of_the_first(site: Site) -> None:
    trial = site.begin("early", "hold").has_run(1)
    second = trial.again("hold")
    trial.release()
    assert second.get(timeout=10) == trial.value() == f"{trial.label}#1"
    assert trial.runs == 1


def test_outcome_says_who_holds_the_key_and_until_when(site: Site) -> None:
    queued, _ = site.parked("early")
    own, other = queued.result.outcome, queued.again().outcome
    assert (own.status, own.reason, own.task_id) == ("enqueued", "free", queued.result.id)
    assert (own.key, own.since, own.until) == (f"good.early:{queued.label}", None, None)
    assert (other.status, other.reason, other.task_id) == ("duplicate", "queued", queued.result.id)
    assert other.key == own.key
    assert timedelta(0) <= datetime.now(UTC) - other.since < timedelta(seconds=5)
    assert timedelta(seconds=QUEUE_HOLD - 5) < other.until - other.since <= timedelta(seconds=QUEUE_HOLD + 1)


@pytest.mark.parametrize("name", ["early", "keeps_last"])
def test_outcome_says_that_the_holder_is_queued(site: Site, name: str) -> None:
    queued, _ = site.parked(name)
    other = queued.again().outcome
    assert (other.task_id, other.slot, other.worker) == (queued.result.id, "q", "")


def test_outcome_says_where_the_holder_runs(site: Site) -> None:
    trial = site.begin("early", "hold").has_run(1)
    other = trial.again("hold").outcome
    assert (other.reason, other.task_id, other.slot) == ("running", trial.result.id, "r")
    assert other.worker == site.holds(trial.task, trial.label)["r"].worker
    assert other.worker.endswith("@test")
    assert other.since <= datetime.now(UTC) < other.until
    trial.release().value()


def test_raise_tells_who_holds_the_key(site: Site) -> None:
    trial = site.begin("raises", "hold").has_run(1)
    with pytest.raises(DuplicateError) as caught:
        trial.again()
    assert (caught.value.key, caught.value.task_id) == (f"good.raises:{trial.label}", trial.result.id)
    trial.release()


def test_suppressed_calls_are_counted(site: Site) -> None:
    trial, _ = site.parked("early")
    with site.counted(trial.task, "suppressed", times=3):
        for _ in range(3):
            trial.again()


# --- spans ------------------------------------------------------------------------------------------------------------


SPANS = {
    "until_executed": ("duplicate", "duplicate", "duplicate"),
    "until_executing": ("duplicate", "enqueued", "duplicate"),
    "while_executing": ("enqueued", "enqueued", "enqueued"),
    "until_and_while_executing": ("duplicate", "enqueued", "duplicate"),
    "until_expired": ("duplicate", "duplicate", "duplicate"),
}
"""What a second call is told while the first is queued; while it runs; while it runs and another was called."""
RUNNING_REFUSES_NO_NEWER_CALL = ("replaced", "enqueued", "replaced")
REPLACED = {"until_expired": ("replaced", "replaced", "replaced")}
TOLD = {
    "return_existing": lambda unique: SPANS[unique],
    "raise": lambda unique: tuple({"duplicate": "raised"}.get(told, told) for told in SPANS[unique]),
    "replace": lambda unique: REPLACED.get(unique, RUNNING_REFUSES_NO_NEWER_CALL),
    "keep_last": lambda unique: ("kept_last", "enqueued", "kept_last"),
}
"""The same for every strategy."""


def told(trial: Trial) -> str:
    try:
        return str(trial.again("hold", queue=PARKED).outcome.status)
    except DuplicateError:
        return "raised"


@pytest.mark.parametrize(("unique", "on_duplicate"), CROSS, ids="-".join)
def test_second_call_is_told_what_span_and_strategy_say(site: Site, unique: str, on_duplicate: str) -> None:
    trial, message = site.parked(f"{unique} {on_duplicate}", "hold")
    queued = told(trial)
    if queued in ("replaced", "enqueued"):  # then it is not the first one that is to run
        trial, message = site.parked(f"{unique} {on_duplicate}", "hold")
    site.deliver(message)
    trial.has_run(1)
    assert (queued, told(trial), told(trial)) == TOLD[on_duplicate](unique)
    trial.release()


@pytest.mark.parametrize(("name", "at_once"), [("serial", 1), ("one_and_one", 1), ("until_executing", 2)])
def test_span_says_whether_two_may_run_at_once(site: Site, name: str, at_once: int) -> None:
    trial = site.begin(name, "hold").has_run(1)
    with site.counted(trial.task, "busy" if at_once == 1 else "granted"):
        second = trial.again("", "hold")
    if at_once == 2:
        trial.has_run(2)
    trial.release()
    assert second.get(timeout=10) == f"{trial.label}#2"
    assert site.stage.most_at_once(trial.label) == at_once


def test_window_of_until_expired_ends_by_itself(site: Site) -> None:
    trial = site.begin("until_expired")
    assert trial.value() == f"{trial.label}#1"
    outcome = trial.again().outcome
    assert (outcome.task_id, outcome.reason) == (trial.result.id, "window")
    eventually(lambda: trial.again().outcome.status == "enqueued", WINDOW + 2)
    assert time.monotonic() - trial.at > WINDOW - 0.1


# --- one key, however it is written -----------------------------------------------------------------------------------


def test_arguments_in_any_form_make_one_key(site: Site) -> None:
    add = site.task("add")
    first = add.apply_async((1,), queue=PARKED)
    others = [add.delay(1, 2), add.delay(1, b=2), add.delay(b=2, a=1), add.delay(a=1)]
    assert {other.id for other in others} == {first.id}
    assert add.apply_async((1, 3), queue=PARKED).outcome.status == "enqueued"


def test_wrong_names_fail_when_the_task_is_declared(site: Site) -> None:
    with pytest.raises(ConfigError, match="number"):

        @site.app.task(shared=False, base=SingletonTask, once=Once(key="item:{number}"), lazy=False)
        def count(item: int, times: int = 1) -> None: ...


def test_wrong_arguments_fail_when_the_task_is_called(site: Site) -> None:
    with pytest.raises(KeyDerivationError, match=r"good\.add"):
        site.task("add").delay(1, 2, 3)


class Colour(StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    "value",
    [
        uuid.UUID(int=7),
        datetime(2026, 5, 1, 12, 30, tzinfo=UTC),
        date(2026, 5, 1),
        Decimal("1.10"),
        (1, (2, 3)),
        {1: "a", "b": None},
        Colour.RED,
        b"\x00bytes",
        1.0,
        True,
    ],
    ids=lambda value: type(value).__name__,
)
def test_argument_of_any_type_makes_the_same_key_in_caller_and_worker(
    site: Site, value: Any, label: str
) -> None:
    task = site.task("typed")
    called = task.delay(label, value)
    eventually(lambda: site.stage.runs(label) == 1)
    by_name = site.stranger.send_task(task.name, (label, value))
    by_name.get(timeout=10, propagate=False)
    assert (by_name.state, task.delay(label, value).id) == ("REVOKED", called.id)
    site.stage.release(label)
    assert called.get(timeout=10) == f"{label}#1"
    assert site.holds(task, label, value) == {}


# --- how long a key is held -------------------------------------------------------------------------------------------


def publish_that_fails_holds_nothing(site: Site, variant: str = "good") -> None:
    broken = site.through(
        broker_url="redis://127.0.0.1:1/0",
        broker_transport_options={"max_retries": 1, "interval_start": 0, "interval_step": 0},
    )
    task, label = broken.task("early", variant), uuid.uuid4().hex
    with pytest.raises(OperationalError):
        task.apply_async((label,), retry=False)
    broken.disconnect()
    assert site.task("early", variant).delay(label).outcome.status == "enqueued"


def test_publish_that_fails_holds_nothing(site: Site) -> None:
    publish_that_fails_holds_nothing(site)


def test_keeping_the_hold_of_a_failed_publish_is_caught(site: Site) -> None:
    with pytest.raises(AssertionError):
        publish_that_fails_holds_nothing(site, "keeps_hold_of_failed_publish")


def test_expiry_caps_the_hold(site: Site) -> None:
    trial = site.begin("early", queue=PARKED, expires=1)
    assert trial.again().outcome.status == "duplicate"
    eventually(lambda: trial.again().outcome.status == "enqueued", 3)
    trial.has_run(1)


def hold_covers_the_delay(site: Site, variant: str, name: str) -> None:
    trial = site.begin(name, "hold", countdown=1.5, variant=variant)  # three times its hold
    told = set()
    while trial.runs == 0:
        told.add(trial.again("hold").outcome.status)
    trial.release()
    assert told == {"duplicate"}


def test_hold_covers_the_delay(site: Site) -> None:
    hold_covers_the_delay(site, "good", "brief_hold")


def test_a_hold_shorter_than_the_delay_is_caught(site: Site) -> None:
    with pytest.raises(AssertionError):
        hold_covers_the_delay(site, "hold_ignores_delay", "early")


# --- many callers -----------------------------------------------------------------------------------------------------


def test_of_many_callers_one_is_enqueued(site: Site, label: str) -> None:
    task = site.task("early")
    task.apply_async((label,), queue=PARKED, expires=0.001)
    eventually(lambda: site.holds(task, label) == {})
    with ThreadPoolExecutor(CALLERS) as callers:
        calls = list(callers.map(lambda _: task.apply_async((label,), queue=PARKED), range(CALLERS)))
    assert Counter(call.outcome.status for call in calls) == {"enqueued": 1, "duplicate": CALLERS - 1}
    assert len({call.id for call in calls}) == 1


def test_outcome_cannot_be_changed(site: Site) -> None:
    outcome = site.parked("early")[0].result.outcome
    with pytest.raises(dataclasses.FrozenInstanceError):
        outcome.status = "enqueued"
