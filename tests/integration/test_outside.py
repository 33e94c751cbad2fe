"""``lease()``, ``explain()`` and ``release()`` outside tasks, on a real server: in threads and in processes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
from celery import Celery

from celery_once_fenced import BusyError, ConfigError, GrantError, current_grant, explain, lease, release
from celery_once_fenced.errors import LeaseLostError, StoreUnavailableError
from celery_once_fenced.events import Event, observing
from celery_once_fenced.grant import Grant, granted
from celery_once_fenced.lease import boot_clock
from celery_once_fenced.runtime import Runtime, runtime_of
from tests.fixtures.ledger import eventually
from tests.fixtures.proxy import TcpProxy

SHORT = 0.3


@pytest.fixture
def settings(redis_url: str, namespace: str) -> dict[str, Any]:
    return {"redis_url": redis_url, "namespace": namespace}


@pytest.fixture(autouse=True)
def without_postgres(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the efficiency tier: Django's database, which other tests set up, is not asked."""
    monkeypatch.setattr("celery_once_fenced.runtime._database_factory", None)


@pytest.fixture
def app(settings: dict[str, Any]) -> Iterator[Celery]:
    with configured(settings) as app:
        yield app


def configured(settings: dict[str, Any]) -> Celery:
    """An app with these settings, current in this thread while it is open."""
    app = CurrentApp("outside", set_as_current=False, broker="memory://")
    app.conf.once_fenced = settings
    return app


class CurrentApp(Celery):
    def __enter__(self) -> CurrentApp:
        from celery._state import _tls

        self.before = _tls.current_app
        self.set_current()
        return self

    def __exit__(self, *_: object) -> None:
        from celery._state import _set_current_app

        _set_current_app(self.before)
        runtime_of(self).close()
        self.close()


@pytest.fixture
def runtime(app: Celery) -> Runtime:
    return runtime_of(app)


def refused(name: str, **options: Any) -> bool:
    try:
        with lease(name, **options):
            return False
    except BusyError:
        return True


# --- mutual exclusion -------------------------------------------------------------------------------------------------


def test_lease_excludes_until_its_block_ends(app: Celery) -> None:
    with lease("report") as held:
        assert 59 < held.remaining() < 60
        assert refused("report")
        assert not refused("another")
    assert not refused("report")


def test_lease_ends_with_an_error_too(app: Celery) -> None:
    with pytest.raises(ZeroDivisionError), lease("report"):
        raise ZeroDivisionError
    assert not refused("report")


def test_one_thread_at_a_time(app: Celery, settings: dict[str, Any]) -> None:
    inside, most = [], []

    def visit(number: int) -> None:
        app.set_current()
        with lease("report", ttl=5, wait=20):
            inside.append(number)
            most.append(len(inside))
            inside.remove(number)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(visit, range(24)))
    assert most == [1] * 24


COUNT = """
import sys
from celery import Celery
from celery_once_fenced import lease
import redis

url, namespace, counter = sys.argv[1:]
app = Celery("p", broker="memory://")
app.conf.once_fenced = {"redis_url": url, "namespace": namespace}
client = redis.Redis.from_url(url)
for _ in range(10):
    with lease("counter", ttl=5, wait=20):
        client.set(counter, int(client.get(counter) or 0) + 1)
"""


def test_one_process_at_a_time(redis_url: str, namespace: str) -> None:
    counter = f"{namespace}.counter"
    command = [sys.executable, "-c", COUNT, redis_url, namespace, counter]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(3)]
    for process in processes:
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 0, errors
    with redis.Redis.from_url(redis_url) as client:
        assert client.get(counter) == b"30"


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_busy_error_says_who_is_in_the_way_and_for_how_long(app: Celery) -> None:
    with lease("report", ttl=30), pytest.raises(BusyError) as raised, lease("report"):
        pass
    assert raised.value.name == "lease:report"
    assert 29 < raised.value.left <= 30


def test_waiting_ends_after_as_long_as_was_said(app: Celery) -> None:
    with lease("report"):
        began = boot_clock()
        assert refused("report", wait=SHORT)
        assert SHORT <= boot_clock() - began < SHORT + 1


