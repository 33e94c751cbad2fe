"""The process between us and a server: starts it, signals it, and ends it when we are gone.

`servers.py` starts one watchdog for each server, in a session of its own (Ctrl-C does not reach it), with a pipe as
its standard input. The watchdog makes the server's temporary directory, is the server's parent and answers requests,
one JSON object a line. When the pipe closes, or its parent is another process than the one that started it, our
Python process has ended, however it ended (`SIGKILL` included): the watchdog then ends the server with everything
it started and removes the directory. The parent is checked as well because a forked child of ours would keep the
pipe open.

Run by its path, not imported: it must not depend on anything of the project.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pwd
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

PARENT_CHECK_SECONDS = 0.5
STOP_SECONDS = 10.0
POLL_SECONDS = 0.005
IPC_RMID = 0


@dataclass
class Watchdog:
    directory: Path
    user: int | None
    quit_signal: signal.Signals
    server: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def run(self, argv: list[str], log: str) -> int:
        """Runs a helper (initdb) to its end; returns its exit code."""
        return self._popen(argv, log).wait()

    def start(self, argv: list[str], log: str, env: dict[str, str] | None = None) -> int:
        """Starts the server; returns its process id."""
        self.server = self._popen(argv, log, env)
        return self.server.pid

    def alive(self) -> bool:
        return self.server is not None and self.server.poll() is None

    def stop(self, number: int) -> bool:
        """Signals the server and waits for its end; kills it after `STOP_SECONDS`. True if it ended by itself."""
        if self.server is None or not self.alive():
            return True
        self.resume()
        self.server.send_signal(number)
        try:
            self.server.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        return True

    def kill(self) -> None:
        """Ends the server and all its children at once, as a power cut would."""
        self.pause()  # A frozen server forks no child that the next list would miss.
        processes = self._tree()
        send(signal.SIGKILL, processes)
        if self.server is not None:
            self.server.wait()
        wait_for(processes[1:])

    def pause(self) -> None:
        send(signal.SIGSTOP, self._tree()[:1])
        send(signal.SIGSTOP, self._tree()[1:])

    def resume(self) -> None:
        send(signal.SIGCONT, self._tree())

    def end(self) -> None:
        """Leaves nothing behind: no process, no shared memory, no directory."""
        self.stop(self.quit_signal)
        remove_shared_memory(self.directory / "data" / "postmaster.pid")
        shutil.rmtree(self.directory, ignore_errors=True)

    def _popen(self, argv: list[str], log: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        with Path(log).open("ab") as output:
            return subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.directory,
                # Unless asked for, nothing of ours leaks in (PGDATA, PGPORT, a locale that is not installed).
                env=env or {"PATH": os.defpath, "LC_ALL": "C", "HOME": str(self.directory)},
                user=self.user,
                group=None if self.user is None else pwd.getpwuid(self.user).pw_gid,
                extra_groups=None if self.user is None else [],
                start_new_session=True,
            )

    def _tree(self) -> list[psutil.Process]:
        """The server, then everything it started; empty once it has ended."""
        if self.server is None or not self.alive():
            return []
        process = psutil.Process(self.server.pid)
        return [process, *process.children(recursive=True)]


def send(number: int, processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def wait_for(processes: list[psutil.Process]) -> None:
    """Waits until none of them holds anything any more. They are orphans now: nobody may ever reap them."""
    deadline = time.monotonic() + STOP_SECONDS
    while any(map(holds_something, processes)) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def holds_something(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def remove_shared_memory(pid_file: Path) -> None:
    """Frees the System V segment that a killed PostgreSQL left behind; line 7 of its pid file names it."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        segment = int(pid_file.read_text().splitlines()[6].split()[1])
        ctypes.CDLL(None).shmctl(segment, IPC_RMID, None)


def requests(parent: int) -> Iterator[dict[str, Any]]:
    """Yields requests until the pipe closes or the starting process is gone."""
    pending = b""
    while os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], PARENT_CHECK_SECONDS)
        if not readable:
            continue
        received = os.read(0, 65536)
        if not received:
            return
        *lines, pending = (pending + received).split(b"\n")
        yield from map(json.loads, lines)


def answer(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def serve(watchdog: Watchdog, parent: int) -> None:
    verbs: dict[str, Callable[..., object]] = {
        verb: getattr(watchdog, verb) for verb in ("run", "start", "alive", "stop", "kill", "pause", "resume")
    }
    answer(str(watchdog.directory))
    for request in requests(parent):
        answer(verbs[request.pop("verb")](**request))


def main(prefix: str, parent: str, user: str, quit_signal: str) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # so that `finally` runs
    directory = Path(tempfile.mkdtemp(prefix=prefix))
    uid = int(user) if user else None
    if uid is not None:
        os.chown(directory, uid, -1)
    watchdog = Watchdog(directory, uid, signal.Signals(int(quit_signal)))
    try:
        with contextlib.suppress(BrokenPipeError):
            serve(watchdog, int(parent))
    finally:
        watchdog.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
