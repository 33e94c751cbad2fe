"""The metrics, as Prometheus gets them: what they are called, what they say, who may read them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from celery import Celery, signals
from django.contrib.auth.models import Permission, User
from django.http import HttpResponse
from django.test import Client, RequestFactory, override_settings
from django.urls import path
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from celery_once_fenced import Once, SingletonTask
from celery_once_fenced.events import Event, observing
from celery_once_fenced.keys import Key, new_id
from celery_once_fenced.observers.prometheus import OnceCollector, exposition
from celery_once_fenced.policy import SPANS
from celery_once_fenced.runtime import Runtime, runtime_of
from celery_once_fenced.stores import End, Enqueue, Start
from celery_once_fenced.stores.counters import COUNTERS
from celery_once_fenced.stores.postgres import schema_sql
from django_celery_once_fenced.views import MetricsView, bearer

KEY = Key("ab" * 32, "shop.feed:secret-argument")
NAME = re.compile(r"once_fenced_[a-z0-9_]+")
UNITS = ("_seconds", "_total", "_up", "_holds", "_entries", "_messages", "_rows")
NOW_HERE = "redis://127.0.0.1:1/0"


@pytest.fixture(autouse=True)
def no_django_database(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "shop" not in request.fixturenames:
        monkeypatch.setattr("celery_once_fenced.runtime._database_factory", None)
        monkeypatch.setattr(
            "celery._state._on_app_finalizers", set()
        )  # the shared tasks of others are no matter here


@pytest.fixture
def app(redis_url: str, namespace: str, postgres_url: str) -> Iterator[Celery]:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(schema_sql().encode())
    with made(redis_url=redis_url, namespace=namespace, postgres_url=postgres_url) as app:
        yield app
        runtime_of(app).close()


def made(**once_fenced: Any) -> Celery:
    app = Celery("measured", broker="memory://", set_as_current=False)
    app.conf.once_fenced = once_fenced
    app.task(name="shop.feed", base=SingletonTask, once=Once(lease=30), shared=False)(nothing)
    return app


def nothing() -> None: ...


def start(runtime: Runtime, task_id: str = "t1") -> str:
    holder = new_id()
    span = SPANS["until_executed"]
    runtime.leases.start(
        Start(KEY, "shop.feed", span, KEY.digest, new_id(), holder, task_id, "w@host", 60.0, redelivery=False)
    )
    return holder


def run(runtime: Runtime, seconds: float) -> None:
    holder = start(runtime)
    runtime.leases.end(End(KEY, "shop.feed", KEY.digest, "d", holder, "t1", held=seconds))


def scrape(app: Celery, accept: str = "") -> dict[tuple[str, ...], float]:
    """Samples by name and label values, these in the order of the labels' names."""
    text, _ = exposition(lambda: runtime_of(app), accept)
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


# --- what they say ----------------------------------------------------------------------------------------------------


def test_what_the_stores_counted_is_what_is_shown(app: Celery) -> None:
    runtime = runtime_of(app)
    run(runtime, 0.2)
    run(runtime, 3.0)
    start(runtime)
    start(runtime, "t2")  # busy
    for _ in range(2):
        runtime.leases.enqueue(Enqueue(KEY, "shop.feed", SPANS["until_executed"], new_id(), "t2", 60.0))
    found = scrape(app)
    assert found["once_fenced_granted_total", "shop.feed"] == 3
    assert found["once_fenced_released_total", "shop.feed"] == 2
    assert found["once_fenced_busy_total", "shop.feed"] == 1
    assert found["once_fenced_suppressed_total", "shop.feed"] == 2
    assert found["once_fenced_lost_total", "shop.feed"] == 0
    assert found["once_fenced_holds", "running", "shop.feed"] == 1
    assert found["once_fenced_holds", "queued", "shop.feed"] == 0
    assert found["once_fenced_lease_seconds", "shop.feed"] == 30
    assert found["once_fenced_longest_run_seconds", "shop.feed"] == 3
    assert found["once_fenced_up", "redis"] == found["once_fenced_up", "postgres"] == 1


def test_tasks_come_in_the_same_order_at_every_scrape(app: Celery) -> None:
    """However they were registered."""
    for name in ("shop.post", "shop.alpha", "shop.zeta"):
        app.task(name=name, base=SingletonTask, once=Once(lease=30), shared=False)(nothing)
    text = exposition(lambda: runtime_of(app))[0].decode()
    leases = re.findall(r'once_fenced_lease_seconds\{task="([^"]+)"', text)
    assert leases == ["shop.alpha", "shop.feed", "shop.post", "shop.zeta"]