def test_who_waits_gets_the_lease_when_it_is_free(app: Celery) -> None:
    waiting, free = threading.Event(), threading.Event()

    def hold() -> None:
        app.set_current()
        with lease("report"):
            waiting.set()
            free.wait(5)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(hold)
        assert waiting.wait(5)
        threading.Timer(SHORT, free.set).start()
        assert not refused("report", wait=10)


def test_lease_of_a_dead_process_lapses(app: Celery, redis_url: str, namespace: str) -> None:
    script = COUNT.replace("ttl=5", "ttl=0.5").replace(
        "client.set(counter", "__import__('os')._exit(9) or client.set(counter"
    )
    subprocess.run([sys.executable, "-c", script, redis_url, namespace, "c"], timeout=20, check=False)
    assert not refused("counter", wait=5)


# --- renewal and loss -------------------------------------------------------------------------------------------------


def test_lease_outlives_its_ttl_while_the_block_runs(app: Celery) -> None:
    with lease("report", ttl=SHORT) as held:
        until = boot_clock() + 3 * SHORT
        eventually(lambda: boot_clock() > until)
        assert not held.lost
        assert refused("report")


def test_loss_is_delivered(app: Celery, runtime: Runtime) -> None:
    seen: list[Event] = []
    with observing(seen.append), lease("report", ttl=SHORT) as held:
        free_by_hand(runtime)
        eventually(lambda: held.lost)
        with pytest.raises(LeaseLostError):
            held.check()
    assert "lease.lost" in [event.name for event in seen]


def free_by_hand(runtime: Runtime) -> None:
    (hold,) = runtime.leases.holds()
    assert runtime.leases.release(hold.digest, "r", hold.holder)


def test_late_leaver_does_not_free_the_next_holder(app: Celery, runtime: Runtime) -> None:
    entered, leave = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        with lease("report"):
            free_by_hand(runtime)
            pool.submit(stay, app, entered, leave)
            assert entered.wait(5)
        assert refused("report")
        leave.set()


def stay(app: Celery, entered: threading.Event, leave: threading.Event) -> None:
    app.set_current()
    with lease("report"):
        entered.set()
        leave.wait(10)


@pytest.fixture
def proxied(redis_url: str, namespace: str, tcp_proxy: Callable[[str], TcpProxy]) -> Iterator[TcpProxy]:
    proxy = tcp_proxy(redis_url)
    settings = {"redis_url": proxy.url, "namespace": namespace, "socket_timeout": 0.1}
    with configured(settings):
        yield proxy


def test_lease_is_lost_where_redis_is(proxied: TcpProxy) -> None:
    with lease("report", ttl=SHORT) as held:
        proxied.cut()
        eventually(lambda: held.lost)
        proxied.resume()


def test_block_that_is_done_does_not_fail_for_want_of_redis(proxied: TcpProxy) -> None:
    seen: list[Event] = []
    with observing(seen.append), lease("report", ttl=5):
        proxied.cut()
    assert [event.fields["operation"] for event in seen if event.name == "store.failed"] == ["end"]


def test_error_of_the_block_is_not_replaced_for_want_of_redis(proxied: TcpProxy) -> None:
    with pytest.raises(ZeroDivisionError), lease("report", ttl=5):
        cut_and_fail(proxied)


def cut_and_fail(proxy: TcpProxy) -> None:
    proxy.cut()
    raise ZeroDivisionError


def test_without_redis_there_is_no_lease(proxied: TcpProxy) -> None:
    proxied.cut()
    with pytest.raises(StoreUnavailableError), lease("report"):
        raise AssertionError("entered without a lease")


def test_grant_that_arrives_after_its_window_is_given_back(
    app: Celery, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime.keeper, "clock", iter([0.0, 100.0, 100.0]).__next__)
    with pytest.raises(StoreUnavailableError, match="trust window"), lease("report", ttl=60):
        raise AssertionError("believed a lease that has lapsed")
    assert list(runtime.leases.holds()) == []


# --- what it is called with -------------------------------------------------------------------------------------------


def test_durations_are_written_as_everywhere(app: Celery) -> None:
    with lease("report", ttl="2m") as held:
        assert 118 < held.remaining() < 120
        assert refused("report", wait="10ms")


