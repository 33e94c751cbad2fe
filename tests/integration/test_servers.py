"""Servers start, obey, and leave nothing behind, however the process that asked for them ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
import redis

from example_project import servers as module
from example_project.servers import (
    PostgresServer,
    RedisServer,
    Servers,
    start_postgres,
    start_redis,
    wait_until,
)

ROOT = Path(__file__).parents[2]
STARTS_BOTH = """
import os, signal
from example_project.servers import start_postgres, start_redis
redis, postgres = start_redis(), start_postgres()
print(os.getpid(), redis.pid, postgres.pid, redis.directory, postgres.directory, flush=True)
signal.pause()
"""


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    with start_redis() as server:
        yield server


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    with start_postgres() as server:
        yield server


def answers(server: RedisServer) -> bool:
    with redis.Redis.from_url(server.url, socket_timeout=0.2, retry=None) as client:
        try:
            return bool(client.ping())
        except (redis.ConnectionError, redis.TimeoutError):
            return False


def count_rows(url: str) -> int:
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT count(*) FROM t").fetchone()
        assert row is not None
        return int(row[0])


def test_session_servers_answer(servers: Servers, postgres_url: str) -> None:
    with redis.Redis.from_url(servers.redis_url) as client, psycopg.connect(postgres_url) as connection:
        assert client.ping()
        assert connection.execute("SHOW server_encoding").fetchone() == ("UTF8",)


def test_databases_are_made_from_a_template_and_dropped(own_postgres: PostgresServer) -> None:
    there = Servers("", own_postgres.url, postgres=own_postgres)
    with psycopg.connect(there.create_database("model")) as connection:
        connection.execute("CREATE TABLE t AS SELECT 1")
    assert count_rows(there.create_database("copy", template="model")) == 1
    there.drop_database("copy")
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        psycopg.connect(there.database_url("copy"))


def test_environment_names_servers_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(module.REDIS_VARIABLE, "redis://elsewhere:1/3")
    monkeypatch.setenv(module.POSTGRES_VARIABLE, "postgresql://elsewhere:2/x")
    with module.servers() as running:
        assert running == Servers("redis://elsewhere:1/3", "postgresql://elsewhere:2/x", None, None)


def test_environment_may_name_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(module.REDIS_VARIABLE, raising=False)
    monkeypatch.setenv(module.POSTGRES_VARIABLE, "postgresql://elsewhere:2/x")
    with module.servers() as running:
        assert running.postgres_url == "postgresql://elsewhere:2/x"
        assert running.redis is not None
        assert answers(running.redis)


def test_redis_restarts_empty_at_the_same_address(own_redis: RedisServer) -> None:
    with redis.Redis.from_url(own_redis.url) as client:
        client.set("key", "value")
        own_redis.restart()
        assert client.get("key") is None


def test_paused_redis_does_not_answer_until_resumed(own_redis: RedisServer) -> None:
    own_redis.pause()
    assert not answers(own_redis)
    own_redis.resume()
    assert answers(own_redis)


@pytest.mark.parametrize("way", ["stop", "kill"])
def test_postgres_keeps_what_was_committed(own_postgres: PostgresServer, way: str) -> None:
    with psycopg.connect(own_postgres.url) as connection:
        connection.execute("CREATE TABLE t AS SELECT 1")
    getattr(own_postgres, way)()
    assert not own_postgres.alive()
    own_postgres.start()
    assert count_rows(own_postgres.url) == 1


def test_paused_postgres_freezes_its_sessions_too(own_postgres: PostgresServer) -> None:
    with psycopg.connect(own_postgres.url) as connection:
        session = psutil.Process(connection.info.backend_pid)
        own_postgres.pause()
        wait_until(lambda: session.status() == psutil.STATUS_STOPPED)
        own_postgres.resume()
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_postgres_log_can_be_searched(own_postgres: PostgresServer) -> None:
    with psycopg.connect(own_postgres.url) as connection, pytest.raises(psycopg.errors.UndefinedTable):
        connection.execute("SELECT * FROM missing_table")
    wait_until(lambda: 'relation "missing_table" does not exist' in own_postgres.log_path.read_text())


def test_port_taken_by_somebody_else_is_passed_over(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = next(module._free_ports())
    monkeypatch.setattr(module, "_free_ports", lambda: iter([own_redis.port, free]))
    with start_redis() as server:
        assert server.port == free
        assert answers(server)
        assert answers(own_redis)


def test_server_that_cannot_start_says_why_and_leaves_nothing() -> None:
    server = PostgresServer({"no_such_setting": "1"})
    with pytest.raises(module.ServerError, match="unrecognized configuration parameter"):
        server.open()
    assert not server.directory.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_the_process_that_asked(number: int) -> None:
    with subprocess.Popen([sys.executable, "-c", STARTS_BOTH], cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        python, *processes, redis_directory, postgres_directory = process.stdout.readline().decode().split()
        os.kill(int(python), number)
    directories = [Path(redis_directory), Path(postgres_directory)]
    wait_until(lambda: not any(map(psutil.pid_exists, map(int, processes))), 15)
    wait_until(lambda: not any(map(Path.exists, directories)), 15)


def test_forked_child_does_not_keep_servers_of_a_killed_parent() -> None:
    forks = STARTS_BOTH.replace("signal.pause()", "child = os.fork(); signal.pause()")
    with subprocess.Popen([sys.executable, "-c", forks], cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        python, server, *_ = map(int, process.stdout.readline().split()[:3])
        (child,) = wait_for_fork(psutil.Process(python))
        os.kill(python, signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(server), 15)
        child.kill()


def test_programs_are_copied_whole_when_their_user_cannot_reach_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_others_may_read", lambda path: False)
    copied = module._binaries_for(os.geteuid(), tmp_path).parent
    installed = module._binaries_for(None, tmp_path).parent
    assert copied.is_relative_to(tmp_path)
    for folder in ("bin", "lib", "share"):
        assert files_in(copied / folder) == files_in(installed / folder)
    shutil.rmtree(tmp_path)


def test_postgres_starts_as_root_from_where_only_root_may_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_others_may_read", lambda path: False)
    with start_postgres() as server, psycopg.connect(server.url) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
        assert (server.binaries.is_relative_to(server.directory)) == (os.geteuid() == 0)


def files_in(directory: Path) -> set[Path]:
    return {path.relative_to(directory) for path in directory.rglob("*")}


def test_main_prints_lines_for_the_shell() -> None:
    command = [sys.executable, "-m", "example_project.servers"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ONCE_FENCED_")}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline(), process.stdout.readline()]
        process.send_signal(signal.SIGINT)
    assert lines[0].startswith("export ONCE_FENCED_REDIS_URL=redis://127.0.0.1:")
    assert lines[1].startswith("export ONCE_FENCED_POSTGRES_URL=postgresql://postgres@127.0.0.1:")
    assert process.returncode == 0


def wait_for_fork(process: psutil.Process) -> list[psutil.Process]:
    """The children that run the same program: neither servers nor their watchdogs."""
    forks: list[psutil.Process] = []

    def found() -> bool:
        command = process.cmdline()
        forks[:] = [child for child in process.children() if child.cmdline() == command]
        return bool(forks)

    wait_until(found)
    return forks
