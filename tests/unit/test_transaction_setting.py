"""What the setting ``transaction`` may name, and what is said of it otherwise (C14)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from celery import Celery

from celery_once_fenced import FencedTask, Once
from celery_once_fenced.errors import ConfigError
from celery_once_fenced.stores.postgres_project import driver_of, maker_of

HERE = "tests.fixtures.makers"


def test_callable_is_taken_as_it_is() -> None:
    assert maker_of(nullcontext) is nullcontext


@pytest.mark.parametrize("path", [f"{HERE}.begin", f"{HERE}.Sessions.begin", f"{HERE}.sessions.begin"])
def test_path_leads_through_modules_and_what_is_in_them(path: str) -> None:
    with maker_of(path)() as given:
        assert given == "given"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no_such_shop.db.begin", "there is no module 'no_such_shop'"),
        (f"{HERE}.beginn", "no 'beginn' there; did you mean 'begin'"),
        (f"{HERE}.Sessions.start", "no 'start' there"),
        ("tests.no_such.begin", "no 'no_such' there"),
        (f"{HERE}.NUMBER", "is 5: name a callable"),
        ("tests.fixtures.broken_makers.begin", "No module named 'no_such_driver'"),
    ],
)
def test_path_that_leads_nowhere_is_an_error_that_says_where_it_ended(path: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        maker_of(path)
    assert path in str(refused.value)


class Round:
    """A connection behind a connection behind …"""

    @property
    def connection(self) -> Any:
        return Round()


@pytest.mark.parametrize("given", [None, object(), Round()])
def test_what_has_no_connection_of_psycopg_behind_it_is_refused(given: object) -> None:
    with pytest.raises(
        ConfigError, match=f"gives .*{type(given).__qualname__}, and no connection of psycopg 3"
    ):
        driver_of(given)


def post() -> None: ...


def test_task_is_not_bound_where_the_setting_leads_nowhere() -> None:
    with Celery("shop", broker="memory://", set_as_current=False) as app:
        app.conf.once_fenced = {
            "redis_url": "redis://localhost:1",
            "postgres_url": "postgresql://localhost:1/shop",
            "transaction": f"{HERE}.beginn",
        }
        options = {"base": FencedTask, "once": Once(key=(), replay_for=0), "shared": False}
        task = app.task(name="post", **options)(post)
        with pytest.raises(ConfigError, match="no 'beginn' there"):
            _ = task.blueprint
