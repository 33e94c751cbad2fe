"""What the doctor finds: each finding by its id, and nothing where the same is just right."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from celery import Celery

from celery_once_fenced import FencedTask, Once, SingletonTask, config
from celery_once_fenced.doctor import Finding, also, at_start, examine, examine_all, log_findings
from celery_once_fenced.doctor import servers as rules
from celery_once_fenced.doctor.finding import named
from celery_once_fenced.doctor.servers import Clock, LeaseFacts
from celery_once_fenced.errors import ConfigError
from celery_once_fenced.keys import Key, new_id
from celery_once_fenced.policy import SPANS
from celery_once_fenced.runtime import runtime_of
from celery_once_fenced.stores import End, Start
from celery_once_fenced.stores.observations import LedgerFacts
from celery_once_fenced.stores.postgres import schema_sql
from example_project.servers import RedisServer, start_redis

BROKER = "redis://127.0.0.1:1/0"
HOUR = 3600
CORRECT = Once(replay_for=0)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with start_redis() as started:
        yield started


@pytest.fixture(autouse=True)
def no_django_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether Django was set up by another test is no matter here."""
    monkeypatch.setattr("celery_once_fenced.runtime._database_factory", None)
    monkeypatch.setattr("celery_once_fenced.doctor._others", [])
    monkeypatch.setattr("celery._state._on_app_finalizers", set())  # nor are the shared tasks of others


@pytest.fixture
def app(server: RedisServer, namespace: str) -> Iterator[Celery]:
    with Celery("examined", broker=BROKER, backend="cache+memory://", set_as_current=False) as app:
        app.conf.once_fenced = {"redis_url": server.url, "namespace": namespace}
        yield app
        if not config.problems(app.conf.once_fenced):
            runtime_of(app).close()


