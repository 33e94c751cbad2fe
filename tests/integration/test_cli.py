"""``celery -A proj once …`` as people run it, and its exit codes and JSON as programs read them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from celery import Celery, _state
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result

from celery_once_fenced.cli import once
from celery_once_fenced.keys import Key, new_id
from celery_once_fenced.policy import SPANS
from celery_once_fenced.runtime import Runtime, runtime_of
from celery_once_fenced.stores import Defer, Enqueue, Held, Start
from celery_once_fenced.stores.postgres import schema_sql
from tests.fixtures.ledger import claim_of, operation

KEY = Key("ab" * 32, "shop.feed:7")
OTHER = Key("cd" * 32, "shop.feed:8")


@pytest.fixture(autouse=True)
def no_django_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether Django was set up by another test is no matter here."""
    monkeypatch.setattr("celery_once_fenced.runtime._database_factory", None)


def make_app(**once_fenced: Any) -> Celery:
    app = Celery("cli", broker="memory://", set_as_current=False)
    app.conf.once_fenced = once_fenced
    return app


@pytest.fixture
def app(redis_url: str, namespace: str) -> Iterator[Celery]:
    with make_app(redis_url=redis_url, namespace=namespace) as app:
        yield app
        runtime_of(app).close()


@pytest.fixture
def runtime(app: Celery) -> Runtime:
    return runtime_of(app)


@pytest.fixture
def holder(runtime: Runtime) -> str:
    """Somebody runs KEY, and a call of OTHER is queued."""
    return run_and_queue(runtime)


def run_and_queue(runtime: Runtime) -> str:
    found, span = new_id(), SPANS["until_executed"]
    runtime.leases.start(
        Start(KEY, "shop.feed", span, KEY.digest, "d1", found, "t1", "celery@host", 60.0, redelivery=False)
    )
    runtime.leases.enqueue(Enqueue(OTHER, "shop.feed", span, "d2", "t2", 3600.0))
    return found


def run(app: Celery, *arguments: str, answer: str | None = None) -> Result:
    context = CLIContext(app=app, no_color=True, workdir=None)
    before = _state._tls.current_app
    try:
        return CliRunner().invoke(once, arguments, obj=context, input=answer)
    finally:
        _state._set_current_app(before)


def rows(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.output.splitlines()]


# --- leases -----------------------------------------------------------------------------------------------------------


def test_leases_shows_what_is_held_as_a_table(app: Celery, holder: str) -> None:
    result = run(app, "leases")
    lines = result.output.splitlines()
    assert lines[0].split() == [
        "key",
        "task",
        "slot",
        "task_id",
        "worker",
        "token",
        "since",
        "left",
        "holder",
    ]
    assert sorted(line.split()[0] for line in lines[1:]) == ["shop.feed:7", "shop.feed:8"]
    assert (result.exit_code, holder in result.output) == (0, True)


def test_leases_are_one_json_object_a_line(app: Celery, holder: str) -> None:
    by_key = {row["key"]: row for row in rows(run(app, "leases", "--json"))}
    running, queued = by_key[KEY.text], by_key[OTHER.text]
    assert (running["slot"], running["holder"], running["worker"]) == ("r", holder, "celery@host")
    assert (running["digest"], running["task_id"], running["token"]) == (KEY.digest, "t1", None)
    assert 59 < running["left"] <= 60
    assert (queued["slot"], queued["task_id"]) == ("q", "t2")


def test_nothing_held_is_no_error(app: Celery) -> None:
    assert run(app, "leases", "--json").output == ""
    result = run(app, "leases")
    assert (result.exit_code, result.output) == (0, "nothing is held\n")


def test_key_that_a_slot_cuts_is_shown_cut_and_found_as_shown(app: Celery, runtime: Runtime) -> None:
    long = Key("ef" * 32, "shop.feed:" + "x" * 150)
    runtime.leases.enqueue(Enqueue(long, "shop.feed", SPANS["until_executed"], "d3", "t3", 3600.0))
    (row,) = rows(run(app, "leases", "--json"))
    assert row["key"] == long.text[:100] + "…"
    assert "queued by task t3" in run(app, "explain", row["key"]).output


# --- explain ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [KEY.text, KEY.digest])
def test_explain_takes_the_readable_key_or_its_digest(app: Celery, holder: str, key: str) -> None:
    result = run(app, "explain", key)
    assert "running in task t1 on celery@host" in result.output
    assert result.exit_code == 0


def test_explain_as_json(app: Celery, holder: str) -> None:
    (found,) = rows(run(app, "explain", KEY.text, "--json"))
    assert (found["key"], found["digest"], found["entry"]) == (KEY.text, KEY.digest, None)
    assert [held["holder"] for held in found["held"]] == [holder]
    assert (found["around"]["waiting"], found["around"]["refused"]) == (0, 0)