def test_a_key_that_refuses_again_and_again_is_counted(app: Celery) -> None:
    start(runtime_of(app))
    for calls, wanted in ((9, 0), (1, 1), (89, 1), (1, 2)):  # the tenth in a row, the hundredth
        for _ in range(calls):
            ask = Enqueue(KEY, "shop.feed", SPANS["until_executed"], new_id(), "t2", 60.0)
            assert not runtime_of(app).leases.enqueue(ask).granted
        assert scrape(app)["once_fenced_repeated_total", "shop.feed"] == wanted


def test_runs_are_a_cumulative_histogram(app: Celery) -> None:
    for seconds in (0.004, 0.2, 0.21, 100_000.0):
        run(runtime_of(app), seconds)
    found = scrape(app)
    buckets = [
        found["once_fenced_hold_seconds_bucket", le, "shop.feed"]
        for le in ("0.01", "0.25", "86400.0", "+Inf")
    ]
    assert buckets == [1, 3, 3, 4]
    assert found["once_fenced_hold_seconds_count", "shop.feed"] == 4
    assert found["once_fenced_hold_seconds_sum", "shop.feed"] == pytest.approx(100_000.414)


def test_a_hold_that_lasts_too_long_is_counted(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(20):
        run(runtime_of(app), 0.01)
    start(runtime_of(app))
    assert scrape(app)["once_fenced_overdue_holds", "shop.feed"] == 0
    import time

    later = time.time() + 50
    monkeypatch.setattr("celery_once_fenced.figures.time.time", lambda: later)
    told: list[Event] = []
    with observing(told.append):
        found = scrape(app)
        scrape(app)
    assert [(event.name, event.fields["key"]) for event in told] == [("lease.overstayed", KEY.digest)]
    assert found["once_fenced_overdue_holds", "shop.feed"] == 1
    assert 50 <= found["once_fenced_oldest_hold_seconds", "shop.feed"] < 60


def test_what_is_in_doubt_and_unpublished_comes_from_the_ledger(app: Celery, postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(
            "insert into once_fenced_ledger (key_digest, key, scope, task_name, state, attempt, holder, resource, token)"
            " values (sha256('k'), 'k', 's', 'shop.charge', 'in_doubt', 1, 'h', 'r', 1)"
        )
        connection.execute(
            "insert into once_fenced_outbox (namespace, key_digest, task_id, message) values ('n', 'd', 't', 'm')"
        )
        connection.execute("analyze once_fenced_ledger")
    found = scrape(app)
    assert found["once_fenced_in_doubt_entries", "shop.charge"] == 1
    assert found["once_fenced_unpublished_messages",] == 1
    assert found["once_fenced_oldest_unpublished_message_seconds",] < 60
    assert found["once_fenced_table_rows", "ledger"] == 1


@pytest.mark.parametrize(
    ("store", "settings"),
    [("redis", {"redis_url": NOW_HERE}), ("postgres", {"postgres_url": "postgresql://127.0.0.1:1/none"})],
)
def test_a_store_that_does_not_answer_is_down_and_the_other_is_told(
    app: Celery, store: str, settings: dict[str, str]
) -> None:
    run(runtime_of(app), 0.2)
    with made(**{**app.conf.once_fenced, **settings}) as other:
        found = scrape(other)
        runtime_of(other).close()
    (up,) = {"redis", "postgres"} - {store}
    assert (found["once_fenced_up", store], found["once_fenced_up", up]) == (0, 1)
    assert (("once_fenced_granted_total", "shop.feed") in found) is (store == "postgres")
    assert (("once_fenced_unpublished_messages",) in found) is (store == "redis")


def test_tasks_are_imported_once_before_their_leases_are_told(app: Celery) -> None:
    imported: list[Celery] = []

    def importing(sender: Celery, **_: Any) -> None:
        imported.append(sender)

    signals.import_modules.connect(importing)
    scrape(app)
    scrape(app)
    assert imported == [app]


# --- how they are named -----------------------------------------------------------------------------------------------


def test_no_label_holds_a_key_or_a_resource(app: Celery) -> None:
    start(runtime_of(app))
    text, _ = exposition(lambda: runtime_of(app))
    assert "secret-argument" not in text.decode()
    assert KEY.digest not in text.decode()
    labels = {
        label
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        for label in sample.labels
    }
    assert labels <= {"task", "slot", "store", "table", "le"}


def test_every_metric_has_help_a_type_and_a_unit_or_a_noun_of_what_is_counted() -> None:
    families = list(OnceCollector(lambda: pytest.fail("describing asks nobody")).describe())
    for family in families:
        assert family.documentation
        assert NAME.fullmatch(family.name)
        full = f"{family.name}_total" if family.type == "counter" else family.name
        assert full.endswith(UNITS), full
    counters = {family.name.removeprefix("once_fenced_") for family in families if family.type == "counter"}
    assert counters == set(COUNTERS)


def test_registering_needs_no_server() -> None:
    CollectorRegistry(auto_describe=True).register(OnceCollector(lambda: pytest.fail("nobody is asked")))


def test_what_is_described_is_what_is_collected(app: Celery) -> None:
    collector = OnceCollector(lambda: runtime_of(app))
    told = [
        [(f.name, f.type, f.documentation) for f in found]
        for found in (collector.describe(), collector.collect())
    ]
    assert told[0] == told[1]


def test_openmetrics_is_given_to_whom_asks_for_it(app: Celery) -> None:
    run(runtime_of(app), 0.2)
    text, content_type = exposition(lambda: runtime_of(app), "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    names = {family.name for family in openmetrics.text_string_to_metric_families(text.decode())}
    assert "once_fenced_granted" in names
    plain, content_type = exposition(lambda: runtime_of(app), "text/html")
    assert content_type.startswith("text/plain")
    assert b"# TYPE once_fenced_granted_total counter" in plain


# --- the page ---------------------------------------------------------------------------------------------------------

TOKEN = "s3cret"
urlpatterns = [
    path("metrics", MetricsView.as_view()),
    path("with-token", MetricsView.as_view(allow=bearer(TOKEN))),
]


@pytest.fixture
def client(shop: str, redis_url: str) -> Iterator[Client]:
    from example_project.celery_app import app

    changed = replace(runtime_of(app).settings, redis_url=redis_url)
    runtime = runtime_of(app)
    kept, runtime.settings = runtime.settings, changed
    runtime.close()
    with override_settings(ROOT_URLCONF=__name__):
        yield Client()
    runtime.close()
    runtime.settings = kept


def user(name: str, *permissions: str, **flags: bool) -> User:
    User.objects.filter(username=name).delete()
    made = User.objects.create_user(name, **flags)
    made.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    return made


@pytest.mark.parametrize(
    ("name", "permissions", "flags", "status"),
    [
        ("root", (), {"is_staff": True, "is_superuser": True}, 200),
        ("viewer", ("view_heldlock",), {"is_staff": True}, 200),
        ("staff", (), {"is_staff": True}, 403),
        ("customer", ("view_heldlock",), {"is_staff": False}, 403),
    ],
)
def test_without_a_rule_of_ones_own_only_staff_who_may_view_locks_read_them(
    client: Client, name: str, permissions: tuple[str, ...], flags: dict[str, bool], status: int
) -> None:
    assert client.get("/metrics").status_code == 403
    client.force_login(user(name, *permissions, **flags))
    assert client.get("/metrics").status_code == status


def test_a_scrape_shows_a_token(client: Client) -> None:
    answer: HttpResponse = client.get("/with-token", headers={"Authorization": f"Bearer {TOKEN}"})  # type: ignore[assignment]
    assert answer.status_code == 200
    assert answer["Content-Type"].startswith("text/plain")
    assert "no-store" in answer["Cache-Control"]
    assert b'once_fenced_up{store="postgres"} 1.0' in answer.content
    for scheme in ("bearer", "BEARER"):
        assert client.get("/with-token", headers={"Authorization": f"{scheme} {TOKEN}"}).status_code == 200
    for header in (
        "",
        "Bearer ",
        "Bearer",
        TOKEN,
        f"Bearer{TOKEN}",
        "Bearer wrong",
        f"Basic {TOKEN}",
        f"Bearer {TOKEN}ü",
    ):
        assert client.get("/with-token", headers={"Authorization": header}).status_code == 403


def test_a_token_that_is_not_set_does_not_open_the_page() -> None:
    with pytest.raises(ValueError, match="empty"):
        bearer("")


def test_the_page_is_only_read(client: Client) -> None:
    assert client.post("/with-token", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 405


def test_without_users_nobody_is_let_in() -> None:
    from django.core.exceptions import PermissionDenied

    with pytest.raises(PermissionDenied):
        MetricsView.as_view()(RequestFactory().get("/metrics"))
