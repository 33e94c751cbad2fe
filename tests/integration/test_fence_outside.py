"""``with fence(...)``: one at a time over threads, processes and tasks, and no commit by who was superseded (C1, C6, C9)."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from celery import Celery
from celery._state import _set_current_app, _tls

from celery_once_fenced import BusyError, ConfigError, FencedOffError, GrantError, current_grant, fence
from celery_once_fenced.errors import KeyDerivationError, StoreUnavailableError
from celery_once_fenced.events import Event, observing
from celery_once_fenced.grant import Grant
from celery_once_fenced.runtime import Runtime, runtime_of
from tests.fixtures.ledger import Ledger, eventually, ledger_at, operation
from tests.fixtures.proxy import TcpProxy

SHORT = 0.3


@pytest.fixture(scope="module")
def ledger(module_postgres_url: str) -> Iterator[Ledger]:
    with ledger_at(module_postgres_url) as opened:
        yield opened


@pytest.fixture
def app_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str | None], Celery]]:
    """Makes the current app of this thread, with its fences at an address."""
    monkeypatch.setattr("celery_once_fenced.runtime._database_factory", None)
    before, made = _tls.current_app, []

    def make(url: str | None) -> Celery:
        app = Celery("outside", broker="memory://", set_as_current=False)
        app.conf.once_fenced = {
            "redis_url": "redis://127.0.0.1:1/0",
            **({"postgres_url": url} if url else {}),
        }
        app.set_current()
        made.append(app)
        return app

    yield make
    _set_current_app(before)
    for app in made:
        runtime_of(app).close()
        app.close()


@pytest.fixture(autouse=True)
def app(app_of: Callable[[str | None], Celery], ledger: Ledger) -> Celery:
    return app_of(ledger.url)


@pytest.fixture
def runtime(app: Celery) -> Runtime:
    return runtime_of(app)


@pytest.fixture
def resource(request: pytest.FixtureRequest) -> str:
    return f"report:{request.node.name}"[:200]


def refused(resource: str, **options: Any) -> bool:
    try:
        with fence(resource, **options):
            return False
    except BusyError:
        return True


def write(connection: Any, resource: str, token: int | None) -> None:
    connection.execute("insert into writes (resource, token) values (%s, %s)", (resource, token))


def writes(ledger: Ledger, resource: str) -> list[int]:
    rows = ledger.execute("select token from writes where resource = %s order by token", (resource,))
    return [token for (token,) in rows]


# --- one at a time ----------------------------------------------------------------------------------------------------


def test_fence_excludes_until_its_block_ends(resource: str) -> None:
    with fence(resource) as grant:
        assert 59 < grant.remaining() <= 60
        assert refused(resource)
        assert not refused(f"{resource} another")
    assert not refused(resource)


def test_fence_ends_with_an_error_too(resource: str) -> None:
    with pytest.raises(ZeroDivisionError), fence(resource):
        raise ZeroDivisionError
    assert not refused(resource)


def test_tokens_rise_with_every_block(resource: str) -> None:
    tokens = []
    for _ in range(3):
        with fence(resource) as grant:
            tokens.append(grant.token)
            assert grant.headers() == {"Fencing-Token": str(grant.token)}
            assert (grant.resource, grant.lost) == (resource, False)
    assert tokens == sorted(set(tokens))


def test_busy_fence_is_waited_for_as_long_as_one_says(resource: str) -> None:
    with fence(resource, ttl=30):
        with pytest.raises(BusyError, match="held by another") as busy, fence(resource, wait="50ms"):
            raise AssertionError("entered")
        assert 25 < busy.value.left <= 30


def test_waiting_ends_when_the_block_does(app: Celery, resource: str) -> None:
    entered = threading.Event()

    def wait() -> bool:
        app.set_current()
        entered.set()
        return not refused(resource, wait=20)

    with ThreadPoolExecutor(1) as pool:
        with fence(resource):
            waiting = pool.submit(wait)
            entered.wait(5)
        assert waiting.result(10)


COUNT = """
import sys
import psycopg
from celery import Celery
from celery_once_fenced import fence

