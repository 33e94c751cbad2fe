"""The test kit in the efficiency tier: what a span means in eager mode, and that the kit fails where it must (W9)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, chain, states
from celery.exceptions import TaskRevokedError

from celery_once_fenced import DuplicateError, Once, SingletonTask, current_grant, explain, lease
from celery_once_fenced.events import Event, observing
from celery_once_fenced.testing import (
    EagerError,
    Enforced,
    assert_free,
    assert_held,
    assert_suppressed,
    enforce_once,
)

NOWHERE = "redis://127.0.0.1:1/0"


@pytest.fixture(autouse=True)
def no_django_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether Django was set up by another test is no matter here."""
    monkeypatch.setattr("celery_once_fenced.runtime._database_factory", None)


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    """An app that can reach nothing: no broker, no result backend, no Redis."""
    monkeypatch.setattr("celery._state._on_app_finalizers", set())  # no shared tasks of other tests
    with Celery("kit", broker=NOWHERE, backend=NOWHERE, set_as_current=False) as app:
        app.conf.once_fenced = {"redis_url": NOWHERE, "namespace": "kit"}
        yield app


@pytest.fixture
def once(app: Celery) -> Iterator[Enforced]:
    with enforce_once(app) as once:
        yield once


@pytest.fixture
def ran() -> list[Any]:
    """What bodies have noted."""
    return []


@pytest.fixture
def declare(app: Celery, ran: list[Any]) -> Callable[..., Any]:
    """Declares a task that notes its argument and calls what it is told to; ``once`` are the options of ``Once``."""

    def declare(
        body: Callable[[Any, int], Any] = lambda self, number: None, *, base: Any = SingletonTask, **once: Any
    ) -> Any:
        options = {
            name: once.pop(name) for name in ("acks_late", "autoretry_for", "max_retries") if name in once
        }

        def run(self: Any, number: int = 1) -> Any:
            ran.append(number)
            return body(self, number) or f"ran {number}"

        guarded = {"once": Once(**once)} if base is SingletonTask else {}
        name = f"kit.task{len(app.tasks)}"
        return app.task(bind=True, base=base, name=name, shared=False, lazy=False, **guarded, **options)(run)

    return declare


def nothing() -> None: ...


# --- a call runs at once, and frees its key ---------------------------------------------------------------------------


def test_a_call_runs_at_once(once: Enforced, declare: Any, ran: list[Any]) -> None:
    task = declare()
    result = task.delay(7)
    assert (result.get(), result.state, ran) == ("ran 7", "SUCCESS", [7])
    assert (result.outcome.status, result.outcome.reason) == ("enqueued", "free")
    assert "number=7" in result.outcome.key
    assert_free(task.s(7))


def test_the_second_call_in_a_row_runs_too(once: Enforced, declare: Any, ran: list[Any]) -> None:
    task = declare()
    assert [task.delay(1).outcome.status for _ in range(3)] == ["enqueued"] * 3
    assert ran == [1, 1, 1]


def test_an_error_frees_the_key(once: Enforced, declare: Any) -> None:
    def fail(self: Any, number: int) -> None:
        raise ValueError(number)

    task = declare(fail)
    result = task.delay(1)
    with pytest.raises(ValueError, match="1"):
        result.get()
    assert_free(task.s(1))


def test_errors_propagate_where_celery_is_told_to(app: Celery, once: Enforced, declare: Any) -> None:
    def fail(self: Any, number: int) -> None:
        raise ValueError(number)

    app.conf.task_eager_propagates = True
    task = declare(fail, unique="until_expired", window=60)
    with pytest.raises(ValueError, match="1"):
        task.delay(1)
    assert_held(task.s(1), slot="q")  # the window of a call that ran and failed


def test_a_call_inside_the_body_is_a_duplicate_of_it(once: Enforced, declare: Any, ran: list[Any]) -> None:
    inner = []

    def call_again(self: Any, number: int) -> None:
        assert_held(self.s(number), slot="r")
        inner.append(self.delay(number))

    result = declare(call_again).delay(1)
    assert_suppressed(inner[0], by=result)
    assert (inner[0].outcome.reason, ran) == ("running", [1])
    assert (inner[0].id, inner[0].get()) == (result.id, "ran 1")


