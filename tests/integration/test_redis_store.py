"""The Redis store and the failures of a real server: slow, frozen, killed, full, demoted, or a lost reply."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from redis.crc import key_slot

from celery_once_fenced.errors import ConfigError, StoreUnavailableError
from celery_once_fenced.stores import HoldQuery
from celery_once_fenced.stores.redis import RedisLeaseStore
from example_project.servers import RedisServer, Servers, start_redis
from tests.conformance.lease_bench import Bench
from tests.fixtures.proxy import TcpProxy

TIMEOUT = 0.8
SLACK = 0.7
"""What a busy machine may add."""

forks_on_purpose = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

Make = Callable[..., RedisLeaseStore]


@pytest.fixture
def client(servers: Servers) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(servers.redis_url, decode_responses=True) as made:
        yield made


@pytest.fixture
def make(namespace: str) -> Iterator[Make]:
    made: list[RedisLeaseStore] = []

    def store(url: str, **options: Any) -> RedisLeaseStore:
        given: dict[str, Any] = {"namespace": namespace, "socket_timeout": TIMEOUT} | options
        made.append(RedisLeaseStore(url, **given))
        return made[-1]

    yield store
    for each in made:
        each.close()


@pytest.fixture
def bench(servers: Servers, make: Make) -> Bench:
    return Bench(make(servers.redis_url, socket_timeout=20))


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    with start_redis() as server:
        yield server


@contextmanager
def takes_at_most(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds + SLACK


def eventually(true: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- the ordinary day ---------------------------------------------------------------------------------------


def test_nothing_connects_before_it_is_asked(make: Make) -> None:
    with takes_at_most(0):
        make("redis://192.0.2.1:1/0")


@pytest.mark.parametrize("url", ["http://host", "host:6379", "", "redis://:secret@host:port/0"])
def test_wrong_url_is_an_error_that_keeps_the_password(make: Make, url: str) -> None:
    with pytest.raises(ConfigError, match=r"^redis_url is no URL") as caught:
        make(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("namespace", ["", "{a}", "a}b"])
def test_namespace_places_no_keys(make: Make, namespace: str) -> None:
    with pytest.raises(ConfigError, match="namespace"):
        make("redis://host", namespace=namespace)


def test_lease_lapses_by_the_servers_clock(bench: Bench) -> None:
    bench.start("d1", lease=0.1)
    eventually(lambda: bench.start("d2").answer == "granted")
    assert bench.counters["expired"] == 1


def test_operations_are_one_command_each(bench: Bench, client: redis.Redis) -> None:
    operations: list[Callable[[], object]] = [
        lambda: bench.enqueue("d1"),
        lambda: bench.start("d1", "h1"),
        lambda: bench.renew("h1"),
        lambda: bench.end("d1", "h1", mark=10, held=1.0, counter="replayed"),
        lambda: bench.settle("d1"),
        lambda: bench.release("q", "d1"),
        lambda: bench.store.count(bench.key.digest, bench.task, "lost"),
        lambda: bench.store.look(bench.key.digest),
    ]
    for operation in operations:  # the scripts are known from here on
        operation()
    for operation in operations:
        assert client_commands(client, operation) == ["EVALSHA"]
    assert client_commands(client, lambda: bench.of("while_executing").enqueue("d1")) == []


def test_listings_never_walk_the_keyspace(bench: Bench, client: redis.Redis) -> None:
    bench.enqueue("d1")
    store = bench.store
    commands = client_commands(
        client,
        lambda: (
            list(store.holds()),
            store.look(bench.key.digest),
            store.surroundings(bench.key.digest),
            store.page(HoldQuery(text="x"), 9),
            store.census(),
            store.stats(),
            store.hours(),
        ),
        lua=True,
    )
    assert commands
    assert not {"KEYS", "SCAN"} & set(commands)


def client_commands(client: Any, operation: Callable[[], object], lua: bool = False) -> list[str]:
    with client.monitor() as monitor, client.client() as other:
        other.ping()
        operation()
        other.echo("over")
        seen: list[str] = []
        for told in monitor.listen():
            command = told["command"].split()[0].upper()
            if command == "PING":
                seen.clear()
            elif command == "ECHO":
                return seen
            elif lua or told["client_type"] != "lua":
                seen.append(command)
    raise AssertionError


def test_everything_of_one_key_lapses_and_lies_in_one_hash_slot(
    bench: Bench, client: redis.Redis, namespace: str
) -> None:
    bench.enqueue("d1")
    bench.start("d1", "h1")
    bench.of("until_executing").enqueue("d2")
    bench.of("until_expired").start("d3", guard=True)
    bench.end("d4", mark=10)
    bench.settle("d5")
    names = set(client.scan_iter(match=f"*{namespace}*"))
    bucket = f"{{{namespace}:{bench.key.digest[0]}}}:"
    assert {name for name in names if client.ttl(name) < 0} == {
        f"{bucket}index",
        f"{bucket}tasks",
        f"{bucket}hours:{bench.task}",
    }
    assert len({key_slot(name.encode()) for name in names}) == 1
    assert len(names) == 8


def test_hours_older_than_a_day_are_added_to_the_totals(
    bench: Bench, client: redis.Redis, namespace: str
) -> None:
    bench.start("d1", "h1")
    hours = f"{{{namespace}:{bench.key.digest[0]}}}:hours:{bench.task}"
    ((field, _),) = client.hgetall(hours).items()
    client.hdel(hours, field)
    client.hset(hours, f"{int(field.split(':')[0]) - 30}:granted", 7)
    assert bench.counters["granted"] == 7
    bench.of("while_executing").start("d1", "h1")
    bench.end("d1", "h1")
    bench.start("d2", "h2")
    assert client.hkeys(hours) == [field]
    assert bench.counters["granted"] == 8


def test_scripts_run_in_a_cluster(make: Make) -> None:
    with start_redis("--cluster-enabled", "yes") as server:
        with redis.Redis.from_url(server.url) as admin:
            admin.execute_command("CLUSTER ADDSLOTS", *range(16384))
            eventually(lambda: admin.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
        bench = Bench(make(server.url, socket_timeout=20))
        assert bench.enqueue("d1").granted
        assert bench.start("d1", "h1").answer == "granted"
        assert bench.renew("h1")
        assert bench.end("d1", "h1")
        assert bench.counters["released"] == 1


def test_forgotten_scripts_are_told_again(bench: Bench, client: redis.Redis) -> None:
    bench.start("d1", "h1")
    client.script_flush()
    assert bench.renew("h1")
    client.script_flush()
    assert bench.end("d1", "h1")
    client.script_flush()
    assert bench.counters["released"] == 1


def test_server_says_what_it_is(make: Make) -> None:
    with start_redis("--maxmemory-policy", "allkeys-lru") as server:
        store = make(server.url, socket_timeout=20)
        assert store.maxmemory_policy() == "allkeys-lru"
        assert re.fullmatch(r"(valkey|redis) \d+\.\d+\.\d+", store.server_version() or "")
        with redis.Redis.from_url(server.url) as admin:
            admin.execute_command("ACL SETUSER default -info")
        assert store.maxmemory_policy() is None
        assert store.server_version() is None


# --- lost replies -------------------------------------------------------------------------------------------


@pytest.fixture
def proxied(servers: Servers, make: Make, tcp_proxy: Callable[[str], TcpProxy]) -> tuple[Bench, TcpProxy]:
    proxy = tcp_proxy(servers.redis_url)
    return Bench(make(proxy.url, socket_timeout=20)), proxy


def test_lost_replies_are_asked_for_again(proxied: tuple[Bench, TcpProxy]) -> None:
    bench, proxy = proxied

    def losing_the_reply(operation: Callable[[], Any]) -> Any:
        proxy.drop_reply_to()
        answer = operation()
        assert proxy.dropped.is_set()
        return answer

    for operation in (lambda: bench.enqueue("d0"), lambda: bench.start("d0"), lambda: bench.renew("h0")):
        operation()  # now the scripts are known, and what is asked is carried out before the reply is lost
    assert bench.end("d0")
    before = bench.counters
    assert losing_the_reply(lambda: bench.enqueue("d1")).granted
    assert losing_the_reply(lambda: bench.start("d1", "h1")).answer == "granted"
    assert losing_the_reply(lambda: bench.renew("h1"))
    assert losing_the_reply(lambda: bench.end("d1", "h1", held=1.0))
    bench.enqueue("d2")
    bench.release("q", "d1")
    assert losing_the_reply(lambda: bench.release("q", "d2"))
    assert bench.counters - before == {
        "granted": 1,
        "renewed": 2,
        "released": 1,
        "hold_le_1": 1,
        "hold_sum_ms": 1000,
        "hold_max_ms": 1000,
    }


def test_second_sending_does_not_take_anothers_lease_for_its_own(proxied: tuple[Bench, TcpProxy]) -> None:
    bench, proxy = proxied
    bench.start("d1", "h1")
    proxy.drop_reply_to()
    assert not bench.end("d2", "h2")
    proxy.drop_reply_to()
    assert not bench.release("r", "h2")


def test_reply_lost_in_silence_is_asked_for_again_within_the_timeout(
    proxied: tuple[Bench, TcpProxy], make: Make
) -> None:
    _, proxy = proxied
    bench = Bench(make(proxy.url, socket_timeout=4))
    proxy.drop_replies()

    def repair() -> None:
        proxy.dropped.wait()
        proxy.resume()

    rescue = threading.Thread(target=repair)
    rescue.start()
    with takes_at_most(4):
        assert bench.enqueue("d1").granted
    rescue.join()


def test_refusal_reaches_who_asks_through_a_lossy_network(proxied: tuple[Bench, TcpProxy]) -> None:
    bench, proxy = proxied
    bench.enqueue("d1")
    proxy.drop_reply_to()
    assert not bench.enqueue("d2").granted


# --- outages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("database", [0, 1])
@pytest.mark.parametrize("connected", [True, False])
def test_frozen_server_costs_one_timeout(
    own_server: RedisServer, make: Make, connected: bool, database: int
) -> None:
    """Database 1 is selected when connecting, so there the handshake itself gets no answer."""
    bench = Bench(make(own_server.url.replace("/0", f"/{database}")))
    if connected:
        bench.enqueue("d1")
    own_server.pause()
    try:
        with takes_at_most(TIMEOUT), pytest.raises(StoreUnavailableError, match="redis is unavailable"):
            bench.enqueue("d1")
    finally:
        own_server.resume()


def test_killed_server_is_told_at_once_and_found_again(own_server: RedisServer, make: Make) -> None:
    bench = Bench(make(own_server.url))
    bench.enqueue("d1")
    own_server.kill()
    with takes_at_most(0), pytest.raises(StoreUnavailableError):
        bench.enqueue("d1")
    own_server.start()
    assert bench.store.renew([]) == []
    assert not bench.renew("h1")  # past the breaker, and its success closes it
    assert bench.enqueue("d2").granted


def test_outage_costs_a_process_one_timeout_not_one_for_every_call(
    own_server: RedisServer, make: Make
) -> None:
    now = [0.0]
    bench = Bench(make(own_server.url, clock=lambda: now[0] + time.monotonic()))
    bench.start("d1", "h1")
    own_server.pause()
    with takes_at_most(TIMEOUT):
        for _ in range(50):
            with pytest.raises(StoreUnavailableError):
                bench.enqueue("d1")
    own_server.resume()
    with pytest.raises(StoreUnavailableError, match="a moment ago"):
        bench.enqueue("d1")
    now[0] += 60
    assert not bench.enqueue("d1").granted


def test_renewal_passes_the_open_breaker(own_server: RedisServer, make: Make) -> None:
    bench = Bench(make(own_server.url))
    bench.start("d1", "h1")
    own_server.pause()
    with pytest.raises(StoreUnavailableError):
        bench.enqueue("d1")
    own_server.resume()
    assert bench.renew("h1")
    assert bench.end("d1", "h1")


def test_options_in_the_url_do_not_lengthen_the_timeout(own_server: RedisServer, make: Make) -> None:
    bench = Bench(make(f"{own_server.url}?socket_timeout=60&retry_on_timeout=yes&health_check_interval=1"))
    bench.enqueue("d1")
    own_server.pause()
    with takes_at_most(TIMEOUT), pytest.raises(StoreUnavailableError):
        bench.enqueue("d1")
    own_server.resume()


def test_interrupted_question_leaves_its_answer_to_nobody(own_server: RedisServer, make: Make) -> None:
    """A time limit strikes while an answer is awaited; what comes later answers no other question."""

    class TimeLimit(BaseException):
        pass

    def strike(*_: object) -> None:
        raise TimeLimit

    bench = Bench(make(own_server.url, socket_timeout=20))
    bench.start("d1", "h1")
    before = signal.signal(signal.SIGALRM, strike)
    own_server.pause()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(TimeLimit):
            bench.start("d2", "h2")
    finally:
        signal.signal(signal.SIGALRM, before)
        own_server.resume()
    assert bench.renew("h1")
    assert [hold.holder for hold in bench.store.look(bench.key.digest)] == ["h1"]


def test_full_server_refuses_new_leases_and_renews_old_ones(make: Make) -> None:
    with start_redis("--maxmemory-policy", "noeviction") as server:
        bench = Bench(make(server.url, socket_timeout=20))
        bench.start("d1", "h1")
        with redis.Redis.from_url(server.url) as admin:
            admin.config_set("maxmemory", 1)
            with pytest.raises(StoreUnavailableError, match="maxmemory"):
                bench.enqueue("d2", mode="successor", task_id="t2")
            assert bench.renew("h1", lease=600)
            assert bench.store.look(bench.key.digest)[0].left > 590
            assert bench.end("d1", "h1")
            assert bench.slot("r") is None


def test_refused_write_changes_nothing(make: Make) -> None:
    with start_redis("--maxmemory-policy", "noeviction") as server, redis.Redis.from_url(server.url) as admin:
        bench = Bench(make(server.url, socket_timeout=20))
        bench.enqueue("d1")
        admin.config_set("maxmemory", 1)
        with pytest.raises(StoreUnavailableError, match="maxmemory"):
            bench.start("d1", "h1")
        admin.config_set("maxmemory", 0)
        assert (bench.holder("q"), bench.holder("r")) == ("d1", None)
        assert bench.start("d1", "h1").answer == "granted"


def test_demoted_server_is_left(own_server: RedisServer, make: Make) -> None:
    with start_redis() as other, redis.Redis.from_url(own_server.url) as admin:
        bench = Bench(make(own_server.url, socket_timeout=20))
        bench.enqueue("d1")
        admin.replicaof("127.0.0.1", other.port)
        before = admin.info("stats")["total_connections_received"]
        with pytest.raises(StoreUnavailableError, match="read only replica"):
            bench.enqueue("d1")
        assert admin.info("stats")["total_connections_received"] == before + 1
        admin.replicaof("NO", "ONE")
        assert bench.enqueue("d1").granted


def test_problem_never_shows_the_password(make: Make) -> None:
    with start_redis() as server:
        with redis.Redis.from_url(server.url) as admin:
            admin.config_set("requirepass", "correct")
        bench = Bench(make(server.url.replace("redis://", "redis://:s3cret@"), socket_timeout=20))
        with pytest.raises(StoreUnavailableError) as caught:
            bench.enqueue("d1")
        assert "s3cret" not in str(caught.value)
        assert Bench(make(server.url.replace("redis://", "redis://:correct@"))).enqueue("d1").granted


# --- threads and forks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 8, 50])
def test_200_threads_on_one_key_are_granted_once(
    servers: Servers, make: Make, client: redis.Redis, size: int
) -> None:
    bench = Bench(make(servers.redis_url, max_connections=size, socket_timeout=20))
    before = client.info("stats")["total_connections_received"]
    together = threading.Barrier(200)

    def call(i: int) -> bool:
        together.wait()
        return bench.enqueue(f"d{i}").granted

    with ThreadPoolExecutor(200) as pool:
        assert sum(pool.map(call, range(200))) == 1
    assert bench.counters["suppressed"] == 199
    assert client.info("stats")["total_connections_received"] - before <= size


def test_a_hold_that_a_restart_has_lost_is_lost_and_not_released(own_server: RedisServer, make: Make) -> None:
    """A question on the closed connection would be sent twice, and to a second sending what is gone was freed (E2)."""
    bench = Bench(make(own_server.url))
    bench.start("d1", "h1")
    with redis.Redis.from_url(own_server.url) as other:
        other.flushall()
        other.client_kill_filter(_type="normal", skipme=True)
    assert not bench.end("d1", "h1")


def test_starved_threads_do_not_open_the_breaker(own_server: RedisServer, make: Make) -> None:
    """That all connections are busy says nothing about the server."""
    store = make(own_server.url, max_connections=1, socket_timeout=2)
    store.stats()
    own_server.pause()
    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(store.stats) for _ in range(2)]
        (starved,), (connected,) = wait(asking, return_when=FIRST_COMPLETED)
        own_server.resume()
        with pytest.raises(StoreUnavailableError, match="No connection available"):
            starved.result()
        assert connected.result() == {}
    assert store.stats() == {}


@forks_on_purpose
def test_fork_while_threads_are_asking(servers: Servers, make: Make) -> None:
    bench = Bench(make(servers.redis_url, max_connections=4, socket_timeout=20))
    over = threading.Event()
    bench.enqueue("parent")

    def ask() -> int:
        asked = 0
        while not over.is_set():
            bench.enqueue("parent")
            asked += 1
        return asked

    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask) for _ in range(8)]
        statuses = [in_child(lambda: bench.enqueue("child").by is not None) for _ in range(10)]
        over.set()
    assert statuses == [0] * 10
    assert all(each.result() for each in asking)


@forks_on_purpose
def test_child_forked_in_an_outage_asks_for_itself(own_server: RedisServer, make: Make) -> None:
    bench = Bench(make(own_server.url))
    own_server.pause()
    with pytest.raises(StoreUnavailableError):
        bench.enqueue("d1")
    own_server.resume()
    assert in_child(lambda: bench.enqueue("d1").granted) == 0
    with pytest.raises(StoreUnavailableError, match="a moment ago"):
        bench.enqueue("d1")


def in_child(true: Callable[[], bool]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if true() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# --- values that are not ours -------------------------------------------------------------------------------

GARBAGE = [
    "",
    "garbage",
    "a|b|c",
    "||||||||",
    "d1|t1|not a number|task|text",
    "h1|t1|d1|not a number|w|task|text",
    f"d1|t1|{'9' * 5000}|task|text",
    f"h1|t1|d1|{'9' * 5000}|w|task|text",
    b"\xff\xfe|\x00|\x80",
]


@pytest.fixture
def place(client: redis.Redis, namespace: str, bench: Bench) -> Callable[[str], str]:
    return lambda slot: f"{{{namespace}:{bench.key.digest[0]}}}:{slot}:{bench.key.digest}"


@pytest.mark.parametrize("value", GARBAGE)
def test_strange_value_holds_the_key_until_a_person_releases_it(
    bench: Bench, client: redis.Redis, place: Callable[[str], str], value: str | bytes
) -> None:
    for slot in ("q", "r"):
        client.set(place(slot), value)
    assert not bench.enqueue("d1").granted
    assert bench.start("d1", "h1", task_id="t1").answer == "busy"
    assert bench.renew("h1") == str(value).startswith(
        "h1|"
    )  # renewal looks no further than at a holder's own id
    assert not bench.end("d1", "h1", task_id="t1")
    assert not bench.release("q", "d1")
    for hold in bench.store.look(bench.key.digest):
        assert re.fullmatch(r"\?[0-9a-f]{40}", hold.holder)
        assert (hold.task_id, hold.delivery, hold.since) == ("", hold.holder * (hold.slot == "q"), 0.0)
        assert bench.release(hold.slot, hold.holder)
    assert bench.enqueue("d1").granted


def test_key_of_another_type_holds_the_key_too(
    bench: Bench, client: redis.Redis, place: Callable[[str], str]
) -> None:
    client.rpush(place("q"), "a", "list")
    client.sadd(place("r"), "a set")
    assert not bench.enqueue("d1").granted
    assert bench.start("d1", "h1").answer == "busy"
    assert not bench.end("d1", "h1")
    assert all(bench.release(hold.slot, hold.holder) for hold in bench.store.look(bench.key.digest))
    assert bench.enqueue("d1").granted


def test_hold_without_a_ttl_is_given_one(
    bench: Bench, client: redis.Redis, place: Callable[[str], str]
) -> None:
    client.set(place("r"), "set by hand")
    assert bench.start("d1", lease=30).wait == pytest.approx(30, abs=5)
    assert 0 < client.pttl(place("r")) <= 30_000


def test_retry_does_not_take_over_a_strange_value(
    bench: Bench, client: redis.Redis, place: Callable[[str], str]
) -> None:
    client.set(place("q"), "garbage")
    assert bench.enqueue("d1", mode="successor").granted
    assert client.get(place("q")) == "garbage"


def test_bookkeeping_of_another_type_fails_no_operation(
    bench: Bench, client: redis.Redis, namespace: str
) -> None:
    bucket = f"{{{namespace}:{bench.key.digest[0]}}}:"
    for name in ("index", "tasks", f"stats:{bench.task}", f"hours:{bench.task}"):
        client.set(f"{bucket}{name}", "not ours")
    assert bench.enqueue("d1").granted
    assert bench.start("d1", "h1").answer == "granted"
    assert bench.renew("h1")
    assert bench.end("d1", "h1", held=1.0, counter="replayed")
    assert bench.release("q", "d1") is False


def test_strange_members_of_the_index_are_swept(bench: Bench, client: redis.Redis, namespace: str) -> None:
    index = f"{{{namespace}:{bench.key.digest[0]}}}:index"
    strange: dict[Any, float] = {f"strange {i}": i for i in range(20)}
    client.zadd(index, strange | {b"\xff": 1e15, "q|x|y": 1e15})
    assert list(bench.store.holds()) == []
    assert bench.enqueue("d1").granted
    assert [hold.holder for hold in bench.store.holds()] == ["d1"]
