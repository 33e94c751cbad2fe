"""What ``once`` counts, judges and examines: stats, audit, metrics, doctor; and what all commands have in common."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click
import psycopg
import pytest
from celery import Celery, _state
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result

from celery_once_fenced import FencedTask, Once, SingletonTask
from celery_once_fenced.cli import Exit, once, output
from celery_once_fenced.cli.output import Duration, print_table
from celery_once_fenced.keys import Key, new_id
from celery_once_fenced.policy import SPANS
from celery_once_fenced.runtime import runtime_of
from celery_once_fenced.stores import EffectStart, End, Enqueue, Start
from celery_once_fenced.stores.postgres import schema_sql
from tests.fixtures.ledger import Ledger, claim_of, operation

KEY = Key("ab" * 32, "shop.feed:7")


@pytest.fixture(autouse=True)
def no_django(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether Django was set up by another test is no matter here."""
    monkeypatch.setattr("celery_once_fenced.runtime._database_factory", None)
    monkeypatch.setattr("celery_once_fenced.doctor._others", [])
    monkeypatch.setattr("celery._state._on_app_finalizers", set())  # nor are the shared tasks of others


@pytest.fixture
def ledger(postgres_url: str) -> Iterator[Ledger]:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(schema_sql().encode())
    found = Ledger(postgres_url)
    yield found
    found.store.close()


@pytest.fixture
def app(redis_url: str, namespace: str, ledger: Ledger) -> Iterator[Celery]:
    with made(redis_url=redis_url, namespace=namespace, postgres_url=ledger.url) as app:
        yield app
        runtime_of(app).close()


