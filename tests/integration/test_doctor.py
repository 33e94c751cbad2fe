"""What the doctor finds, on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from celery_once_fenced import Once, SingletonTask
from celery_once_fenced.doctor import examine
from celery_once_fenced.runtime import runtime_of
from example_project.servers import RedisServer, start_redis


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with start_redis() as started:
        yield started


@pytest.fixture
def app(server: RedisServer, namespace: str) -> Iterator[Celery]:
    app = Celery("examined", broker="memory://", set_as_current=False)
    app.conf.once_fenced = {"redis_url": server.url, "namespace": namespace}
    yield app
    runtime_of(app).close()


def nothing() -> None: ...


def set_policy(app: Celery, policy: str) -> None:
    import redis

    with redis.Redis.from_url(app.conf.once_fenced["redis_url"]) as client:
        client.config_set("maxmemory-policy", policy)


def findings(app: Any) -> list[tuple[str, str]]:
    return [(finding.level, finding.text) for finding in examine(app)]


def test_nothing_is_found_where_nothing_is_wrong(app: Celery) -> None:
    set_policy(app, "noeviction")
    assert findings(app) == []


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_server_that_evicts_leases_is_an_error(app: Celery, policy: str) -> None:
    set_policy(app, policy)
    ((level, text),) = findings(app)
    set_policy(app, "noeviction")
    assert level == "error"
    assert policy in text


def test_settings_for_a_task_that_does_not_exist_are_a_warning(app: Celery) -> None:
    app.conf.once_fenced = {**app.conf.once_fenced, "tasks": {"shop.tasks.post_entri": {"lease": 5}}}
    app.task(name="shop.tasks.post_entry", base=SingletonTask)(nothing)
    ((level, text),) = findings(app)
    assert level == "warning"
    assert "shop.tasks.post_entry" in text


def test_a_task_in_a_beat_schedule_that_raises_on_duplicates_is_a_warning(app: Celery) -> None:
    app.task(name="nightly", base=SingletonTask, once=Once(on_duplicate="raise"))(nothing)
    app.task(name="hourly", base=SingletonTask)(nothing)
    app.conf.beat_schedule = {name: {"task": name, "schedule": 60} for name in ("nightly", "hourly")}
    ((level, text),) = findings(app)
    assert level == "warning"
    assert "'nightly'" in text
