"""With 10,000 keys held, people's lists ask Redis a bounded number of questions and never walk its keyspace (E19).

How long they take stands in the benchmarks.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from celery import Celery, _state
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result
from django.contrib.auth.models import User
from django.test import Client

from celery_once_fenced import runtime
from celery_once_fenced.cli import once
from celery_once_fenced.keys import Key
from celery_once_fenced.policy import SPANS
from celery_once_fenced.runtime import runtime_of
from celery_once_fenced.stores import Enqueue, redis_listing
from celery_once_fenced.stores.redis import RedisLeaseStore
from celery_once_fenced.stores.redis_listing import PAGE
from django_celery_once_fenced import overview
from example_project.servers import Servers
from example_project.shop.models import Account, Order

KEYS = 10_000
BATCH = 500
WALKS = {"KEYS", "SCAN", "HSCAN", "SSCAN", "ZSCAN"}


@pytest.fixture(scope="module")
def many(servers: Servers) -> Iterator[str]:
    """A namespace in which 10,000 keys are held."""
    name = f"t{uuid.uuid4().hex[:12]}"
    store = RedisLeaseStore(servers.redis_url, namespace=name, socket_timeout=20)
    for first in range(0, KEYS, BATCH):
        store.enqueue_many([question(number) for number in range(first, first + BATCH)])
    store.close()
    yield name
    with redis.Redis.from_url(servers.redis_url) as client:
        client.delete(*client.scan_iter(match=f"*{name}*", count=1000))


def question(number: int) -> Enqueue:
    text = f"shop.feed:{number}"
    key = Key(hashlib.sha256(text.encode()).hexdigest(), text)
    return Enqueue(key, "shop.feed", SPANS["until_executed"], f"d{number}", f"t{number}", 3600.0)


@pytest.fixture
def app(servers: Servers, many: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    monkeypatch.setattr("celery_once_fenced.runtime._database_factory", None)
    with Celery("many", broker="memory://", set_as_current=False) as app:
        app.conf.once_fenced = {"redis_url": servers.redis_url, "namespace": many, "socket_timeout": 20}
        yield app
        runtime_of(app).close()


def run(app: Celery, *arguments: str) -> Result:
    before = _state._tls.current_app
    try:
        result = CliRunner().invoke(
            once, arguments, obj=CLIContext(app=app, no_color=True, workdir=None), catch_exceptions=False
        )
    finally:
        _state._set_current_app(before)
    assert result.exit_code == 0
    return result


def commands(client: redis.Redis, operation: Callable[[], object]) -> tuple[Counter[str], Counter[str]]:
    """What the server was asked by clients, and what it did all told, inside of scripts too."""
    asked, done = Counter[str](), Counter[str]()
    with client.monitor() as monitor, client.client() as other:
        other.ping()
        operation()
        other.echo("over")
        begun = False
        for told in monitor.listen():
            command = told["command"].split()[0].upper()
            if command == "ECHO":
                return asked, done
            if begun:
                done[command] += 1
                asked[command] += told["client_type"] != "lua"
            begun = begun or command == "PING"
    raise AssertionError


def walks_nothing(servers: Servers, operation: Callable[[], object]) -> int:
    """Returns how many scripts were run; each looks at a bounded part of an index."""
    operation()  # once before, so that every script is known
    with redis.Redis.from_url(servers.redis_url) as client:
        asked, done = commands(client, operation)
    assert not WALKS & set(done)
    return asked["EVALSHA"]


def test_leases_are_listed_without_a_walk(servers: Servers, app: Celery) -> None:
    assert len(run(app, "leases").output.splitlines()) == KEYS + 1
    buckets, page = 16, PAGE
    pages = walks_nothing(servers, lambda: run(app, "leases"))
    assert KEYS / page <= pages <= KEYS / page + 2 * buckets


def test_leases_as_json_are_all_of_them(app: Celery) -> None:
    rows = [json.loads(line) for line in run(app, "leases", "--json").output.splitlines()]
    assert {row["key"] for row in rows} == {f"shop.feed:{number}" for number in range(KEYS)}


def test_a_walk_is_noticed(servers: Servers, many: str) -> None:
    with redis.Redis.from_url(servers.redis_url) as client, pytest.raises(AssertionError):
        walks_nothing(servers, lambda: list(client.scan_iter(match=f"{{{many}:*", count=1000)))


def viewer(app: Celery, monkeypatch: pytest.MonkeyPatch) -> Client:
    here = runtime_of(app)
    monkeypatch.setattr(runtime, "current", lambda: here)
    client = Client()
    client.force_login(User.objects.create_superuser(secrets.token_hex(4)))
    return client


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize("query", ["", "?q=feed%3A99", "?q=zzzz", "?slot=queued"])
def test_admin_lists_a_page_without_a_walk(
    servers: Servers, app: Celery, monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    client = viewer(app, monkeypatch)
    answers: list[Any] = []
    scripts = walks_nothing(
        servers, lambda: answers.append(client.get(f"/admin/once_fenced/heldlock/{query}"))
    )
    assert {answer.status_code for answer in answers} == {200}
    assert b"10000" in answers[0].content.replace(b",", b"") or query
    assert scripts <= 16 * 8


@pytest.mark.usefixtures("shop")
def test_the_page_of_a_lock_asks_for_that_lock_alone(
    servers: Servers, app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = viewer(app, monkeypatch)
    address = f"/admin/once_fenced/heldlock/q_3A{question(7).key.digest}/change/"
    answers: list[Any] = []
    # What has the key and what surrounds it: once for the lock, once for what explain() says of it.
    assert walks_nothing(servers, lambda: answers.append(client.get(address))) == 4
    assert b"Task t7 was called" in answers[0].content


@pytest.mark.usefixtures("shop")
def test_the_page_of_an_object_looks_no_longer_for_its_locks_than_a_search(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = viewer(app, monkeypatch)
    order = Order.objects.create(account=Account.objects.create(name="Ada"), amount=1)
    address = f"/admin/shop/order/{order.pk}/change/"
    assert "Nothing of it is held." in client.get(address).text
    monkeypatch.setattr(redis_listing, "SEARCH_SECONDS", 0.0)
    assert "there was no time to look at all of them" in client.get(address).text


def test_a_census_without_time_counts_a_part_and_reckons_the_rest(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = runtime_of(app).readings
    assert (store.census(60).whole, store.census(60).total) == (True, KEYS)
    monkeypatch.setattr(redis_listing, "COUNTED", 500)  # of some 625 in each bucket
    census = store.census(0)
    assert not census.whole
    assert census.total == KEYS


@pytest.mark.usefixtures("shop")
def test_the_overview_says_what_it_only_reckons(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    client = viewer(app, monkeypatch)
    monkeypatch.setattr(overview, "CENSUS_SECONDS", 60.0)
    assert "≈" not in client.get("/admin/once_fenced/overview/").text
    monkeypatch.setattr(overview, "CENSUS_SECONDS", 0.0)
    monkeypatch.setattr(redis_listing, "COUNTED", 500)
    text = client.get("/admin/once_fenced/overview/").text
    assert "≈ 10" in text
    assert "numbers with ≈ are reckoned" in text