def test_a_duplicate_cannot_be_waited_for_inside_the_body(once: Enforced, declare: Any) -> None:
    def wait(self: Any, number: int) -> Any:
        duplicate = self.delay(number)
        assert (duplicate.ready(), duplicate.state) == (False, states.PENDING)
        return duplicate.get()

    with pytest.raises(EagerError, match="has not ended"):
        declare(wait).delay(1).get()


def test_another_key_is_another_call(once: Enforced, declare: Any, ran: list[Any]) -> None:
    def call_next(self: Any, number: int) -> None:
        if number < 3:
            self.delay(number + 1)

    declare(call_next).delay(1)
    assert ran == [1, 2, 3]


# --- spans ------------------------------------------------------------------------------------------------------------

SPANS = {
    # unique: what becomes of a call while the key is queued, and while it runs
    "until_executed": ("duplicate", "duplicate"),
    "until_executing": ("duplicate", "runs"),
    "while_executing": ("runs", "waits"),
    "until_and_while_executing": ("duplicate", "waits"),
}


def became(once: Enforced, result: Any) -> str:
    if result.outcome.status == "duplicate":
        return "duplicate"
    return "waits" if once.waiting else "runs"


@pytest.mark.parametrize("unique", [name for name, (queued, _) in SPANS.items() if queued == "duplicate"])
def test_while_the_key_is_queued(once: Enforced, declare: Any, ran: list[Any], unique: str) -> None:
    task = declare(unique=unique)
    with once.hold(task.s(1), queued=True) as holder:
        assert_held(task.s(1), slot="q")
        assert_suppressed(task.delay(1), by=holder)
    assert ran == []
    task.delay(1)
    assert ran == [1]


@pytest.mark.parametrize("unique", SPANS)
def test_while_the_key_is_running_elsewhere(
    once: Enforced, declare: Any, ran: list[Any], unique: str
) -> None:
    task = declare(unique=unique)
    if unique == "until_executing":  # no hold while running: the queued one stands for the key
        return
    with once.hold(task.s(1)):
        result = task.delay(1)
        assert became(once, result) == SPANS[unique][1]
        assert ran == []
    assert ran == ([] if SPANS[unique][1] == "duplicate" else [1])


def test_until_executing_may_run_beside_itself(once: Enforced, declare: Any, ran: list[Any]) -> None:
    def call_again(self: Any, number: int) -> None:
        if len(ran) < 2:
            self.delay(number)

    declare(call_again, unique="until_executing").delay(1)
    assert ran == [1, 1]


def test_while_executing_runs_one_after_the_other(once: Enforced, declare: Any, ran: list[Any]) -> None:
    inner = []

    def call_again(self: Any, number: int) -> None:
        if not inner:
            inner.append(self.delay(number))
            assert ran == [1]

    task = declare(call_again, unique="while_executing")
    assert task.delay(1).get() == "ran 1"
    assert (ran, inner[0].get(), once.waiting) == ([1, 1], "ran 1", [])


def test_a_window_ends_by_the_clock(once: Enforced, declare: Any, ran: list[Any]) -> None:
    task = declare(unique="until_expired", window="15m")
    first = task.delay(1)
    once.clock.advance("14m")
    assert_suppressed(task.delay(1), by=first)
    assert task.delay(1).get() == "ran 1"
    once.clock.advance("1m")
    task.delay(1)
    assert ran == [1, 1]


def test_while_executing_has_no_queued_hold(once: Enforced, declare: Any) -> None:
    with (
        pytest.raises(EagerError, match="while queued"),
        once.hold(declare(unique="while_executing").s(1), queued=True),
    ):
        pass


def test_two_holds_of_one_key_are_a_mistake(once: Enforced, declare: Any) -> None:
    task = declare()
    with once.hold(task.s(1)), pytest.raises(EagerError, match="already"), once.hold(task.s(1)):
        pass


# --- the clock --------------------------------------------------------------------------------------------------------


