"""A delivery that steps aside is published again before it is acknowledged (D1); cut off in that, it holds nothing, or is
given back to the broker.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery, states
from celery.app.trace import build_tracer
from celery.exceptions import Reject, SoftTimeLimitExceeded
from kombu.exceptions import OperationalError

from celery_once_fenced import DeferralFailedError, Once, SingletonTask
from celery_once_fenced.guard import Guard
from celery_once_fenced.policy import SPANS
from celery_once_fenced.runtime import runtime_of
from celery_once_fenced.stores import Start
from celery_once_fenced.stores.redis_conversation import Conversation
from example_project.servers import Servers

OTHER = "of another"
ASKED_TO_START, ASKED_TO_DEFER = 1, 2
"""Which question it is."""


@pytest.fixture
def app(servers: Servers, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    monkeypatch.setattr("celery_once_fenced.runtime._database_factory", None)
    with Celery("aside", broker="memory://", backend="cache+memory://", set_as_current=False) as app:
        app.conf.once_fenced = {
            "redis_url": servers.redis_url,
            "namespace": namespace,
            "socket_timeout": 20.0,
        }
        app.conf.task_default_queue = f"q{uuid.uuid4().hex}"
        yield app
        runtime_of(app).close()


def declared(app: Celery, **options: Any) -> Any:
    @app.task(
        base=SingletonTask, once=Once(on_conflict="defer"), name="shop.refresh", shared=False, **options
    )
    def refresh(order_id: int) -> int:
        return order_id

    return refresh


def message_of_a_held_key(app: Celery, task: Any) -> Any:
    """The message of a call whose key another task runs under."""
    task.delay(1)
    (message,) = taken(app)
    key = task.blueprint.recipe.derive((1,), {})
    started = runtime_of(app).leases.start(
        Start(key, task.name, SPANS["until_executed"], key.digest, OTHER, OTHER, OTHER, "w", 60.0, False)
    )
    assert started.answer == "granted"
    return message


def taken(app: Celery) -> list[Any]:
    with app.connection_for_read() as connection:
        queue = connection.SimpleQueue(app.conf.task_default_queue)
        return [queue.get(block=False) for _ in range(queue.qsize())]


def delivered(app: Celery, task: Any, message: Any) -> tuple[str, Any]:
    """What Celery makes of its delivery: state and value."""
    args, kwargs, _ = message.payload
    request = {**message.headers, "args": args, "kwargs": kwargs, "hostname": "w", "delivery_info": {}}
    info = build_tracer(task.name, task, app=app)(message.headers["id"], args, kwargs, request).info
    return (info.state, info.retval) if info else (states.SUCCESS, None)


def holders(app: Celery) -> set[str]:
    return {hold.task_id for hold in runtime_of(app).leases.holds()}


@contextmanager
def cut_off(error: BaseException, question: int = ASKED_TO_DEFER) -> Iterator[None]:
    """By a time limit, while the answer is waited for; Redis has done what it was asked to by then."""
    asked, end = [0], Conversation.end

    def cutting(self: Conversation) -> list[Any]:
        answers = end(self)
        asked[0] += 1
        if asked[0] == question:
            raise error
        return answers

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Conversation, "end", cutting)
        yield


@contextmanager
def no_broker(task: Any) -> Iterator[None]:
    def fail(*_: Any) -> None:
        raise OperationalError("no broker")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(task, "publish", fail, raising=False)
        yield


def test_it_is_published_again_and_keeps_its_hold(app: Celery) -> None:
    task = declared(app)
    message = message_of_a_held_key(app, task)
    assert delivered(app, task, message)[0] == states.IGNORED
    assert [again.headers["id"] for again in taken(app)] == [message.headers["id"]]
    assert holders(app) == {OTHER, message.headers["id"]}


@pytest.mark.parametrize("failure", ["time limit", "no broker"])
def test_cut_off_it_fails_and_holds_nothing(app: Celery, failure: str) -> None:
    task = declared(app)
    message = message_of_a_held_key(app, task)
    with cut_off(SoftTimeLimitExceeded()) if failure == "time limit" else no_broker(task):
        state, error = delivered(app, task, message)
    assert (state, type(error)) == (states.FAILURE, DeferralFailedError)
    assert (taken(app), holders(app)) == ([], {OTHER})


@pytest.mark.parametrize("failure", ["time limit", "no broker"])
def test_not_acknowledged_yet_it_is_given_back(app: Celery, failure: str) -> None:
    """With its hold: it comes again."""
    task = declared(app, acks_late=True)
    message = message_of_a_held_key(app, task)
    with cut_off(SoftTimeLimitExceeded()) if failure == "time limit" else no_broker(task):
        state, error = delivered(app, task, message)
    assert state == states.REJECTED
    assert isinstance(error, Reject)
    assert error.requeue
    assert (taken(app), holders(app)) == ([], {OTHER, message.headers["id"]})


def test_of_a_process_that_is_told_to_exit_nothing_is_held(app: Celery) -> None:
    task = declared(app)
    message = message_of_a_held_key(app, task)
    with cut_off(SystemExit()), pytest.raises(SystemExit):
        delivered(app, task, message)
    assert (taken(app), holders(app)) == ([], {OTHER})


# --- before the body --------------------------------------------------------------------------------------------------


def message_of(app: Celery, task: Any) -> Any:
    task.delay(1)
    (message,) = taken(app)
    return message


@pytest.mark.parametrize("acks_late", [False, True])
def test_cut_off_while_it_is_started_it_fails_and_holds_nothing(app: Celery, acks_late: bool) -> None:
    task = declared(app, acks_late=acks_late)
    message = message_of(app, task)
    with cut_off(SoftTimeLimitExceeded(), ASKED_TO_START):
        state, error = delivered(app, task, message)
    assert (state, type(error)) == (states.FAILURE, SoftTimeLimitExceeded)
    assert holders(app) == set()


@pytest.mark.parametrize("acks_late", [False, True])
def test_cut_off_before_it_is_started_it_fails_and_holds_nothing(
    app: Celery, acks_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def strike(*_: Any) -> None:
        raise SoftTimeLimitExceeded

    task = declared(app, acks_late=acks_late)
    message = message_of(app, task)
    monkeypatch.setattr(Guard, "run", strike)
    assert delivered(app, task, message)[0] == states.FAILURE
    assert holders(app) == set()


@pytest.mark.parametrize("acks_late", [False, True])
def test_of_a_process_that_is_told_to_exit_only_a_message_that_comes_again_holds(
    app: Celery, acks_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(*_: Any) -> None:
        raise SystemExit

    task = declared(app, acks_late=acks_late)
    message = message_of(app, task)
    monkeypatch.setattr(Guard, "run", leave)
    with pytest.raises(SystemExit):
        delivered(app, task, message)
    assert holders(app) == ({message.headers["id"]} if acks_late else set())