def test_explain_tells_what_the_key_refused_and_who_waits_for_it(
    app: Celery, runtime: Runtime, holder: str
) -> None:
    span = SPANS["until_executed"]
    runtime.leases.enqueue(Enqueue(KEY, "shop.feed", span, "d3", "t3", 3600.0))
    runtime.leases.defer(Defer(KEY, "shop.feed", span, "d4", 3600.0, limit=100, believed=60.0))
    told = run(app, "explain", KEY.text).output
    assert "1 message waits for its turn, the first since" in told
    assert "1 call refused in a row since it last ran" in told


def test_unknown_key_is_wrong_usage(app: Celery) -> None:
    result = run(app, "forget", "nobody", "--reason", "x")
    assert (result.exit_code, "no ledger" in result.output) == (2, True)


def test_key_that_nobody_holds_is_explained(app: Celery) -> None:
    result = run(app, "explain", "nobody")
    assert (result.exit_code, "no key or fence of this text is held or recorded" in result.output) == (
        0,
        True,
    )


# --- release ----------------------------------------------------------------------------------------------------------


def test_release_frees_what_the_holder_has(app: Celery, runtime: Runtime, holder: str) -> None:
    result = run(app, "release", KEY.text, "--holder", holder, "--yes")
    assert (result.exit_code, f"freed {holder}" in result.output) == (0, True)
    assert [hold.text for hold in runtime.leases.holds()] == [OTHER.text]


def test_release_asks_first_and_takes_no_for_an_answer(app: Celery, runtime: Runtime, holder: str) -> None:
    result = run(app, "release", KEY.text, answer="n\n")
    assert (result.exit_code, "nothing was freed" in result.output) == (1, True)
    assert run(app, "release", KEY.text, answer="").exit_code == 1
    assert len(list(runtime.leases.holds())) == 2


def test_release_of_a_key_that_nobody_knows_is_wrong_usage(app: Celery, holder: str) -> None:
    result = run(app, "release", "shop.fed:7", "--yes")
    assert (result.exit_code, "no key or fence of this text is held or recorded" in result.output) == (
        2,
        True,
    )
    assert run(app, "release", "ef" * 32, "--yes").exit_code == 1


def test_release_by_somebody_else_frees_nothing(app: Celery, runtime: Runtime, holder: str) -> None:
    result = run(app, "release", KEY.text, "--holder", "not this one", "--yes")
    assert (result.exit_code, "no longer held by" in result.output) == (1, True)
    assert len(list(runtime.leases.holds())) == 2


# --- which app, which errors ------------------------------------------------------------------------------------------


