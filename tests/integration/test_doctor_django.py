"""The doctor in a Django project: its findings are system checks, and those are findings of the doctor."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from django.core import checks
from django.core.management import CommandError, call_command
from django.db import connections
from django.test import override_settings

from celery_once_fenced.runtime import runtime_of
from django_celery_once_fenced.checks import for_the_doctor
from example_project.celery_app import app
from example_project.servers import Servers
from tests.fixtures.django_project import database_at

pytestmark = pytest.mark.usefixtures("shop")


def database_checks() -> set[str]:
    found = checks.run_checks(tags=[checks.Tags.database], databases=["default"])
    return {str(message.id) for message in found if str(message.id).startswith("once_fenced")}


@contextmanager
def another_text() -> Iterator[None]:
    """Of one SQL function, as another version would have installed it."""
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT pg_get_functiondef('once_fenced_timeline_v1'::regproc)")
        (text,) = cursor.fetchone()
        cursor.execute(text.replace("return 0", "return 1"))
        yield
        cursor.execute(text)


def test_stale_functions_are_a_warning_of_the_database_checks() -> None:
    assert database_checks() == set()
    with another_text():
        assert database_checks() == {"once_fenced.W031"}


def test_a_redis_that_is_away_does_not_keep_migrate_from_running(monkeypatch: pytest.MonkeyPatch) -> None:
    away: Any = type(runtime_of(app).settings)(redis_url="redis://127.0.0.1:1/0", database="default")
    monkeypatch.setattr(runtime_of(app), "settings", away)
    runtime_of(app).close()
    assert database_checks() == set()
    runtime_of(app).close()


def test_before_the_migration_the_database_is_not_asked(postgres_url: str) -> None:
    with database_at(postgres_url):
        assert database_checks() == set()


def test_the_doctor_asks_the_other_checks_too() -> None:
    assert list(for_the_doctor()) == []
    with override_settings(CELERY_ONCE_FENCD={"redis_url": "redis://"}, CELERY_ONCE_FENCED=None):
        assert {finding.id for finding in for_the_doctor()} == {"E002"}


def test_a_misspelt_setting_beside_the_right_one_is_found() -> None:
    with override_settings(
        CELERY_ONCE_FENCE={"redis_url": "redis://"}, CELERY_ONCE={"backend": "celery-once's own"}
    ):
        (finding,) = for_the_doctor()
    assert (finding.id, "CELERY_ONCE_FENCE is never read" in finding.text) == ("E002", True)


def test_a_database_that_django_does_not_know_is_a_finding() -> None:
    with override_settings(CELERY_ONCE_FENCED={"redis_url": "redis://", "database": "nope"}):
        (finding,) = for_the_doctor()
    assert (finding.id, "nope" in finding.text) == ("E003", True)


def test_a_database_that_hangs_does_not_hang_the_doctor(shop: str, servers: Servers) -> None:
    """It accepts connections and says nothing, as a stopped server does; Django's own connection has no limit."""
    with socket.create_server(("127.0.0.1", 0)) as hung:
        url = f"postgresql://nobody@127.0.0.1:{hung.getsockname()[1]}/shop"
        environment = os.environ | {
            "ONCE_FENCED_POSTGRES_URL": url,
            "ONCE_FENCED_REDIS_URL": servers.redis_url,
        }
        command = [sys.executable, "example_project/manage.py", "once_fenced", "doctor"]
        told = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=50
        )
    assert (told.returncode, "E024" in told.stdout) == (3, True), told


def test_functions_that_went_missing_are_a_finding_with_djangos_remedy() -> None:
    with connections["default"].cursor() as cursor:
        cursor.execute("ALTER FUNCTION once_fenced_begin_v1 RENAME TO lost")
        found = list(for_the_doctor())
        cursor.execute("ALTER FUNCTION lost RENAME TO once_fenced_begin_v1")
    assert [finding.id for finding in found] == ["W003"]
    assert "migrate once_fenced" in found[0].remedy


def test_the_doctor_of_a_project_is_that_of_celery(shop: str, servers: Servers) -> None:
    """As a command of its own, where nothing is set up yet."""
    environment = os.environ | {"ONCE_FENCED_POSTGRES_URL": shop, "ONCE_FENCED_REDIS_URL": servers.redis_url}
    manage = [sys.executable, "-W", "error", "example_project/manage.py", "once_fenced"]
    celery = [sys.executable, "-m", "celery", "-A", "example_project.celery_app", "once"]
    told = [
        subprocess.run([*command, "doctor"], env=environment, capture_output=True, text=True, check=False)
        for command in (manage, celery)
    ]
    assert {(done.returncode, done.stdout) for done in told} == {(0, "nothing is wrong\n")}, told


@pytest.fixture
def project(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The project's app, its leases on the test's Redis."""
    runtime = runtime_of(app)
    monkeypatch.setattr(runtime, "settings", replace(runtime.settings, redis_url=redis_url))
    runtime.close()
    yield
    runtime.close()


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("command", ["audit", "doctor", "leases", "stats"])
def test_commands_are_those_of_manage_py(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    call_command("once_fenced", command, "--json")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert bool(lines) is (command == "audit")  # the shop's tasks; nothing has run


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["forget", "nobody", "--reason", "x"], 2), (["forget", "ab" * 32, "--reason", "x"], 1)],
)
def test_a_command_that_was_not_done_raises_with_its_exit_status(arguments: list[str], status: int) -> None:
    with pytest.raises(CommandError) as caught:
        call_command("once_fenced", *arguments)
    assert caught.value.returncode == status
