"""The chaos itself: work that goes on, and faults in an order that a seed decides."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from itertools import count
from typing import Any

import psutil
import redis

from example_project.shop.models import Account
from tests.chaos.chaos_app import LEASE, VISIBILITY_TIMEOUT
from tests.chaos.judges import BALANCE, PLAIN, Job
from tests.chaos.machinery import ChaosWorker, Machinery

BACKLOG = 12
"""Messages that wait at most: every job is to be at work when something breaks."""
ACCOUNTS = 2
TASKS = ("chaos.charge", "chaos.charge", "chaos.post", "chaos.charge_or_hold", PLAIN)
PACE = 0.05
DRAIN_SECONDS = 90.0
QUIET = 2.0
GRACE = 120.0
"""Seconds after which a run that is over, but in which some fault has not hit, is given up."""


class Chaos:
    """One run.  ``faults`` counts what was done, ``calls`` has the task ids of each job's calls."""

    def __init__(self, machinery: Machinery, seed: int) -> None:
        self.machinery = machinery
        self.random = random.Random(seed)
        self.calls: dict[Job, set[str]] = {}
        self.published: set[Job] = set()
        self.faults: Counter[str] = Counter()
        self._frozen: ChaosWorker | None = None
        self._wake_at = 0.0
        self._numbers = count(1)
        self._clock = threading.Event()
        self._accounts = {
            task: [Account.objects.create(name=task, balance=BALANCE).pk for _ in range(ACCOUNTS)]
            for task in dict.fromkeys(TASKS)
        }

    def run(self, seconds: float, missing: Callable[[], list[str]]) -> None:
        """Break things for ``seconds``, and longer while a kind of fault has not hit; then let all come to rest."""
        end = time.monotonic() + seconds
        faults = self._faults()
        while time.monotonic() < end or (missing() and time.monotonic() < end + GRACE):
            self._go_on_until(lambda: False, self.random.uniform(0.2, 1.2))
            fault = next(faults)
            self.faults[fault.__name__.strip("_")] += 1
            fault()
        self._wake(at_once=True)

    def come_to_rest(self) -> None:
        """Wait until no message has been left for a while.  What is not over by then, the judges name."""
        quiet_since = time.monotonic()
        end = quiet_since + DRAIN_SECONDS
        while time.monotonic() < min(quiet_since + QUIET, end):
            self._clock.wait(PACE)
            if self.machinery.waiting():
                quiet_since = time.monotonic()

    # --- the work ---------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while self.machinery.waiting() < BACKLOG:
            job = self._new_job(self.random.choice(TASKS))
            for _ in range(self.random.randint(1, 3)):
                self._call(job)

    def _new_job(self, task: str) -> Job:
        account = self.random.choice(self._accounts[task])
        return Job(next(self._numbers), task, account, self.random.randint(1, 99))

    def _call(self, job: Job) -> None:
        try:
            result = self.machinery.app.tasks[job.task].delay(job.number, job.account, job.amount)
        except Exception:
            if job.task != PLAIN:  # which raises while its Redis is away
                raise
        else:
            self.calls.setdefault(job, set()).add(result.id)
            if job.task == PLAIN or result.outcome.status != "duplicate":
                self.published.add(job)

    def call_again(self, unfinished: Collection[int]) -> list[Job]:
        """Call again which of these jobs the broker has lost on its way to a worker; returns them.

        The Redis transport keeps a message that it hands to a worker nowhere until the worker has noted it: killed in
        between, no worker will ever see it.  Such a call has no answer, and who made it makes it again.
        """
        jobs = [job for job in self.published if job.number in unfinished]
        lost = [job for job in jobs if all(map(self.machinery.was_on_its_way, self.calls[job]))]
        self._flush()  # else they would be taken for calls that are still waiting in the queue
        for job in lost:
            self._call(job)
        return lost

    @property
    def jobs(self) -> list[Job]:
        """All that was called, at least once."""
        return list(self.calls)

    # --- the faults -------------------------------------------------------------------------------------------------------

    def _faults(self) -> Iterator[Callable[[], None]]:
        """Each kind once, in some order; then again."""
        kinds = [
            self._freeze,
            self._kill_child,
            self._kill_in_a_call,
            self._kill_worker,
            self._flush,
            self._crash_redis,
            self._crash_postgres,
            self._cut_wires,
            self._cut_after_some_bytes,
            self._lose_the_reply_to_a_commit,
            self._lose_the_reply_to_a_commit,
        ]
        while True:
            self.random.shuffle(kinds)
            yield from kinds

    def _freeze(self) -> None:
        """SIGSTOP a worker past its lease, in a transaction; what it works on comes to the other one."""
        self._wake(at_once=True)
        found = self._go_on_until(self.machinery.in_a_transaction, 5)
        self._frozen = found or self.random.choice(self.machinery.workers)
        self._frozen.pause()
        self._wake_at = time.monotonic() + LEASE + self.random.uniform(1, VISIBILITY_TIMEOUT + 1)

    def _wake(self, *, at_once: bool = False) -> None:
        if self._frozen is not None and (at_once or time.monotonic() > self._wake_at):
            self._frozen.resume()
            self._frozen = None

    def _kill_child(self) -> None:
        children = [child for worker in self.machinery.workers for child in worker.children]
        with suppress(psutil.NoSuchProcess, IndexError):
            self.random.choice(children).send_signal(signal.SIGKILL)

    def _kill_in_a_call(self) -> None:
        """SIGKILL a child that has had the gateway charge and waits for the answer."""
        job = self._new_job("chaos.charge")
        self.machinery.gateway.hold(job.number)
        self._call(job)
        requests = self._go_on_until(lambda: self.machinery.gateway.seen().of(job.number), 20)
        child = self.machinery.client_at(requests[0].port) if requests else None
        if child is not None:
            with suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGKILL)
                self.faults["killed in a call"] += 1

    def _go_on_until(self, condition: Callable[[], Any], seconds: float) -> Any:
        """Go on with the work until the condition holds, or time is over; returns what it gave last."""
        end = time.monotonic() + seconds
        while not (found := condition()) and time.monotonic() < end:
            self._work()
            self._wake()
            self._clock.wait(PACE)
        return found

    def _kill_worker(self) -> None:
        """SIGKILL parent and children; started again."""
        worker = self.random.choice(self.machinery.workers)
        if worker is self._frozen:
            self._frozen = None
        worker.kill()
        worker.start()

    def _flush(self) -> None:
        with redis.Redis.from_url(self.machinery.leases.url) as client:
            client.flushall()

    def _crash_redis(self) -> None:
        self.machinery.leases.kill()
        self._clock.wait(self.random.uniform(0, 1))
        self.machinery.leases.start()

    def _crash_postgres(self) -> None:
        self.machinery.postgres.kill()
        self._clock.wait(self.random.uniform(0, 1))
        self.machinery.postgres.start()

    def _cut_wires(self) -> None:
        wire = self.random.choice(list(self.machinery.wires.values()))
        wire.cut()
        self._clock.wait(self.random.uniform(0, 1))
        wire.resume()

    def _cut_after_some_bytes(self) -> None:
        for wire in self.machinery.wires.values():
            wire.cut_after(self.random.randint(1, 5000))

    def _lose_the_reply_to_a_commit(self) -> None:
        self.machinery.wires["postgres"].drop_reply_to(b"COMMIT")
