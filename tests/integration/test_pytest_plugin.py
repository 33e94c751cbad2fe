"""The fixtures for pytest in a project of their own, found by the entry point; and the shop's tests, run as a user does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import redis

from example_project.servers import Servers

ROOT = Path(__file__).parents[2]
PROJECT = """
    from celery import Celery
    from celery_once_fenced import Once, SingletonTask

    app = Celery("tiny", broker="memory://")
    app.conf.once_fenced = {{"redis_url": "{redis_url}", "namespace": "{namespace}"}}

    @app.task(base=SingletonTask, shared=False, once=Once(lease=60))
    def refresh(number):
        return number

    @app.task(shared=False)
    def bare(number):
        return number
"""


CONFTEST = """
    import sys

    loaded = set(sys.modules)
"""
SUITE = {
    "test_each.py": """
        from celery_once_fenced.testing import assert_free, assert_held, assert_suppressed
        from tiny import bare, refresh

        def test_duplicates(enforced_once):
            with enforced_once.queueing():
                first, second = refresh.delay(1), refresh.delay(1)
            assert_suppressed(second, by=first)
            assert first.get() == 1

        def test_nothing_is_left_of_another_test(enforced_once):
            assert_free(refresh.s(1))
            with enforced_once.hold(refresh.s(1)):
                enforced_once.clock.advance(59)
                assert_held(refresh.s(1))

        def test_of_an_unguarded_task(enforced_once):
            with enforced_once.queueing():
                first, second = bare.delay(1), bare.delay(1)
            assert_suppressed(second, by=first)
    """,
    "test_module.py": """
        import pytest
        from celery_once_fenced.testing import assert_suppressed
        from tiny import refresh

        @pytest.fixture(autouse=True)
        def once(enforced_once):
            return enforced_once

        def test_asked_for(once):
            with once.hold(refresh.s(1)):
                assert_suppressed(refresh.delay(1))

        def test_not_asked_for():
            assert refresh.delay(1).outcome.status == "enqueued"
            assert refresh.delay(1).get() == 1
    """,
    "test_plugin.py": """
        import conftest

        def test_what_every_run_imports():
            assert "celery_once_fenced.pytest_plugin" in conftest.loaded
            assert not {"celery", "redis", "celery_once_fenced.testing"} & conftest.loaded
    """,
}
KEYS = """
    from celery_once_fenced.testing import assert_free, assert_held
    from tiny import refresh

    def test_leaves_a_key({fixture}):
        assert refresh.delay({key}).outcome.status == "enqueued"
        assert_held(refresh.s({key}), slot="q")

    def test_begins_with_none({fixture}):
        assert_free(refresh.s({key}))
"""
NAMED = """
    def test_namespace(clean_once_fenced):
        from tiny import app
        assert clean_once_fenced == app.conf.once_fenced["namespace"] + ".test"
"""
CRASH = """
    import os
    from tiny import refresh

    def test_that_crashes(clean_once_fenced):
        refresh.delay(1)
        os._exit(1)
"""


class Project:
    """A directory with an app and tests, and a namespace that no other test uses."""

    def __init__(self, path: Path, servers: Servers, namespace: str) -> None:
        self.path = path
        self._write("tiny.py", PROJECT.format(redis_url=servers.redis_url, namespace=namespace))
        self._write("conftest.py", CONFTEST)

    def _write(self, name: str, text: str) -> None:
        (self.path / name).write_text(textwrap.dedent(text))

    def outcomes(self, **files: str) -> dict[str, str]:
        """How each test of these files ended."""
        for name, text in files.items():
            self._write(name, text)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-v", *files]
        alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
        environment = {**alone, "PYTHONPATH": os.pathsep.join([str(self.path), str(ROOT)])}
        ended = subprocess.run(
            command, cwd=self.path, env=environment, capture_output=True, text=True, check=False
        )
        return dict(re.findall(r"::(\w+) (PASSED|FAILED|ERROR)", ended.stdout))


@pytest.fixture
def project(tmp_path: Path, servers: Servers, namespace: str) -> Project:
    return Project(tmp_path, servers, namespace)


def test_enforced_once(project: Project) -> None:
    assert project.outcomes(**SUITE) == {
        "test_duplicates": "PASSED",
        "test_nothing_is_left_of_another_test": "PASSED",
        "test_of_an_unguarded_task": "FAILED",
        "test_asked_for": "PASSED",
        "test_not_asked_for": "PASSED",
        "test_what_every_run_imports": "PASSED",
    }


def test_keys_are_cleaned_between_tests(project: Project, servers: Servers, namespace: str) -> None:
    """After a run that crashed too."""
    assert project.outcomes(**{"test_crash.py": CRASH}) == {}
    assert held(servers, namespace) != []
    fixture = {"test_keys.py": KEYS.format(fixture="clean_once_fenced", key=1), "test_named.py": NAMED}
    assert project.outcomes(**fixture) == {
        "test_leaves_a_key": "PASSED",
        "test_begins_with_none": "PASSED",
        "test_namespace": "PASSED",
    }
    assert held(servers, namespace) == []


def test_without_the_fixture_they_are_not(project: Project, servers: Servers, namespace: str) -> None:
    """The negative control."""
    ended = project.outcomes(**{"test_keys.py": KEYS.format(fixture="", key=2)})
    assert ended == {"test_leaves_a_key": "PASSED", "test_begins_with_none": "FAILED"}
    assert held(servers, namespace) != []


def held(servers: Servers, namespace: str) -> list[str]:
    """The slots in Redis that somebody holds."""
    with redis.Redis.from_url(servers.redis_url, decode_responses=True) as client:
        keys = [str(key) for key in client.scan_iter(match=f"*{namespace}*", count=1000)]
    return [key for key in keys if re.search(r"\}:[qr]:", key)]


def test_the_shop_passes_its_own_tests(servers: Servers) -> None:
    database = servers.create_database("shop_of_the_kit")
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "example_project.manage",
        "test",
        "--noinput",
        "example_project",
    ]
    environment = {
        **os.environ,
        "ONCE_FENCED_POSTGRES_URL": database,
        "ONCE_FENCED_REDIS_URL": "redis://127.0.0.1:1/0",
    }
    try:
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
    finally:
        servers.drop_database("shop_of_the_kit")
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"Ran 1[0-9] tests", ended.stderr)