def test_the_app_that_was_named_is_asked(
    app: Celery, holder: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the current one, nor any other with settings that the process happens to have."""
    with make_app(redis_url=redis_url, namespace="elsewhere") as other:
        monkeypatch.setattr(_state._tls, "current_app", other)
        assert len(rows(run(app, "leases", "--json"))) == 2
        assert rows(run(other, "leases", "--json")) == []


def test_redis_that_does_not_answer_is_exit_code_3() -> None:
    with make_app(redis_url="redis://127.0.0.1:1/0") as app:
        result = run(app, "leases")
    assert (result.exit_code, "redis is unavailable" in result.output) == (3, True)


@pytest.mark.parametrize("command", ["stats", "audit"])
def test_redis_that_does_not_answer_is_said_once(command: str) -> None:
    with make_app(redis_url="redis://127.0.0.1:1/0") as app:
        result = run(app, command)
    assert (result.exit_code, result.output.count("is unavailable")) == (3, 1)


def test_wrong_setting_is_exit_code_2() -> None:
    with make_app(redis_url="redis://127.0.0.1:1/0", namspace="x") as app:
        result = run(app, "leases")
    assert (result.exit_code, "did you mean 'namespace'" in result.output) == (2, True)


def test_time_beyond_the_calendar_is_shown_as_none(app: Celery, runtime: Runtime, holder: str) -> None:
    import redis

    with redis.Redis.from_url(runtime.settings.redis_url) as client:
        (slot,) = [name for name in client.scan_iter() if name.endswith(b":r:" + KEY.digest.encode())]
        fields = client.get(slot).split(b"|")
        fields[3] = b"9" * 19
        client.set(slot, b"|".join(fields), keepttl=True)
    for command in (["leases"], ["leases", "--json"], ["explain", KEY.digest]):
        assert run(app, *command).exit_code == 0, command


# --- the correctness tier ---------------------------------------------------------------------------------------------


@pytest.fixture
def fenced(redis_url: str, namespace: str, postgres_url: str) -> Iterator[Celery]:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(schema_sql())
    with make_app(redis_url=redis_url, namespace=namespace, postgres_url=postgres_url) as app:
        yield app
        runtime_of(app).close()


@pytest.fixture
def held(fenced: Celery) -> Held:
    """Somebody runs KEY under a fence."""
    found = run_and_queue(runtime_of(fenced))
    op = replace(operation(KEY.text, "account:7"), digest=bytes.fromhex(KEY.digest))
    ledger = runtime_of(fenced).ledger
    assert ledger is not None
    claimed = ledger.claim(claim_of(op, found))
    assert claimed.token is not None
    return Held(op, found, claimed.token, claimed.attempt)


def test_fences_are_listed_beside_leases(fenced: Celery, held: Held) -> None:
    (fence,) = [row for row in rows(run(fenced, "leases", "--json")) if row["slot"] == "fence"]
    assert (fence["key"], fence["token"], fence["holder"]) == ("account:7", held.token, held.holder)


def test_explain_knows_fence_and_entry(fenced: Celery, held: Held) -> None:
    (found,) = rows(run(fenced, "explain", KEY.text, "--json"))
    assert [row["slot"] for row in found["held"]] == ["r", "fence"]
    assert (found["entry"]["state"], found["entry"]["attempt"]) == ("running", 1)
    assert f"token {held.token}" in run(fenced, "explain", KEY.text).output


def test_release_frees_both_stores_of_one_holder_and_raises_the_fence(fenced: Celery, held: Held) -> None:
    result = run(fenced, "release", KEY.text, "--yes", "--reason", "hung")
    assert result.output.count("freed ") == 1
    ledger = runtime_of(fenced).ledger
    assert ledger is not None
    assert list(ledger.fences()) == []
    again = ledger.claim(claim_of(held.operation, new_id()))
    assert again.token is not None
    assert again.token > held.token + 1


def test_lapsed_fence_is_lapsed(fenced: Celery, held: Held, postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("update once_fenced_fence set expires_at = clock_timestamp() - interval '21.3 s'")
    (row,) = [row for row in rows(run(fenced, "leases", "--json")) if row["slot"] == "fence"]
    assert row["left"] is None
    (line,) = [line for line in run(fenced, "leases").output.splitlines() if line.startswith("account:7")]
    assert "lapsed" in line
    assert " ms" not in line


# --- without PostgreSQL -----------------------------------------------------------------------------------------------


@pytest.fixture
def half(redis_url: str, namespace: str) -> Iterator[Celery]:
    away = "postgresql://nobody@127.0.0.1:1/none"
    with make_app(redis_url=redis_url, namespace=namespace, postgres_url=away) as app:
        yield app
        runtime_of(app).close()


@pytest.mark.parametrize(
    "command", [("leases",), ("leases", "--json"), ("stats",), ("audit",), ("explain", KEY.text)]
)
def test_the_rest_is_shown_and_the_status_says_that_it_is_not_all(
    half: Celery, command: tuple[str, ...]
) -> None:
    run_and_queue(runtime_of(half))
    result = run(half, *command)
    assert result.exit_code == 3
    assert "shop.feed" in result.stdout or command == ("audit",)
    assert "postgres is unavailable" in result.output


def test_nothing_is_said_to_be_held_only_where_that_is_known(half: Celery) -> None:
    result = run(half, "leases")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "no lease is held; fences are not known" in result.stderr
    assert "of this text" not in run(half, "explain", "shop.feed:7").output


# --- as a command -----------------------------------------------------------------------------------------------------

PROJECT = """
from celery import Celery
app = Celery("proj", broker="memory://")
app.conf.once_fenced = {settings!r}
"""


def celery(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "celery", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    environment.pop("DJANGO_SETTINGS_MODULE", None)  # a project of its own
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=30, check=False
    )


def test_celery_has_the_command(tmp_path: Path, app: Celery, holder: str) -> None:
    (tmp_path / "proj.py").write_text(PROJECT.format(settings=dict(app.conf.once_fenced)))
    listed = celery(tmp_path, "-A", "proj", "once", "leases", "--json")
    assert {json.loads(line)["key"] for line in listed.stdout.splitlines()} == {KEY.text, OTHER.text}
    released = celery(tmp_path, "-A", "proj", "once", "release", KEY.text, "--holder", "x", "--yes")
    assert released.returncode == 1
    unknown = celery(tmp_path, "-A", "proj", "once", "forget", "nobody", "--reason", "x")
    assert (unknown.returncode, "Traceback" in unknown.stderr) == (2, False)


def test_schema_is_printed_for_psql(tmp_path: Path, postgres_url: str) -> None:
    printed = celery(tmp_path, "once", "sql")
    assert printed.returncode == 0, printed.stderr
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(printed.stdout)
        tables = connection.execute("select count(*) from pg_tables where tablename like 'once_fenced_%'")
        assert (tables.fetchone() or [0])[0] >= 5


def test_in_a_django_project_the_command_of_celery_knows_the_database_too(
    redis_url: str, postgres_url: str
) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(schema_sql().encode())
    servers = {"ONCE_FENCED_REDIS_URL": redis_url, "ONCE_FENCED_POSTGRES_URL": postgres_url}
    command = [sys.executable, "-m", "celery", "-A", "example_project.celery_app", "once", "prune"]
    pruned = subprocess.run(
        command, env={**os.environ, **servers}, capture_output=True, text=True, timeout=60, check=False
    )
    assert (pruned.returncode, pruned.stdout) == (0, "0 fences, 0 entries and 0 messages deleted\n"), (
        pruned.stderr
    )