@pytest.mark.parametrize(
    "options", [{"ttl": 0}, {"ttl": "soon"}, {"ttl": 0.01}, {"wait": "later"}, {"wait": -1}]
)
def test_wrong_duration_is_refused(app: Celery, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=name), lease("report", **options):
        pass


def test_name_stays_out_of_redis_where_texts_are_hashed(settings: dict[str, Any]) -> None:
    with configured({**settings, "key_text": "hash"}) as app, lease("anna@example.org"):
        (hold,) = runtime_of(app).leases.holds()
        assert "anna" not in hold.text


def test_lease_inside_a_body_leaves_the_tasks_grant_alone(app: Celery) -> None:
    task = Grant("shop.post:1", resource="account:1", token=7)
    with granted(task), lease("report") as held:
        assert current_grant() is task
        assert held is not task


def test_lease_is_no_grant_of_a_task(app: Celery) -> None:
    with lease("report"), pytest.raises(GrantError):
        current_grant()


# --- which app (W4) ---------------------------------------------------------------------------------------------------

W4 = """
import sys, threading
from celery import Celery
from celery_once_fenced import BusyError, lease

app = Celery("web", broker="memory://")
app.conf.once_fenced = {"redis_url": sys.argv[1], "namespace": sys.argv[2]}
said = []

def view():
    try:
        with lease("report"):
            said.append("entered")
    except BusyError:
        said.append("busy")

for held in (True, False):
    with lease("report" if held else "another"):
        thread = threading.Thread(target=view)
        thread.start()
        thread.join()
print(*said)
"""


def test_thread_that_never_touched_celery_finds_the_configured_app(redis_url: str, namespace: str) -> None:
    command = [sys.executable, "-c", W4, redis_url, namespace]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.stdout.split() == ["busy", "entered"], done.stderr


def test_process_without_settings_is_told_what_is_missing() -> None:
    script = "from celery_once_fenced import lease\nwith lease('x'): pass"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "CELERY_ONCE_FENCED" in done.stderr


WRONG = """
import sys
from celery import Celery, shared_task
from celery_once_fenced import FencedTask, Once, explain, lease

@shared_task(base=FencedTask, once=Once(replay_for=60))
def needs_a_database(): ...

app = Celery("shop", broker="memory://")
app.conf.once_fenced = {"redis_url": sys.argv[1], "namespace": sys.argv[2]}
with lease("report"):
    print(explain("lease:report").holds[0].task)
"""


def test_explain_answers_where_a_task_cannot_be_bound(redis_url: str, namespace: str) -> None:
    command = [sys.executable, "-c", WRONG, redis_url, namespace]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.stdout.split() == ["lease"], done.stderr


# --- who holds it, and freeing it -------------------------------------------------------------------------------------


def test_explain_says_who_holds_a_key_and_until_when(app: Celery) -> None:
    with lease("report", ttl=30):
        found = explain("lease:report")
        (hold,) = found.holds
        assert (hold.slot, hold.task) == ("r", "lease")
        assert "running in task" in str(found)
        assert explain(found.digest).holds[0].holder == hold.holder


def test_explain_of_a_free_key_says_so(app: Celery) -> None:
    with lease("report"):
        digest = explain("lease:report").digest
    assert "held by nobody" in str(explain(digest))


def test_text_that_nobody_holds_is_free_or_mistyped(app: Celery) -> None:
    """As ``outcome.key`` of a task that has just ended."""
    found = explain("shop.feed:1")
    assert (found.holds, found.digest) == ((), "")
    assert str(found).startswith("shop.feed:1: no key or fence of this text is held or recorded (")
    assert not found.known
    assert release("shop.feed:1", "somebody") is False
    with pytest.raises(ConfigError, match="a key is given as text"):
        explain(5)  # type: ignore[arg-type]


def test_release_compares_the_holder(app: Celery) -> None:
    with lease("report"):
        (hold,) = explain("lease:report").holds
        assert not release("lease:report", "somebody else")
        assert refused("report")
        assert release("lease:report", hold.holder)
        assert not refused("report")