@pytest.fixture
def fenced(app: Celery, postgres_url: str) -> Celery:
    """The same with a database that has the schema."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(schema_sql().encode())
    app.conf.once_fenced = {**app.conf.once_fenced, "postgres_url": postgres_url}
    return app


def nothing() -> None: ...


def task(app: Celery, name: str = "shop.feed", *, once: Once | None = None, **options: Any) -> Any:
    base = FencedTask if once is CORRECT else SingletonTask
    return app.task(name=name, base=base, once=once or Once(), shared=False, **options)(nothing)


def found(app: Celery) -> set[str]:
    return {finding.id for finding in examine(app)}


def the(app: Celery) -> Finding:
    (finding,) = examine(app)
    return finding


def set_policy(app: Celery, policy: str) -> None:
    import redis

    with redis.Redis.from_url(app.conf.once_fenced["redis_url"]) as client:
        client.config_set("maxmemory-policy", policy)


# --- nothing, and everything ------------------------------------------------------------------------------------------


def test_nothing_is_found_where_nothing_is_wrong(fenced: Celery) -> None:
    task(fenced)
    task(fenced, "shop.post", once=CORRECT, time_limit=600)
    assert found(fenced) == set()


def test_all_that_is_wrong_is_found_at_once(fenced: Celery) -> None:
    fenced.conf.update(result_backend=None, broker_transport_options={"visibility_timeout": 50})
    fenced.backend_cls = None
    fenced.conf.once_fenced = {**fenced.conf.once_fenced, "tasks": {"shop.fed": {"lease": 5}}}
    task(fenced, acks_late=True)
    assert found(fenced) == {"W020", "W022", "W027", "W028"}


def test_a_finding_says_what_to_do() -> None:
    finding = Finding("W020", "a is wrong", "do b")
    assert (finding.level, str(finding)) == ("warning", "W020 a is wrong: do b")
    assert Finding("E020", "", "").level == "error"
    assert named(list("abcdefgh")) == "a, b, c, d, e and 3 more"


# --- settings and tasks -----------------------------------------------------------------------------------------------


def test_wrong_settings_are_errors_one_by_one(app: Celery) -> None:
    app.conf.once_fenced = {**app.conf.once_fenced, "namspace": "x", "socket_timeout": "soon"}
    assert [(finding.id, finding.level) for finding in examine(app)] == [("E001", "error")] * 2


def test_options_that_do_not_go_together_are_an_error(app: Celery) -> None:
    app.conf.once_fenced = {**app.conf.once_fenced, "tasks": {"shop.feed": {"tier": "correctness"}}}
    task(app)
    assert the(app).id == "E008"
    assert "replay_for" in the_text(app)


def the_text(app: Celery) -> str:
    return " ".join(finding.text for finding in examine(app))


def test_settings_for_a_task_that_does_not_exist_are_a_warning(app: Celery) -> None:
    app.conf.once_fenced = {**app.conf.once_fenced, "tasks": {"shop.tasks.post_entri": {"lease": 5}}}
    task(app, "shop.tasks.post_entry")
    assert the(app).id == "W020"
    assert "did you mean 'shop.tasks.post_entry'" in the(app).text


def test_a_task_in_a_beat_schedule_that_raises_on_duplicates_is_a_warning(app: Celery) -> None:
    task(app, "nightly", once=Once(on_duplicate="raise"))
    task(app, "hourly")
    app.conf.beat_schedule = {name: {"task": name, "schedule": 60} for name in ("nightly", "hourly")}
    assert the(app).id == "W021"
    assert "'nightly'" in the(app).text


@pytest.mark.parametrize("attribute", ["acks_late", "reject_on_worker_lost"])
def test_a_task_of_the_correctness_tier_that_was_made_to_forget_is_an_error(
    fenced: Celery, attribute: str
) -> None:
    made = task(fenced, once=CORRECT)
    assert found(fenced) == set()
    setattr(type(fenced.tasks[made.name]), attribute, False)
    assert "E028" in found(fenced)


Wrong = Callable[[Celery], Any]
visible = {"visibility_timeout": 100}
DECLARED: dict[str, tuple[Wrong, Wrong]] = {
    "W022": (
        lambda app: task(app, acks_late=True, reject_on_worker_lost=True, once=Once(lease=101)),
        lambda app: task(app, acks_late=True, reject_on_worker_lost=True, once=Once(lease=100)),
    ),
    "W023": (
        lambda app: task(app, acks_late=True, reject_on_worker_lost=True, time_limit=101),
        lambda app: task(app, acks_late=True, reject_on_worker_lost=True, time_limit=100),
    ),
    "W024": (
        lambda app: task(app, time_limit=100, once=Once(max_hold=99)),
        lambda app: task(app, time_limit=100, once=Once(max_hold=100)),
    ),
    "W025": (
        lambda app: task(app, time_limit=90, once=Once(lease=91)),
        lambda app: task(app, time_limit=30, once=Once(lease=60)),
    ),
    "W028": (
        lambda app: task(app, acks_late=True),
        lambda app: task(app, acks_late=True, reject_on_worker_lost=True),
    ),
}


@pytest.mark.parametrize("wanted", DECLARED)
def test_a_task_that_does_not_fit_its_app_is_a_warning(app: Celery, wanted: str) -> None:
    app.conf.broker_transport_options = visible
    wrong, _ = DECLARED[wanted]
    wrong(app)
    assert (the(app).id, "shop.feed" in the(app).text) == (wanted, True)


@pytest.mark.parametrize("wanted", DECLARED)
def test_one_that_just_fits_is_none(app: Celery, wanted: str) -> None:
    app.conf.broker_transport_options = visible
    _, right = DECLARED[wanted]
    right(app)
    assert found(app) == set()


def test_the_time_limit_of_the_app_counts_too(app: Celery) -> None:
    app.conf.task_time_limit = 100
    task(app, once=Once(max_hold=99))
    assert the(app).id == "W024"


def test_a_message_acknowledged_early_is_not_delivered_again(app: Celery) -> None:
    app.conf.broker_transport_options = visible
    task(app, once=Once(lease=101))
    assert found(app) == set()


def test_a_broker_that_never_delivers_again_by_time_has_no_such_timeout(app: Celery) -> None:
    app.conf.broker_url = app.conf.broker_read_url = "amqp://127.0.0.1:1//"
    task(app, acks_late=True, reject_on_worker_lost=True, once=Once(lease=HOUR + 1))
    assert found(app) == set()


@pytest.mark.parametrize(("window", "wanted"), [(99, {"W026"}), (100, set()), (None, set())])
def test_a_redelivery_window_shorter_than_the_visibility_timeout_is_a_warning(
    app: Celery, window: float | None, wanted: set[str]
) -> None:
    app.conf.broker_transport_options = visible
    app.conf.once_fenced = {**app.conf.once_fenced, "redelivery_window": window}
    task(app, acks_late=True, reject_on_worker_lost=True)
    assert found(app) == wanted


@pytest.mark.parametrize(
    ("once", "options", "wanted"),
    [
        (Once(), {}, {"W027"}),
        (Once(on_duplicate="raise"), {}, set()),
        (Once(), {"ignore_result": True}, set()),
    ],
)
def test_a_duplicate_needs_a_result_backend_to_read_the_holders_result(
    app: Celery, once: Once, options: dict[str, Any], wanted: set[str]
) -> None:
    app.backend_cls = app.conf.result_backend = None
    task(app, once=once, **options)
    assert found(app) == wanted


# --- servers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_server_that_evicts_leases_is_an_error(app: Celery, policy: str) -> None:
    set_policy(app, policy)
    finding = the(app)
    set_policy(app, "noeviction")
    assert (finding.id, policy in finding.text) == ("E020", True)


@pytest.mark.parametrize(
    ("version", "wanted"),
    [
        ("redis 6.0.16", ["E021"]),
        ("redis 6.2.0", []),
        ("redis 8.0.1", []),
        ("valkey 7.0.9", ["E021"]),
        ("valkey 7.2.5", []),
        ("dragonfly 1.0", []),  # nobody knows, and the scripts will tell
        (None, []),
    ],
)
def test_a_server_that_is_too_old_is_an_error(version: str | None, wanted: list[str]) -> None:
    assert [finding.id for finding in rules.of_redis(LeaseFacts(version, "noeviction"))] == wanted


def test_a_redis_that_does_not_answer_is_an_error(app: Celery) -> None:
    app.conf.once_fenced = {"redis_url": "redis://127.0.0.1:1/0"}
    assert the(app).id == "E022"


def facts(**changes: Any) -> LedgerFacts:
    return LedgerFacts(**{"version": 150004, "clock": 0.0, "standby": False, **changes})


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, []),
        ({"version": 140000}, []),
        ({"version": 130099}, ["E023"]),
        ({"standby": True}, ["E025"]),
        ({"missing": ("once_fenced_claim_v1",)}, ["E026"]),
        ({"stale": ("once_fenced_claim_v1",)}, ["W031"]),
    ],
)
def test_a_database_that_cannot_be_fenced_is_an_error(changes: dict[str, Any], wanted: list[str]) -> None:
    assert [finding.id for finding in rules.of_postgres(facts(**changes))] == wanted


def test_a_database_that_does_not_answer_is_an_error(app: Celery) -> None:
    app.conf.once_fenced = {**app.conf.once_fenced, "postgres_url": "postgresql://127.0.0.1:1/none"}
    assert the(app).id == "E024"


def test_an_alias_that_cannot_be_fenced_is_an_error(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    class NotPostgres:
        alias = "files"

        def conninfo(self) -> dict[str, Any]:
            raise ConfigError("fencing needs PostgreSQL, but the alias 'files' is sqlite")

    monkeypatch.setattr("celery_once_fenced.runtime._database_factory", lambda _alias: NotPostgres())
    assert (the(app).id, "sqlite" in the(app).text) == ("E003", True)


def test_a_database_without_the_schema_is_an_error_and_with_an_old_one_a_warning(
    app: Celery, postgres_url: str
) -> None:
    app.conf.once_fenced = {**app.conf.once_fenced, "postgres_url": postgres_url}
    assert the(app).id == "E026"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(schema_sql().encode())
        assert found(app) == set()
        connection.execute(
            "create or replace function once_fenced_timeline_v1() returns bigint language plpgsql stable"
            " set search_path from current as $$ begin return 0; end $$"
        )
    assert (the(app).id, "once_fenced_timeline_v1" in the(app).text) == ("W031", True)


@pytest.mark.parametrize(
    ("redis", "postgres", "wanted"),
    [
        (Clock(0.0, 0.1), Clock(0.9, 0.1), []),
        (Clock(0.0, 0.1), Clock(1.3, 0.1), ["W029"]),
        (Clock(5.0, 0.1), Clock(0.0, 0.1), ["W029"]),
        (Clock(5.0, 3.0), Clock(0.0, 3.0), []),  # the answers took too long to tell
        (Clock(7.0, 0.1), Clock(7.0, 0.1), []),  # it is this machine that goes wrong
    ],
)
def test_clocks_that_differ_are_a_warning(redis: Clock, postgres: Clock, wanted: list[str]) -> None:
    found = list(rules.apart(redis, postgres))
    assert [finding.id for finding in found] == wanted
    assert all(("ahead of" in finding.text) is (redis.ahead > postgres.ahead) for finding in found)


def test_the_clocks_of_both_servers_are_read(fenced: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    store = runtime_of(fenced).leases
    clock = store.server_clock  # type: ignore[attr-defined]
    monkeypatch.setattr(type(store), "server_clock", lambda _self: clock() + 90)
    assert (the(fenced).id, "1 min 30 s ahead" in the(fenced).text) == ("W029", True)


# --- holds ------------------------------------------------------------------------------------------------------------


def test_a_hold_that_lasts_too_long_is_a_warning(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    leases, key, span = runtime_of(app).leases, Key("ab" * 32, "shop.feed:7"), SPANS["until_executed"]
    for ended in [True] * 20 + [False]:
        holder = new_id()
        leases.start(
            Start(key, "shop.feed", span, key.digest, "d", holder, "t1", "w@host", 60.0, redelivery=False)
        )
        if ended:
            leases.end(End(key, "shop.feed", key.digest, "d", holder, "t1", held=0.1))
    assert found(app) == set()
    import time

    later = time.time() + 59
    monkeypatch.setattr("celery_once_fenced.audit.time.time", lambda: later)
    assert (the(app).id, "shop.feed:7" in the(app).text) == ("W030", True)


# --- who asks ---------------------------------------------------------------------------------------------------------


def test_a_worker_that_starts_asks_no_database(app: Celery) -> None:
    app.conf.once_fenced = {**app.conf.once_fenced, "postgres_url": "postgresql://127.0.0.1:1/none"}
    assert list(at_start(app)) == []
    assert list(examine(app, database=False)) == []


def test_what_is_found_at_the_start_is_logged_with_the_remedy(
    app: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    set_policy(app, "allkeys-lru")
    task(app, acks_late=True)
    log_findings(app)
    set_policy(app, "noeviction")
    logged = [(record.levelno, record.getMessage()[:4]) for record in caplog.records]
    assert logged == [(logging.WARNING, "W028"), (logging.ERROR, "E020")]
    assert "set maxmemory-policy noeviction" in caplog.text


def test_an_app_without_the_setting_is_told_when_its_tasks_need_it(caplog: pytest.LogCaptureFixture) -> None:
    with Celery("bare", broker="memory://", set_as_current=False) as app:
        log_findings(app)
        assert caplog.records == []
        task(app)
        log_findings(app)
    assert "no setting once_fenced" in caplog.text


def test_others_are_asked_too_and_say_nothing_twice(app: Celery) -> None:
    task(app, acks_late=True)
    also(lambda _found: [Finding("W028", "again", "no"), Finding("W010", "a model", "move it")])
    assert [finding.id for finding in examine_all(app)] == ["W028", "W010"]