url, resource = sys.argv[1:]
app = Celery("p", broker="memory://")
app.conf.once_fenced = {"redis_url": "redis://127.0.0.1:1/0", "postgres_url": url}
for _ in range(8):
    with fence(resource, ttl=5, wait=30) as grant, grant.atomic() as connection:
        (seen,) = connection.execute("select coalesce(max(holder::int), 0) from writes where resource = %s", (resource,)).fetchone()
        connection.execute("insert into writes (resource, token, holder) values (%s, %s, %s)", (resource, grant.token, seen + 1))
"""


def test_one_process_at_a_time(ledger: Ledger, resource: str) -> None:
    """Each reads the highest number and writes the next: two at once would write one twice."""
    command = [sys.executable, "-c", COUNT, ledger.url, resource]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for one in running:
        assert one.communicate(timeout=60)[1] == ""
    rows = ledger.execute("select holder::int from writes where resource = %s order by token", (resource,))
    assert [number for (number,) in rows] == list(range(1, 25))


def test_task_and_block_share_a_resource(ledger: Ledger, resource: str) -> None:
    with fence(resource) as grant:
        answer = ledger.claim(operation(resource=resource))
        assert (answer.verdict, answer.same_key) == ("busy", False)
    held = ledger.hold(operation(resource=resource))
    assert held.token > (grant.token or 0)
    assert refused(resource)
    ledger.run(held)
    assert not refused(resource)


# --- renewal ----------------------------------------------------------------------------------------------------------


def test_fence_is_renewed_for_as_long_as_its_block_lasts(runtime: Runtime, resource: str) -> None:
    with fence(resource, ttl=SHORT) as grant:
        begun = runtime.fence_keeper.clock()
        eventually(lambda: runtime.fence_keeper.clock() > begun + 3 * SHORT)
        assert not grant.lost
        assert refused(resource)


def test_block_that_is_not_renewed_is_superseded_and_told(
    ledger: Ledger, runtime: Runtime, resource: str
) -> None:
    seen: list[Event] = []
    with observing(seen.append), fence(resource, ttl=60) as grant:
        take_over(ledger, resource)
        with pytest.raises(FencedOffError):
            grant._confirm()
        assert (grant.lost, grant.remaining()) == (True, 0.0)
        with pytest.raises(FencedOffError):
            grant.check()
    assert [event.name for event in seen] == ["fence.lost"]


def take_over(ledger: Ledger, resource: str) -> int:
    """Another takes the resource after the lease has lapsed, as if its holder were frozen."""
    ledger.expire(resource)
    return ledger.hold(operation(resource=resource)).token


def test_end_of_a_superseded_block_leaves_its_successor_alone(ledger: Ledger, resource: str) -> None:
    with fence(resource):
        ledger.expire(resource)
        successor = ledger.hold(operation(resource=resource))
    ledger.run(successor)


# --- transactions -----------------------------------------------------------------------------------------------------


def test_every_transaction_of_a_block_is_checked_and_commits(ledger: Ledger, resource: str) -> None:
    with fence(resource) as grant:
        for _ in range(3):
            with grant.atomic() as connection:
                write(connection, resource, grant.token)
    assert writes(ledger, resource) == [grant.token] * 3


def writes_and(grant: Grant, then: Callable[[Any], object]) -> None:
    """A transaction of the block that writes, and in which something else happens."""
    with grant.atomic() as connection:
        write(connection, str(grant.resource), grant.token)
        then(connection)


def test_error_in_a_transaction_takes_it_back_and_the_next_one_goes_on(ledger: Ledger, resource: str) -> None:
    with fence(resource) as grant:
        with pytest.raises(ZeroDivisionError):
            writes_and(grant, lambda connection: 1 // 0)
        writes_and(grant, lambda connection: None)
    assert writes(ledger, resource) == [grant.token]


def test_superseded_block_begins_no_transaction(ledger: Ledger, resource: str) -> None:
    with fence(resource) as grant:
        take_over(ledger, resource)
        with pytest.raises(FencedOffError), grant.atomic():
            raise AssertionError("begun")


def test_block_superseded_within_a_transaction_is_evicted(ledger: Ledger, resource: str) -> None:
    with fence(resource) as grant, pytest.raises(psycopg.OperationalError):
        writes_and(grant, lambda connection: take_over(ledger, resource))
    assert writes(ledger, resource) == []


def test_block_that_eviction_did_not_find_commits_nothing_either(ledger: Ledger, resource: str) -> None:
    def hidden(connection: Any) -> None:
        connection.execute("set local application_name = 'another'")
        take_over(ledger, resource)

    with fence(resource) as grant, pytest.raises(FencedOffError):
        writes_and(grant, hidden)
    assert writes(ledger, resource) == []


def test_holder_frozen_after_its_check_is_evicted(
    ledger: Ledger, runtime: Runtime, resource: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has locked the fence row and renews nothing; a claim does not wait for it."""

    def silent(_: object) -> None:
        raise StoreUnavailableError("postgres", "frozen")

    monkeypatch.setattr(runtime.ledger, "renew", silent)

    def frozen(connection: Any) -> None:
        connection.execute(
            "select 1 from once_fenced_fence where resource = %s for no key update", (resource,)
        )
        ledger.hold(operation(resource=resource))

    with fence(resource, ttl=SHORT) as grant, pytest.raises(psycopg.OperationalError):
        writes_and(grant, frozen)
    assert writes(ledger, resource) == []