def test_a_hold_lapses_with_its_lease(once: Enforced, declare: Any, ran: list[Any]) -> None:
    task = declare(lease=60)
    with once.hold(task.s(1)):
        once.clock.advance(59)
        assert_suppressed(task.delay(1))
        once.clock.advance(1)
        assert_free(task.s(1))
        task.delay(1)
    assert ran == [1]


def test_a_body_that_is_frozen_loses_its_lease(once: Enforced, declare: Any) -> None:
    def freeze(self: Any, number: int) -> Any:
        before = current_grant().lost
        once.clock.advance(60)
        return before, self.grant.lost

    events: list[Event] = []
    with observing(events.append):
        assert declare(freeze, lease=60).delay(1).get() == (False, True)
    assert [event.name for event in events].count("lease.lost") == 1


def test_a_late_body_frees_nothing_of_its_successor(once: Enforced, declare: Any) -> None:
    def freeze(self: Any, number: int) -> None:
        once.clock.advance(60)
        successor.enter_context(once.hold(self.s(number)))

    import contextlib

    task = declare(freeze, lease=60)
    with contextlib.ExitStack() as successor:
        task.delay(1)
        assert_held(task.s(1), slot="r")


# --- queueing ---------------------------------------------------------------------------------------------------------


def test_two_clicks_before_a_worker_comes(once: Enforced, declare: Any, ran: list[Any]) -> None:
    task = declare()
    with once.queueing():
        first, second = task.delay(1), task.delay(1)
        assert_suppressed(second, by=first)
        assert_held(task.s(1), slot="q")
        assert (ran, first.ready(), len(once.waiting)) == ([], False, 1)
        with pytest.raises(EagerError, match="has not ended"):
            second.get()
    assert (ran, first.get(), second.get()) == ([1], "ran 1", "ran 1")


def test_work_inside_a_queueing_block(once: Enforced, declare: Any, ran: list[Any]) -> None:
    task = declare()
    with once.queueing():
        task.delay(1)
        assert once.work() == 1
        task.delay(1)
        assert ran == [1]
    assert ran == [1, 1]


def test_a_queued_hold_lapses(once: Enforced, declare: Any, ran: list[Any]) -> None:
    task = declare(queue_hold="1h")
    with once.queueing():
        task.delay(1)
        once.clock.advance("1h")
        assert task.delay(1).outcome.status == "enqueued"
    assert ran == [1, 1]  # both messages are in the broker


def test_an_error_while_the_queue_is_worked_off_stands_in_its_result(
    app: Celery, once: Enforced, declare: Any
) -> None:
    def fail(self: Any, number: int) -> None:
        raise ValueError(number)

    app.conf.task_eager_propagates = True
    with once.queueing():
        result = declare(fail).delay(1)
    assert result.state == "FAILURE"
    with pytest.raises(ValueError, match="1"):
        result.get()


def test_deferred_calls_wait_until_there_is_nothing_in_their_way(
    once: Enforced, declare: Any, ran: list[Any]
) -> None:
    task = declare(unique="while_executing")
    with once.hold(task.s(1)):
        task.delay(1)
        assert (once.work(), ran) == (0, [])
        once.clock.advance(60)
        assert (once.work(), ran) == (1, [1])


# --- strategies -------------------------------------------------------------------------------------------------------


def test_on_duplicate_raise(once: Enforced, declare: Any) -> None:
    task = declare(on_duplicate="raise")
    with once.hold(task.s(1)), pytest.raises(DuplicateError):
        task.delay(1)


def test_on_conflict_skip_ends_revoked(once: Enforced, declare: Any, ran: list[Any]) -> None:
    task = declare(unique="while_executing", on_conflict="skip")
    with once.hold(task.s(1)) as holder:
        result = task.delay(1)
    assert (result.state, ran) == ("REVOKED", [])
    with pytest.raises(TaskRevokedError, match=holder):
        result.get()


def test_on_conflict_raise(once: Enforced, declare: Any) -> None:
    task = declare(unique="while_executing", on_conflict="raise")
    with once.hold(task.s(1)):
        result = task.delay(1)
    with pytest.raises(DuplicateError):
        result.get()


def test_a_bypass_runs_beside_the_holder(once: Enforced, declare: Any, ran: list[Any]) -> None:
    task = declare()
    with once.hold(task.s(1)):
        assert task.apply_async((1,), once=False).outcome.status == "unguarded"
    assert ran == [1]


