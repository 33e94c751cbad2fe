"""A grant that nothing stands behind: direct and eager calls, and the efficiency tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery

from celery_once_fenced import FencedTask, Once, SingletonTask, current_grant
from celery_once_fenced.detached import Detached
from celery_once_fenced.errors import GrantError


class Post:
    def __init__(self) -> None:
        self.published: list[tuple[str, str]] = []

    def pack(self, signature: Any, task_id: str, delivery: str) -> str:
        return str(signature)

    def publish(self, task_id: str, message: str) -> None:
        self.published.append((task_id, message))


class Database:
    """Without Django: an ordinary transaction that says when it is over."""

    alias = ""

    def __init__(self) -> None:
        self.said: list[str] = []

    @contextmanager
    def detached(self) -> Iterator[str]:
        self.said.append("begin")
        yield "connection"
        self.said.append("commit")


class Runtime:
    def __init__(self, database: Database | None = None) -> None:
        self.post = Post()
        self.database = database


def detached(runtime: Runtime) -> Detached:
    here: Any = runtime
    return Detached(lambda: here)


def test_step_is_taken_with_a_key_of_its_own_each_time() -> None:
    backing = detached(Runtime())
    keys = {backing.effect("gateway", lambda key: key, (), None) for _ in range(2)}
    assert len(keys) == 2


def test_error_of_a_step_passes_through() -> None:
    with pytest.raises(ZeroDivisionError):
        detached(Runtime()).effect("gateway", lambda key: 1 // 0, (ZeroDivisionError,), None)


def test_block_is_an_ordinary_transaction() -> None:
    database = Database()
    with detached(Runtime(database)).atomic() as connection:
        assert (connection, database.said) == ("connection", ["begin"])
    assert database.said == ["begin", "commit"]


def test_block_without_a_database_is_refused() -> None:
    with pytest.raises(GrantError, match="needs a database"):
        detached(Runtime()).atomic()


def test_message_goes_out_at_once_where_there_is_no_django_transaction() -> None:
    runtime = Runtime(Database())
    task_id = detached(runtime).send("signature")
    assert runtime.post.published == [(task_id, "signature")]


# --- tasks ------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[FencedTask, SingletonTask])
def task(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """A task that shows its grant, in either tier."""
    app = Celery("detached", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.once_fenced = {
        "redis_url": "redis://127.0.0.1:1/0",
        "postgres_url": "postgresql://127.0.0.1:1/none",
    }
    once = Once(key="{number}", **({"replay_for": "1h"} if request.param is FencedTask else {}))
    made: Callable[..., Any] = app.task(bind=True, base=request.param, once=once, name="t", shared=False)(
        body
    )
    return made


def body(self: Any, number: int) -> list[Any]:
    grant = current_grant()
    grant.check()
    charged = [grant.effect("gateway", lambda key: number) for _ in range(2)]
    return [grant.token, grant.lost, grant.headers(), grant.remaining(), charged]


@pytest.mark.parametrize("call", ["direct", "eager"])
def test_call_without_a_worker_runs_its_steps_and_has_no_token(task: Any, call: str) -> None:
    """No server is asked: none is there."""
    value = task(7) if call == "direct" else task.apply((7,)).get()
    assert value == [None, False, {}, float("inf"), [7, 7]]