def test_transaction_inside_another_is_refused_and_the_outer_one_commits(
    ledger: Ledger, resource: str
) -> None:
    with fence(resource) as grant, grant.atomic() as connection:
        write(connection, resource, grant.token)
        with pytest.raises(GrantError, match="inside another"), grant.atomic():
            raise AssertionError("begun")
    assert writes(ledger, resource) == [grant.token]


def test_block_that_ends_its_transaction_itself_is_told(resource: str) -> None:
    with fence(resource) as grant, pytest.raises(GrantError, match="ended the transaction"):
        writes_and(grant, lambda connection: connection.commit())


# --- what it is not, and what it is called with -----------------------------------------------------------------------


def test_fence_has_no_ledger(resource: str) -> None:
    with fence(resource) as grant:
        for refuses in (lambda: grant.effect("x", str), lambda: grant.send(None)):
            with pytest.raises(GrantError, match="use a FencedTask"):
                refuses()
        with pytest.raises(GrantError):
            current_grant()


@pytest.mark.parametrize("options", [{"ttl": 0}, {"ttl": "soon"}, {"wait": -1}])
def test_wrong_duration_is_refused(resource: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError), fence(resource, **options):
        raise AssertionError("entered")


@pytest.mark.parametrize("name", ["", "x" * 256, "a\0b", "\ud800", 7])
def test_wrong_name_is_refused(name: Any) -> None:
    with pytest.raises(KeyDerivationError, match=r"of fence\(\): the resource"), fence(name):
        raise AssertionError("entered")


def test_without_a_database_there_is_no_fence(app_of: Callable[[str | None], Celery], resource: str) -> None:
    app_of(None)
    with pytest.raises(ConfigError, match="needs a database"), fence(resource):
        raise AssertionError("entered")


def test_without_an_answer_there_is_no_fence(app_of: Callable[[str | None], Celery], resource: str) -> None:
    app_of("postgresql://127.0.0.1:1/none")
    with pytest.raises(StoreUnavailableError), fence(resource):
        raise AssertionError("entered")


def test_block_that_is_done_does_not_fail_for_want_of_the_database(
    app_of: Callable[[str | None], Celery], ledger: Ledger, resource: str
) -> None:
    proxy, seen = TcpProxy(ledger.url), list[Event]()
    app_of(proxy.url)
    with observing(seen.append), fence(resource):
        proxy.cut()
    proxy.close()
    assert [event.fields["operation"] for event in seen if event.name == "store.failed"] == ["free"]