def test_once_key_holds_another_key(once: Enforced, declare: Any, ran: list[Any]) -> None:
    task = declare()
    with once.hold(task.s(1).set(once_key="other")):
        assert_suppressed(task.apply_async((2,), once_key="other"))
        task.delay(1)
    assert ran == [1]


@pytest.fixture
def last(once: Enforced, app: Celery, ran: list[Any]) -> Callable[..., Any]:
    """Declares a task of one key for all arguments."""

    def declare(body: Callable[[Any, int], Any] = lambda self, number: None, **options: Any) -> Any:
        def run(self: Any, number: int) -> Any:
            ran.append(number)
            return body(self, number) or f"ran {number}"

        name = f"kit.last{len(app.tasks)}"
        task = app.task(
            bind=True, base=SingletonTask, name=name, shared=False, lazy=False, once=Once(key=(), **options)
        )
        return task(run)

    return declare


def test_replace_runs_the_newest(once: Enforced, last: Any, ran: list[Any]) -> None:
    task = last(on_duplicate="replace")
    with once.queueing():
        results = [task.delay(number) for number in (1, 2, 3)]
    assert [result.outcome.status for result in results] == ["enqueued", "replaced", "replaced"]
    assert (ran, results[2].get()) == ([3], "ran 3")
    assert [result.state for result in results] == ["REVOKED", "REVOKED", "SUCCESS"]


def test_replace_runs_again_when_nothing_is_queued(once: Enforced, last: Any, ran: list[Any]) -> None:
    task = last(on_duplicate="replace")
    assert [task.delay(number).get() for number in (1, 2)] == ["ran 1", "ran 2"]


def test_keep_last_runs_the_newest_arguments(once: Enforced, last: Any, ran: list[Any]) -> None:
    task = last(on_duplicate="keep_last")
    with once.queueing():
        results = [task.delay(number) for number in (1, 2, 3)]
    assert [result.outcome.status for result in results] == ["enqueued", "kept_last", "kept_last"]
    assert (ran, [result.get() for result in results]) == ([3], ["ran 3"] * 3)
    assert [task.delay(4).get(), ran] == ["ran 4", [3, 4]]  # what was kept has been forgotten


def test_keep_last_while_it_runs(once: Enforced, last: Any, ran: list[Any]) -> None:
    def call_again(self: Any, number: int) -> None:
        if number == 1:
            for later in (2, 3, 4):
                self.delay(later)

    last(call_again, on_duplicate="keep_last").delay(1)
    assert ran == [1, 4]


def test_a_kept_call_is_retried_with_its_own_arguments(once: Enforced, last: Any, ran: list[Any]) -> None:
    def retry(self: Any, number: int) -> None:
        if self.request.retries < 1:
            raise self.retry(countdown=1)

    task = last(retry, on_duplicate="keep_last")
    with once.queueing():
        task.delay(1)
        task.delay(2)
    assert ran == [2, 2]
    assert_free(task.s(1))


@pytest.mark.parametrize(("on_overflow", "state"), [("raise", "FAILURE"), ("drop", "REVOKED")])
def test_too_many_wait(once: Enforced, last: Any, ran: list[Any], on_overflow: str, state: str) -> None:
    task = last(unique="while_executing", max_deferred=2, on_overflow=on_overflow)
    with once.hold(task.s(0)):
        results = [task.delay(number) for number in (1, 2, 3)]
        assert [result.state for result in results] == ["PENDING", "PENDING", state]
    assert ran == [1, 2]


def test_apply_many(once: Enforced, declare: Any, ran: list[Any]) -> None:
    task = declare()
    with once.hold(task.s(2)):
        results = task.apply_many([((1,), {}), ((2,), {}), ((), {"number": 3}), ((1, 2, 3), {})])
    assert [result.outcome and result.outcome.status for result in results] == [
        "enqueued",
        "duplicate",
        "enqueued",
        None,
    ]
    assert (ran, results[0].get()) == ([1, 3], "ran 1")
    assert_suppressed(results[1])
    with pytest.raises(TypeError):
        results[3].get()


