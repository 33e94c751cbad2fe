"""What the load does to its workers and servers, from outside: neither the plugin nor the tasks know of it.

Each fault is a generator: it prepares its trap, then yields whenever it waits, so that several run side by side.
A trap is an order that nobody can get past unseen: its request is held by the gateway, or its row is locked.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import psycopg
import redis

from example_project.gateway import Gateway
from example_project.servers import POLL_SECONDS
from example_project.story import Story
from example_project.workers import CeleryWorker

__all__ = ["Faults", "Steps", "side_by_side"]

Steps = Iterator[None]
OVER = object()
VICTIM = """
    SELECT pid, client_port FROM pg_stat_activity
    WHERE datname = current_database() AND pg_backend_pid() = ANY (pg_blocking_pids(pid)) LIMIT 1
"""


@dataclass
class Faults:
    """The faults of one load.  ``hit``: those that came about.  ``evicted``: the frozen worker lost its session.

    ``fenced``: whether the frozen worker's work must be done by another before it wakes.
    """

    story: Story
    gateway: Gateway
    workers: Sequence[CeleryWorker]
    postgres_url: str
    fenced: bool
    hit: set[str] = field(default_factory=set)
    evicted: bool = False

    def kill_in_the_call(self, order: int) -> Steps:
        """SIGKILL a child while the gateway has charged and not yet answered."""
        self.gateway.hold(order)
        while not self.gateway.seen().of(order):
            yield
        _, child = self._client(self.gateway.seen().of(order)[0].port)
        os.kill(child.pid, signal.SIGKILL)
        self.hit.add("kill")
        self.story.tell(f"order {order} is charged but not answered: its worker's child is killed (SIGKILL)")

    def freeze(self, order: int, is_over: Callable[[], bool], limit: float) -> Steps:
        """SIGSTOP a worker in its transaction, until another took over; where nothing evicts it, for ``limit`` at most."""
        with self._locked(order) as lock:
            while (victim := _waiting(lock)) is None:
                yield
            worker, _ = self._client(victim[1])
            worker.pause()
        self.story.tell(f"worker {worker.node} is frozen (SIGSTOP) in the transaction of order {order}")
        deadline = time.monotonic() + limit
        while not is_over() and time.monotonic() < deadline:
            yield
        if is_over() or not self.fenced:
            self.hit.add("freeze")
            self.evicted = self._has_ended(victim[0])
            self.story.tell(f"the other worker {self._does(is_over())}; {worker.node} wakes (SIGCONT)")
        worker.resume()

    def _does(self, the_work: bool) -> str:
        if self.evicted:
            return "ended the frozen session and did its work"
        return "is at work too" if the_work else "waits for rows that the frozen one has locked"

    def terminate(self, order: int) -> Steps:
        """End the session of a body that is in its transaction."""
        with self._locked(order) as lock:
            while (victim := _waiting(lock)) is None:
                yield
            lock.execute("SELECT pg_terminate_backend(%s, 5000)", victim[:1])
        self.hit.add("terminate")
        self.story.tell(f"the Postgres session in the transaction of order {order} is terminated")

    def flush(self, urls: Sequence[str], is_due: Callable[[], bool]) -> Steps:
        """Empty Redis databases."""
        while not is_due():
            yield
        for url in urls:
            with redis.Redis.from_url(url) as client:
                client.flushdb()
        self.hit.add("flush")
        self.story.tell("Redis loses every lease and every result (FLUSHDB); the broker keeps its messages")

    def _locked(self, order: int) -> psycopg.Connection[Any]:
        """A transaction that has locked the row of an order; given up when the block is left."""
        connection: psycopg.Connection[Any] = psycopg.connect(self.postgres_url)
        connection.execute("SELECT 1 FROM shop_order WHERE id = %s FOR UPDATE", (order,))
        return connection

    def _has_ended(self, session: int) -> bool:
        with psycopg.connect(self.postgres_url) as connection:
            found = connection.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", (session,))
            return found.fetchone() is None

    def _client(self, port: int) -> tuple[CeleryWorker, psutil.Process]:
        """The worker, and in it the process, whose connection comes from a port."""
        for worker in self.workers:
            for process in psutil.Process(worker.pid).children(recursive=True):
                if any(connection.laddr.port == port for connection in process.net_connections("tcp")):
                    return worker, process
        raise LookupError(f"no worker has the port {port}")


def _waiting(lock: psycopg.Connection[Any]) -> tuple[int, int] | None:
    """Process id and client port of a session that waits for our lock."""
    lock.execute("SELECT pg_stat_clear_snapshot()")  # else the transaction sees what it saw first
    victim: tuple[int, int] | None = lock.execute(VICTIM).fetchone()
    return victim


def side_by_side(*faults: Steps, seconds: float) -> None:
    """Let several faults run their course.  One that waits for longer than ``seconds`` is given up: it did not hit."""
    running = list(faults)
    deadline = time.monotonic() + seconds
    while running and time.monotonic() < deadline:
        running = [fault for fault in running if next(fault, OVER) is not OVER]
        time.sleep(POLL_SECONDS)
    for fault in running:
        fault.close()  # type: ignore[attr-defined]  # gives up what it holds