def made(**once_fenced: Any) -> Celery:
    app = Celery("figures", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.once_fenced = once_fenced
    feed = Once(lease=600, double_run="fetched twice")
    app.task(name="shop.feed", base=SingletonTask, once=feed, time_limit=600, shared=False)(nothing)
    post = Once(replay_for=0, resource="account:{account_id}")
    app.task(name="shop.post", base=FencedTask, once=post, shared=False)(one_argument)
    return app


def nothing() -> None: ...
def one_argument(account_id: int) -> None: ...


def ran(app: Celery, seconds: float, times: int = 1, *, left_running: bool = False) -> None:
    leases, span = runtime_of(app).leases, SPANS["until_executed"]
    for ended in [True] * times + [False] * left_running:
        holder = new_id()
        leases.start(
            Start(KEY, "shop.feed", span, KEY.digest, "d", holder, "t1", "w@host", 60.0, redelivery=False)
        )
        if ended:
            leases.end(End(KEY, "shop.feed", KEY.digest, "d", holder, "t1", held=seconds))


def run(app: Celery, *arguments: str) -> Result:
    before = _state._tls.current_app
    try:
        return CliRunner().invoke(once, arguments, obj=CLIContext(app=app, no_color=True, workdir=None))
    finally:
        _state._set_current_app(before)


def rows(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


# --- stats ------------------------------------------------------------------------------------------------------------


def test_stats_count_what_is_held_and_what_happened(app: Celery, ledger: Ledger) -> None:
    ran(app, 0.2, 3, left_running=True)
    for _ in range(2):
        runtime_of(app).leases.enqueue(
            Enqueue(KEY, "shop.feed", SPANS["until_executed"], new_id(), "t2", 60.0)
        )
    leave_in_doubt(ledger)
    charge, feed = rows(run(app, "stats", "--json"))
    assert (feed["task"], feed["running"], feed["queued"], feed["begun"], feed["runs"]) == (
        "shop.feed",
        1,
        0,
        4,
        3,
    )
    assert (feed["counters"]["granted"], feed["counters"]["suppressed"], feed["counters"]["lost"]) == (
        4,
        2,
        0,
    )
    assert (feed["p50"], feed["longest"]) == (0.2, 0.2)
    assert (charge["task"], charge["in_doubt"], charge["p99"]) == ("shop.charge", 1, None)


def leave_in_doubt(ledger: Ledger) -> None:
    op = operation(task="shop.charge")
    held = ledger.hold(op)
    ledger.store.effect_start(EffectStart(held, "gateway", "hold", None))
    ledger.expire(op.resource)
    assert ledger.store.claim(claim_of(op)).verdict == "in_doubt"


def test_stats_show_people_only_what_happened_at_all(app: Celery) -> None:
    ran(app, 0.2, 3)
    titles, row = (line.split() for line in run(app, "stats").stdout.splitlines())
    assert "fenced_off" not in titles
    assert [row[0], row[titles.index("granted") - 1]] == [
        "shop.feed",
        "3",
    ]  # nothing runs, so one cell is empty


def test_what_a_span_does_not_count_is_not_0(app: Celery) -> None:
    for unique, window in (("until_expired", "30s"), ("until_executing", None)):
        name, options = f"shop.{unique}", Once(unique=unique, window=window)
        app.task(name=name, base=SingletonTask, once=options, shared=False)(nothing)
        called = app.tasks[name].delay()
        assert called.outcome.status == "enqueued"
        runtime_of(app).leases.count(KEY.digest, name, "suppressed")
    ran(app, 0.2)
    runtime_of(app).leases.count(KEY.digest, "shop.until_executing", "granted")
    found = {row["task"]: row for row in rows(run(app, "stats", "--json"))}
    numbers = ("begun", "runs", "p99")
    assert [found["shop.until_expired"][name] for name in numbers] == [None, None, None]
    assert [found["shop.until_executing"][name] for name in numbers] == [1, None, None]
    assert [found["shop.feed"][name] for name in numbers] == [1, 1, 0.2]
    _, *lines = run(app, "stats").stdout.splitlines()
    assert [line.count(output.NOT_COUNTED) for line in lines] == [0, 3, 4]
    runtime_of(app).leases.count(KEY.digest, "shop.until_expired", "hold_le_1")  # of a redelivery, say
    assert {row["task"]: row for row in rows(run(app, "stats", "--json"))}["shop.until_expired"]["runs"] == 1


def test_stats_name_a_hold_that_lasts_too_long(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    ran(app, 0.1, 20, left_running=True)
    assert "overdue:" not in run(app, "stats").stdout
    import time

    later = time.time() + 59
    monkeypatch.setattr("celery_once_fenced.figures.time.time", lambda: later)
    assert "overdue: shop.feed:7 has been held for" in run(app, "stats").stdout
    assert rows(run(app, "stats", "--json"))[0]["overdue"] == 1


@pytest.mark.parametrize("command", ["stats", "audit", "leases"])
def test_a_redis_that_does_not_answer_is_exit_status_3(command: str) -> None:
    with made(redis_url="redis://127.0.0.1:1/0", postgres_url="postgresql://127.0.0.1:1/none") as app:
        assert run(app, command).exit_code == Exit.UNAVAILABLE


def test_without_the_database_the_rest_is_told(app: Celery) -> None:
    ran(app, 0.2)
    with made(**{**app.conf.once_fenced, "postgres_url": "postgresql://127.0.0.1:1/none"}) as other:
        for command in ("stats", "audit"):
            result = run(other, command)
            assert (result.exit_code, "shop.feed" in result.stdout, "not known" in result.stderr) == (
                3,
                True,
                True,
            )


# --- audit ------------------------------------------------------------------------------------------------------------


def test_audit_judges_every_task(app: Celery, ledger: Ledger) -> None:
    ran(app, 0.2, 30)
    ledger.execute("create table account (id bigint, fence_token bigint)")
    ledger.execute(
        "create trigger zz_once_fenced before insert or update or delete on account for each row"
        " execute function once_fenced_guard_v1('stamp', 'account:', 'id', '')"
    )
    feed, post = rows(run(app, "audit", "--json"))
    assert (feed["task"], feed["breaks"], feed["enforced"]) == ("shop.feed", "fetched twice", "nothing")
    assert (feed["lease"], feed["p50"], feed["runs"]) == (600, 0.2, 30)
    assert [(advice["kind"], advice["lease"]) for advice in feed["advice"]] == [("lower_lease", 15)]
    assert (post["tier"], post["enforced_by"]) == ("correctness", ["ledger", "fence", "trigger"])
    assert "a trigger on account (stamp)" in post["enforced"]
    assert [advice["kind"] for advice in post["advice"]] == ["limit"]


def test_audit_is_one_table_and_the_advice_below_it(app: Celery) -> None:
    ran(app, 0.2, 30)
    lines = run(app, "audit").stdout.splitlines()
    assert lines[0].split()[:5] == ["task", "tier", "breaks", "enforced", "lease"]
    assert [line.split()[0] for line in lines[1:3]] == ["shop.feed", "shop.post"]
    assert lines[3].startswith("shop.feed: lower lease to 15 s:")


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_are_those_of_the_page(app: Celery) -> None:
    ran(app, 0.2, 3)
    printed = run(app, "metrics").stdout
    assert 'once_fenced_granted_total{task="shop.feed"} 3.0' in printed
    assert 'once_fenced_lease_seconds{task="shop.post"} 60.0' in printed


def test_metrics_without_the_library_say_what_to_install(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "celery_once_fenced.observers.prometheus", None)
    result = run(app, "metrics")
    assert (result.exit_code, "celery-once-fenced[prometheus]" in result.stderr) == (Exit.USAGE, True)


# --- doctor -----------------------------------------------------------------------------------------------------------


def test_a_healthy_set_up_is_exit_status_0(app: Celery) -> None:
    result = run(app, "doctor")
    assert (result.exit_code, result.stdout) == (Exit.DONE, "nothing is wrong\n")
    assert rows(run(app, "doctor", "--json")) == []


def test_a_warning_is_told_and_is_no_failure(app: Celery) -> None:
    app.conf.once_fenced = {**app.conf.once_fenced, "tasks": {"shop.fed": {"lease": 5}}}
    (finding,) = rows(run(app, "doctor", "--json"))
    assert (finding["id"], finding["level"]) == ("W020", "warning")
    assert "remedy: correct the name" in run(app, "doctor").stdout


def test_an_error_is_exit_status_1(app: Celery, ledger: Ledger) -> None:
    ledger.execute("drop function once_fenced_prune_v1")
    result = run(app, "doctor", "--json")
    assert (result.exit_code, json.loads(result.stdout)["id"]) == (Exit.NOT_DONE, "E026")


def test_wrong_settings_are_told_one_by_one_by_the_doctor() -> None:
    with made(redis_url="redis://127.0.0.1:1/0", namspace="x", socket_timeout="soon") as app:
        result = run(app, "doctor")
    assert (result.exit_code, result.stdout.count("E001 error")) == (Exit.NOT_DONE, 2)


def test_a_store_that_does_not_answer_is_exit_status_3_unless_something_is_worse() -> None:
    with made(redis_url="redis://127.0.0.1:1/0", postgres_url="postgresql://127.0.0.1:1/none") as app:
        assert run(app, "doctor").exit_code == Exit.UNAVAILABLE
        app.conf.once_fenced = {**app.conf.once_fenced, "database": "default"}
        assert run(app, "doctor").exit_code == Exit.NOT_DONE


# --- what commands have in common -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(once.commands))
def test_every_command_has_json_and_says_what_it_is_for(name: str) -> None:
    command = once.commands[name]
    options = {option for parameter in command.params for option in parameter.opts}
    assert "--json" in options or name == "metrics"
    assert command.help
    described = [p for p in command.params if isinstance(p, click.Option)]
    assert all(option.help for option in described)


def test_what_changes_something_is_told_as_json_too(app: Celery, ledger: Ledger) -> None:
    ran(app, 0.2, left_running=True)
    (released,) = rows(run(app, "release", KEY.text, "--yes", "--json"))
    assert (released["key"], len(released["freed"]), released["no_longer_held_by"]) == (KEY.text, 1, [])
    held = ledger.hold(operation(key := "post:1"))
    ledger.execute("create table writes (resource text, token bigint, key_digest bytea, holder text)")
    ledger.run(held)
    refused = run(app, "resolve", key, "failed", "--reason", "x", "--json")
    assert (refused.exit_code, json.loads(refused.stdout)["resolved"]) == (Exit.NOT_DONE, False)
    assert rows(run(app, "forget", key, "--reason", "x", "--json")) == [{"key": key, "forgotten": True}]
    assert run(app, "resolve", key, "again", "--reason", "x", "--result", "1").exit_code == Exit.USAGE
    assert run(app, "prune", "--batch", "0").exit_code == Exit.USAGE
    (pruned,) = rows(run(app, "prune", "--grace", "3600", "--json"))
    assert pruned == {"fences": 0, "entries": 0, "messages": 0}
    (schema,) = rows(run(app, "sql", "--json"))
    assert schema["sql"] == schema_sql()


def test_json_never_asks(app: Celery) -> None:
    ran(app, 0.2, left_running=True)
    result = run(app, "release", KEY.text, "--json")
    assert (result.exit_code, "--yes" in result.stderr) == (Exit.USAGE, True)


def test_a_table_is_as_wide_as_it_needs_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(
        ("key", "left"), [{"key": "a" * 90, "left": Duration(59.8)}, {"key": None, "left": Duration(3.0)}]
    )
    assert capsys.readouterr().out.splitlines() == [
        "key" + " " * 87 + "    left",
        "a" * 90 + "  59.8 s",
        " " * 92 + "   3 s",
    ]


def test_in_a_terminal_the_widest_column_gives_way(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(output.sys.stdout, "isatty", lambda: True, raising=False)
    row = {"key": "k" * 90, "task": "t" * 20, "runs": 1_000_000}
    print_table(("key", "task", "runs"), [row])
    lines = capsys.readouterr().out.splitlines()
    assert [len(line) for line in lines] == [40, 40]
    assert lines[1] == f"{'k' * 14}…  {'t' * 13}…  1000000"