def test_apply_many_claims_before_it_publishes(once: Enforced, declare: Any, ran: list[Any]) -> None:
    task = declare()
    first, second = task.apply_many([((1,), {}), ((1,), {})])
    assert_suppressed(second, by=first)
    assert (ran, second.get()) == ([1], "ran 1")


# --- retries, callbacks, canvas ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("acks_late", [False, True])
def test_a_retry_is_the_same_call(once: Enforced, declare: Any, ran: list[Any], acks_late: bool) -> None:
    def retry(self: Any, number: int) -> None:
        if self.request.retries < 2:
            raise self.retry(countdown=5)

    task = declare(retry, acks_late=acks_late)
    assert (task.delay(1).get(), ran) == ("ran 1", [1, 1, 1])
    assert_free(task.s(1))


def test_callbacks_are_calls(once: Enforced, declare: Any, ran: list[Any]) -> None:
    last = declare()
    declare().apply_async((1,), link=last.si(2))
    assert ran == [1, 2]


def test_an_awaited_duplicate_is_answered_from_its_holder(
    once: Enforced, declare: Any, ran: list[Any]
) -> None:
    inner = []

    def call_again(self: Any, number: int) -> None:
        inner.append(self.apply_async((number,), link=last.s()))

    last = declare()
    declare(call_again).delay(1)
    assert inner[0].outcome.status == "awaiting"
    assert (inner[0].get(), ran) == ("ran 1", [1, "ran 1"])


def test_apply_and_canvas_are_guarded_by_the_worker_alone(
    once: Enforced, declare: Any, ran: list[Any]
) -> None:
    task = declare()
    assert chain(task.si(1), task.si(2)).apply().get() == "ran 2"
    with once.hold(task.s(1)):  # a worker would answer it from the holder, and the tail would run
        with pytest.raises(EagerError, match="left out"):
            task.apply((1,)).get()
        with pytest.raises(EagerError, match="left out"):
            chain(task.si(1), task.si(2)).apply_async().get()
    assert ran == [1, 2]


def test_apply_cannot_be_deferred(once: Enforced, declare: Any) -> None:
    task = declare(unique="while_executing")
    with once.hold(task.s(1)), pytest.raises(EagerError, match="apply"):
        task.apply((1,)).get()


def test_replace_runs_inside_the_call(once: Enforced, declare: Any, ran: list[Any]) -> None:
    other = declare()

    def replace(self: Any, number: int) -> Any:
        return self.replace(other.si(9))

    # Celery itself refuses it in eager mode but for apply(): "Never call result.get() within a task!"
    assert declare(replace).apply((1,)).get() == "ran 9"
    assert ran == [1, 9]


def test_a_direct_call_is_none_of_ours(once: Enforced, declare: Any, ran: list[Any]) -> None:
    task = declare()
    with once.hold(task.s(1)):
        assert task(1) == "ran 1"


def test_a_task_that_calls_itself(once: Enforced, declare: Any, ran: list[Any]) -> None:
    def itself(self: Any, number: int) -> Any:
        return self(number - 1) if number else "end"

    assert declare(itself).delay(2).get() == "end"
    assert ran == [2, 1, 0]


def test_a_message_that_never_reached_its_body_holds_nothing(app: Celery, once: Enforced) -> None:
    class NeverEntered(SingletonTask):
        abstract = True

        def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
            raise RuntimeError("not today")

    task = app.task(base=NeverEntered, name="kit.never", shared=False, lazy=False)(nothing)
    assert task.delay().state == "FAILURE"
    assert_free(task.s())


# --- what stands around it --------------------------------------------------------------------------------------------


def test_outside_the_block_all_is_as_before(app: Celery, declare: Any, ran: list[Any]) -> None:
    task = declare(unique="until_expired", window=60)
    runtime = task.blueprint.runtime
    app.conf.task_always_eager = True
    leases = runtime.leases
    with enforce_once(app):
        task.delay(1)
        assert runtime.leases is not leases
    assert (runtime.leases is leases, app.conf.task_always_eager) == (True, True)
    assert [task.delay(1).outcome.status for _ in range(2)] == ["unguarded"] * 2
    with enforce_once(app):  # nothing is left of the first one
        task.delay(1)
    assert ran == [1] * 4


