"""The newest call of a key counts: replace and keep_last; and messages that wait for their turn."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError
from kombu.exceptions import OperationalError

from celery_once_fenced import DeferralOverflowError
from tests.acceptance.workers import PARKED, Site, Trial, eventually

STORM = 1000
CHILDREN = 5


def caught(site: Site) -> dict[str, Any]:
    """The next parked message."""
    message: dict[str, Any] = json.loads(str(site.redis.lpop(f"{site.name}.{PARKED}")))
    return message


def is_revoked(result: Any, because: str) -> None:
    with pytest.raises(TaskRevokedError, match=because):
        result.get(timeout=10)


# --- replace ----------------------------------------------------------------------------------------------------------


def test_newer_call_takes_the_place_of_a_queued_one(site: Site) -> None:
    old, message = site.parked("replaces", "say old")
    assert old.result.outcome.status == "enqueued"
    new = old.again("say new", queue=PARKED)
    assert (new.outcome.status, new.outcome.task_id) == ("replaced", new.id)
    site.deliver(message)
    is_revoked(old.result, new.id)
    site.deliver(caught(site))
    assert new.get(timeout=10) == "new"
    assert old.runs == 1


def test_older_message_that_comes_after_the_newer_one_ran_is_superseded(site: Site) -> None:
    old, message = site.parked("replaces", "say old")
    new = old.again("say new")
    assert new.get(timeout=10) == "new"
    site.deliver(message)
    is_revoked(old.result, new.id)
    assert old.runs == 1


def test_running_call_is_not_replaced_and_the_newer_one_runs_after_it(site: Site) -> None:
    old = site.begin("replaces", "hold,say old").has_run(1)
    with site.counted(old.task, "busy"):
        new = old.again("say new")
    assert new.outcome.status == "enqueued"
    old.release()
    assert (old.value(), new.get(timeout=10)) == ("old", "new")
    assert site.stage.most_at_once(old.label) == 1


def test_retry_that_waits_is_replaced(site: Site) -> None:
    old = site.begin("replaces", "retry 1", "say old").has_run(1)
    eventually(lambda: old.state == "RETRY")
    new = old.again("say new", "say new")
    assert new.outcome.status == "replaced"
    assert new.get(timeout=10) == "new"
    eventually(lambda: old.state == "REVOKED")
    assert old.runs == 2


def test_awaited_call_is_answered_from_the_newer_one(site: Site) -> None:
    old, message = site.parked("replaces", "say old", task_id=uuid.uuid4().hex)
    new = old.again("say new")
    assert new.get(timeout=10) == "new"
    site.deliver(message)
    assert old.value() == "new"
    assert old.runs == 1


def test_awaited_call_runs_where_the_newer_one_failed(site: Site) -> None:
    old, message = site.parked("replaces", "fail", "say old", task_id=uuid.uuid4().hex)
    new = old.again("fail")
    assert isinstance(new.get(timeout=10, propagate=False), ValueError)
    site.deliver(message)
    assert old.value() == "old"


def test_replacement_that_cannot_be_published_gives_the_key_back(site: Site) -> None:
    old, message = site.parked("replaces", "say old")
    broken = site.through(
        broker_url="redis://127.0.0.1:1/0",
        broker_transport_options={"max_retries": 1, "interval_start": 0, "interval_step": 0},
    )
    with pytest.raises(OperationalError):
        broken.task("replaces").apply_async((old.label, "say new"), retry=False)
    broken.disconnect()
    assert old.queued
    site.deliver(message)
    assert old.value() == "old"


# --- keep_last --------------------------------------------------------------------------------------------------------


def test_queued_call_runs_with_the_newest_arguments(site: Site) -> None:
    first, message = site.parked("keeps_last", "say a")
    for word in "bc":
        kept = first.again(f"say {word}")
        assert (kept.outcome.status, kept.outcome.task_id, kept.id) == (
            "kept_last",
            first.result.id,
            first.result.id,
        )
    site.deliver(message)
    assert first.value() == "c"
    assert first.runs == 1
    after = first.again("say d")
    assert (after.outcome.status, after.get(timeout=10)) == ("enqueued", "d")


def the_last_update_is_not_lost(site: Site, name: str) -> None:
    """Work that is asked for while the same work runs, three times: it runs once more, with the last arguments."""
    first = site.begin(name, "hold,say a").has_run(1)
    results = [first.again(f"say {word}") for word in "bcd"]
    first.release()
    assert first.value() == "a"
    assert {result.get(timeout=10) for result in results} == {"d"}
    assert first.runs == 2
    assert site.stage.most_at_once(first.label) == 1


def test_the_last_update_is_not_lost(site: Site) -> None:
    the_last_update_is_not_lost(site, "keeps_last")


def test_a_dropped_update_is_caught(site: Site) -> None:
    with pytest.raises(AssertionError):
        the_last_update_is_not_lost(site, "early")


def test_retry_carries_the_kept_arguments(site: Site) -> None:
    first, message = site.parked("keeps_last", "say a")
    first.again("retry 0.2", "say b")
    site.deliver(message)
    assert first.value() == "b"
    assert first.runs == 2


def test_kept_call_runs_again_where_its_worker_died_before_the_result_was_out(site: Site) -> None:
    """Cleared any sooner, the redelivery would run the older call after the newer one."""
    first, message = site.parked("keeps_last_late", "say a")
    first.again("fatal", "say b")
    site.deliver(message)
    first.has_run(1)
    eventually(lambda: not first.running)
    site.deliver(message, redelivered=True)
    assert first.value() == "b"


def test_awaited_call_is_not_kept(site: Site) -> None:
    first, message = site.parked("keeps_last", "say a")
    awaited = first.again("say b", task_id=uuid.uuid4().hex)
    assert awaited.outcome.status == "awaiting"
    assert awaited.get(timeout=10) == "b"
    site.deliver(message)
    is_revoked(first.result, awaited.id)


# --- the line of a key (D3) -------------------------------------------------------------------------------------------


def in_line(site: Site, name: str, calls: int) -> tuple[Trial, list[Any]]:
    """One that runs, and so many that meet it."""
    first = site.begin(name, "hold").has_run(1)
    return first, [first.again("sleep 0") for _ in range(calls)]


def states(results: list[Any]) -> list[str]:
    return sorted(result.state for result in results if result.state in ("FAILURE", "REVOKED"))


def test_one_waiter_too_many_fails(site: Site) -> None:
    first, results = in_line(site, "short_line", 4)
    eventually(lambda: states(results) == ["FAILURE"] * 2)
    (error, _) = [result.result for result in results if result.state == "FAILURE"]
    assert isinstance(error, DeferralOverflowError)
    assert error.waiters == 2
    first.release()
    eventually(lambda: first.runs == 3)


def test_one_waiter_too_many_is_dropped(site: Site) -> None:
    first, results = in_line(site, "dropped_line", 4)
    eventually(lambda: states(results) == ["REVOKED"] * 2)
    first.release()
    eventually(lambda: first.runs == 3)


def test_storm_on_one_key_neither_grows_nor_starves_others(site: Site) -> None:
    first = site.begin("long_line", "hold,hold,hold").has_run(1)  # its patience is long enough
    results = first.task.apply_many([((first.label,), {}) for _ in range(STORM)])
    other = site.begin("early")
    assert other.value(80) == f"{other.label}#1"
    eventually(lambda: site.stats(first.task).get("overflowed", 0) == STORM - 100, 80)
    # The body's own, and for a moment each child's: a deferred message is published before it is acknowledged (D1).
    waiting = site.redis.llen(f"{site.name}.jobs") + site.redis.hlen(f"{site.name}.unacked")
    assert waiting <= 100 + 1 + CHILDREN
    assert sum(result.state == "REVOKED" for result in results) == STORM - 100
    site.app.control.revoke([result.id for result in results])
    first.release()


# --- many at once (E18) -----------------------------------------------------------------------------------------------


def test_many_calls_have_their_results_in_order(site: Site) -> None:
    labels = [uuid.uuid4().hex[:8] for _ in range(3)]
    items: list[Any] = [((label, "say x"), {}) for label in labels for _ in range(2)]
    task = site.task("early")
    results = task.apply_many(iter(items), queue=PARKED)
    assert [result.outcome.status for result in results] == ["enqueued", "duplicate"] * 3
    assert [result.error for result in results] == [None] * 6
    assert results[0].id == results[1].id != results[2].id
    for _ in labels:
        site.deliver(caught(site))
    assert [result.get(timeout=10) for result in results] == ["x"] * 6


def test_an_item_that_cannot_be_called_fails_alone(site: Site) -> None:
    task, label = site.task("all_arguments"), uuid.uuid4().hex
    bad, good = task.apply_many([((object(),), None), ((label, "say x"), None)])
    assert (bad.outcome, type(bad.error).__name__, bad.state) == (None, "KeyDerivationError", "FAILURE")
    with pytest.raises(TypeError):
        bad.get()
    assert (good.error, good.get(timeout=10)) == (None, "x")


def test_many_calls_that_cannot_be_published_hold_nothing(site: Site) -> None:
    broken = site.through(
        broker_url="redis://127.0.0.1:1/0",
        broker_transport_options={"max_retries": 1, "interval_start": 0, "interval_step": 0},
    )
    task, label = broken.task("early"), uuid.uuid4().hex
    results = task.apply_many([((label,), {}), ((label,), {})], retry=False)
    assert isinstance(results[0].error, OperationalError)
    assert site.holds(site.task("early"), label) == {}
    broken.disconnect()


def test_an_item_of_another_form_fails_alone(site: Site) -> None:
    label = uuid.uuid4().hex
    results = site.task("early").apply_many([(1,), 5, ((label, "say x"), {})])
    assert [str(result.error)[:50] for result in results[:2]] == [
        "apply_many() takes (args, kwargs) for each call, n"
    ] * 2
    assert results[2].get(timeout=10) == "x"


def test_calls_that_cannot_be_read_send_nothing(site: Site) -> None:
    def broken(label: str) -> Any:
        yield ((label,), {})
        raise RuntimeError("half way")

    task, label = site.task("early"), uuid.uuid4().hex
    with pytest.raises(RuntimeError, match="half way"):
        task.apply_many(broken(label))
    assert site.holds(task, label) == {}


def test_options_of_a_single_call_are_refused(site: Site) -> None:
    with pytest.raises(TypeError, match="task_id"):
        site.task("early").apply_many([], task_id="one")
