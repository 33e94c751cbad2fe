"""What a call and its run cost: every command that reaches the lock server, as its own MONITOR tells them.

The lock server is a server of its own, so that nothing but leases is on it; broker and results are elsewhere.  Both the
caller and the worker reach it through a proxy that counts round trips.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

import celery_once_fenced.stores
from celery_once_fenced.stores.redis_link import script
from example_project.servers import RedisServer, start_redis
from tests.acceptance.app import LEASE
from tests.acceptance.workers import PARKED, Site, Trial, Worker, eventually
from tests.fixtures.proxy import TcpProxy

LUA = Path(celery_once_fenced.stores.__file__).parent / "lua"
SCRIPTS = {script(file.stem).sha: file.stem for file in LUA.glob("*.lua") if file.stem != "bucket"}
HANDSHAKE = {"AUTH", "CLIENT", "HELLO", "SELECT"}
"""What a connection says once, when it is made."""


class CountingProxy(TcpProxy):
    """Remembers each request: what the client sent before it waited for an answer."""

    def __init__(self, url: str) -> None:
        self.requests: list[bytes] = []
        super().__init__(url)

    def _mark(self, link: Any, request: bytes) -> None:
        self.requests.append(request)
        super()._mark(link, request)


class Watch:
    """The commands of clients, by the name of their script; what scripts do inside the server is not theirs."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url)
        self._told: list[dict[str, Any]] = []
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        assert self._begun.wait(10)

    def _listen(self) -> None:
        with self._client.monitor() as monitor:
            self._begun.set()
            for told in monitor.listen():
                self._told.append(told)
                if told["command"] == "ECHO over":
                    return

    def until_now(self) -> list[dict[str, Any]]:
        """What clients asked up to this moment."""
        mark = f"ECHO {uuid.uuid4().hex}"
        self._client.execute_command(mark)
        eventually(lambda: any(told["command"] == mark for told in self._told), what="what MONITOR tells")
        return [
            told
            for told in self._told
            if told["client_type"] != "lua" and not told["command"].startswith("ECHO")
        ]

    def handshakes(self) -> Counter[tuple[str, str]]:
        """How often each connection said each thing that belongs to its beginning."""
        return Counter(
            (told["client_port"], told["command"])
            for told in self.until_now()
            if told["command"].split()[0].upper() in HANDSHAKE
        )

    def commands(self, since: int = 0) -> list[str]:
        named = (name_of(told["command"]) for told in self.until_now()[since:])
        return [name for name in named if name not in HANDSHAKE]

    def close(self) -> None:
        self._client.execute_command("ECHO over")
        self._thread.join()
        self._client.close()


def name_of(command: str) -> str:
    verb, _, rest = command.partition(" ")
    return SCRIPTS.get(rest.split()[0], verb.upper()) if verb.upper() == "EVALSHA" else verb.upper()


@pytest.fixture(scope="module")
def lock_server() -> Iterator[RedisServer]:
    with start_redis() as server:
        yield server


@pytest.fixture(scope="module")
def proxy(lock_server: RedisServer) -> Iterator[CountingProxy]:
    proxy = CountingProxy(lock_server.url)
    yield proxy
    proxy.close()


@pytest.fixture(scope="module")
def site(sites: Callable[..., Site], proxy: CountingProxy) -> Site:
    return sites(lock_url=proxy.url, once_fenced={"socket_timeout": 5})


@pytest.fixture(scope="module", autouse=True)
def worker(site: Site) -> Iterator[Worker]:
    """One process, whose threads share connections and heartbeat."""
    with site.worker(pool="threads", concurrency=4) as worker:
        yield worker


@pytest.fixture(scope="module")
def watch(site: Site, lock_server: RedisServer, worker: Worker) -> Iterator[Watch]:
    """Begins when the server knows the scripts: each is sent to it as text once."""
    for name in ("late", "replaces"):
        through(worker, site.begin(name, f"await_loss {LEASE / 2}"))
    watch = Watch(lock_server.url)
    yield watch
    watch.close()


@contextmanager
def exactly(watch: Watch, *expected: str) -> Iterator[None]:
    """In any order: the worker does not wait for the caller."""
    before = len(watch.until_now())
    yield
    assert sorted(watch.commands(before)) == sorted(expected)


def through(worker: Worker, trial: Trial) -> None:
    """Wait until the worker has nothing more to do for a call: it logs so when all is stored and settled."""
    trial.value()
    eventually(lambda: f"[{trial.result.id}] succeeded in" in worker.log(), what="the end of a run")


# --- a call and its run -----------------------------------------------------------------------------------------------

COSTS = {
    "early": ("enqueue", "start", "end"),
    "late": ("enqueue", "start", "end", "settle"),
    "one_and_one": ("enqueue", "start", "end"),
    "serial": ("start", "end"),
    "late_serial": ("start", "end", "settle"),
    "until_executing": ("enqueue", "start"),
    "until_executing_late": ("enqueue", "start", "end", "settle"),
    "until_expired": ("enqueue",),
    "replaces": ("enqueue", "confirm", "start", "end"),
    "keeps_last": ("enqueue", "start", "end", "settle"),
}