def test_eager_mode_is_turned_on_and_off(app: Celery) -> None:
    with enforce_once(app):
        assert app.conf.task_always_eager is True
    assert app.conf.task_always_eager is False


def test_tasks_of_other_apps_are_left_alone(once: Enforced, ran: list[Any]) -> None:
    other = Celery("other", broker=NOWHERE, set_as_current=False)
    other.conf.update(once_fenced={"redis_url": NOWHERE}, task_always_eager=True)
    task = other.task(base=SingletonTask, name="other.task", shared=False, lazy=False)(nothing)
    assert task.delay().outcome.reason == "eager"


def test_leases_outside_tasks_and_explain_see_the_same_store(
    app: Celery, declare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.set_current()
    task = declare()
    with enforce_once() as once, lease("report"), once.hold(task.s(1)) as holder:
        digest = assert_held(task.s(1)).digest
        assert holder in str(explain(digest))


# --- negative controls: the kit fails a test that should fail ---------------------------------------------------------


def test_an_unguarded_task_fails_the_assertion(app: Celery, once: Enforced, declare: Any) -> None:
    bare = declare(base=app.Task)
    with once.queueing():
        bare.delay(1)
        second = bare.delay(1)
    with pytest.raises(AssertionError, match="not guarded"):
        assert_suppressed(second)
    with pytest.raises(AssertionError, match="not guarded"):
        assert_held(bare.s(1))
    with pytest.raises(AssertionError, match="not guarded"), once.hold(bare.s(1)):
        pass


def test_a_key_that_leaves_out_nothing_fails_the_assertion(once: Enforced, declare: Any) -> None:
    with once.queueing():
        task = declare()
        task.delay(1)
        second = task.delay(2)
    with pytest.raises(AssertionError, match="was not suppressed"):
        assert_suppressed(second)


def test_a_call_that_was_not_enforced_fails_the_assertion(app: Celery, declare: Any) -> None:
    app.conf.task_always_eager = True
    with pytest.raises(AssertionError, match="enforce_once"):
        assert_suppressed(declare().delay(1))


def test_the_wrong_holder_fails_the_assertion(once: Enforced, declare: Any) -> None:
    task = declare()
    with once.queueing():
        other, _, second = task.delay(2), task.delay(1), task.delay(1)
        with pytest.raises(AssertionError, match="not by"):
            assert_suppressed(second, by=other)


def test_the_wrong_slot_fails_the_assertion(once: Enforced, declare: Any) -> None:
    task = declare()
    with pytest.raises(AssertionError, match="is not held: nobody"):
        assert_held(task.s(1))
    with once.hold(task.s(1)):
        with pytest.raises(AssertionError, match=r"is not queued: running by task .* for 60 s more"):
            assert_held(task.s(1), slot="q")
        with pytest.raises(AssertionError, match="is not free: running by"):
            assert_free(task.s(1))


def test_a_call_without_a_key_fails_the_assertion(once: Enforced, declare: Any) -> None:
    task = declare(key=lambda arguments: None)
    with pytest.raises(AssertionError, match="has no key"):
        assert_held(task.s(1))
    with pytest.raises(AssertionError, match="give a signature"):
        assert_held(task)


# --- refused again and again ------------------------------------------------------------------------------------------


def warned(call: Callable[[], Any], times: int) -> int:
    seen: list[Event] = []
    with observing(seen.append):
        for _ in range(times):
            assert call().outcome.status == "duplicate"
    return sum(event.name == "duplicate.repeated" for event in seen)


@pytest.mark.parametrize(("delay", "patience"), [(0, 60), (600, 660)])
def test_refusals_are_a_warning_when_they_last_longer_than_lease_and_delay(
    once: Enforced, declare: Any, delay: int, patience: int
) -> None:
    task = declare(lease=60)

    def call() -> Any:
        return task.apply_async((1,), countdown=delay or None)

    with once.hold(task.s(1), queued=True):
        assert warned(call, 30) == 0
        once.clock.advance(patience - 1)
        assert warned(call, 30) == 0
        once.clock.advance(2)
        assert warned(call, 30) == 1