def costs(site: Site, worker: Worker, watch: Watch, name: str, also: Callable[[], object] = int) -> None:
    with exactly(watch, *COSTS[name]):
        through(worker, site.begin(name))
        also()


@pytest.mark.parametrize("name", COSTS)
def test_call_and_run_cost(site: Site, worker: Worker, watch: Watch, name: str) -> None:
    costs(site, worker, watch, name)


def test_one_command_more_is_noticed(site: Site, worker: Worker, watch: Watch) -> None:
    with pytest.raises(AssertionError):
        costs(site, worker, watch, "late", also=lambda: site.runtime.leases.look("ab" * 32))


def test_each_command_is_a_round_trip_and_no_more(
    site: Site, worker: Worker, watch: Watch, proxy: CountingProxy
) -> None:
    before = len(proxy.requests)
    costs(site, worker, watch, "late")
    renewal = script(
        "renew"
    ).sha.encode()  # where the machine is so busy that the run takes a third of its lease
    asked = [request for request in proxy.requests[before:] if renewal not in request]
    assert len(asked) == len(COSTS["late"])


def test_connection_says_once_who_it_is(site: Site, worker: Worker, watch: Watch) -> None:
    for _ in range(5):
        costs(site, worker, watch, "late")
    assert set(watch.handshakes().values()) <= {1}


def test_retry_costs_its_hold_and_its_run(site: Site, worker: Worker, watch: Watch) -> None:
    with exactly(watch, "enqueue", "start", "enqueue", "end", "start", "end", "settle"):
        through(worker, site.begin("early", "retry 0.3", "say done"))


# --- duplicates -------------------------------------------------------------------------------------------------------


def test_suppressed_duplicate_costs_one(site: Site, watch: Watch) -> None:
    trial = site.begin("early", queue=PARKED)
    for _ in range(5):
        with exactly(watch, "enqueue"):
            assert trial.again().outcome.status == "duplicate"


def test_kept_call_costs_one(site: Site, watch: Watch) -> None:
    trial = site.begin("keeps_last", queue=PARKED)
    with exactly(watch, "enqueue"):
        assert trial.again().outcome.status == "kept_last"


def test_replacement_costs_two(site: Site, watch: Watch) -> None:
    trial = site.begin("replaces", queue=PARKED)
    with exactly(watch, "enqueue", "confirm"):
        assert trial.again(queue=PARKED).outcome.status == "replaced"


def test_suppression_by_a_delayed_hold_costs_one_and_a_look_at_its_state(site: Site, watch: Watch) -> None:
    """The state is the result backend's; a result object that is collected unsubscribes there."""
    trial = site.begin("early", queue=PARKED, countdown=60)
    results = Watch(site.settings["result_backend"])
    with exactly(watch, "enqueue"):
        assert trial.again().outcome.status == "duplicate"
    asked = [told["command"] for told in results.until_now() if trial.result.id in told["command"]]
    results.close()
    assert [command.split()[0] for command in asked if "SUBSCRIBE" not in command] == ["GET"]


def test_many_calls_are_one_round_trip(site: Site, watch: Watch, proxy: CountingProxy) -> None:
    task = site.task("early")
    before = len(proxy.requests)
    with exactly(watch, *["enqueue"] * 20):
        task.apply_many([((uuid.uuid4().hex,), {}) for _ in range(20)], queue=PARKED)
    assert len(proxy.requests) - before == 1


# --- renewal ----------------------------------------------------------------------------------------------------------


def renewals(proxy: CountingProxy, since: int) -> list[bytes]:
    return [request for request in proxy.requests[since:] if script("renew").sha.encode() in request]


def test_all_leases_of_a_process_are_renewed_in_one_round_trip_at_a_third_of_the_lease(
    site: Site, worker: Worker, proxy: CountingProxy
) -> None:
    before, began = len(proxy.requests), time.monotonic()
    trials = [site.begin("early", f"await_loss {LEASE * 2},note_trust").has_run(1) for _ in range(3)]
    holders = [site.digest(trial.task, trial.label).encode() for trial in trials]
    all_run = len(proxy.requests)
    for trial in trials:
        through(worker, trial)
        assert "lost" not in site.stage.events(trial.label)
    beats = renewals(proxy, before)
    assert 2 <= len(beats) <= (time.monotonic() - began) / (LEASE / 3)
    together = renewals(proxy, all_run)
    assert sum(all(holder in request for holder in holders) for request in together) >= 2


def test_leases_of_one_bucket_are_renewed_by_one_command(
    site: Site, worker: Worker, watch: Watch, proxy: CountingProxy
) -> None:
    task = site.task("early")
    same = [label for label in (uuid.uuid4().hex for _ in range(200)) if site.digest(task, label)[0] == "7"][
        :3
    ]
    before, seen = len(proxy.requests), len(watch.until_now())
    results = [task.delay(label, f"sleep {LEASE}") for label in same]
    for result in results:
        result.get(timeout=10)
    beats = renewals(proxy, before)
    assert watch.commands(seen).count("renew") == len(beats) >= 1
