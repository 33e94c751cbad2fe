"""The load: two hundred orders, each to be charged once, while workers and servers fail.

``python -m example_project.load`` exits 1 if anything is not as promised, and also if a fault did not hit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import redis

from example_project.gateway import Gateway
from example_project.load_faults import Faults, side_by_side
from example_project.servers import POSTGRES_VARIABLE, Servers
from example_project.story import VISIBILITY_TIMEOUT, Story, stage, until
from example_project.workers import CeleryWorker

APP = "example_project.load_worker"
FENCED = "example_project.shop.tasks.charge"
EFFICIENT = f"{APP}.charge_efficient"
BARE = f"{APP}.charge_bare"
ORDERS = 200
CALLERS = 5
ORDERS_PER_ACCOUNT = 10
AMOUNT = 19
FAULTS = frozenset({"kill", "freeze", "flush", "terminate"})
FROZEN_SECONDS = {True: 45.0, False: 3.0 * VISIBILITY_TIMEOUT}
"""How long a frozen worker is left so: fenced, its work will be done; else all may wait for the rows that it has locked."""
DRAIN_SECONDS = 150.0
"""Longer than a sweep of the outbox lets wait."""


class LoadWorker(CeleryWorker):
    """A worker with two child processes.  At the end of its block it has nothing left to do, and is killed."""

    def command(self) -> list[str]:
        return [*super().command(), "-c", "2"]

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.close()


def the_load(story: Story, servers: Servers) -> None:
    """The load on all three, and the table."""
    from example_project.load_counts import table

    with Gateway().open() as gateway, tempfile.TemporaryDirectory() as starts:
        os.environ["SHOP_GATEWAY_URL"], directory = gateway.url, Path(starts)
        story.title(f"The load: {ORDERS} orders, {CALLERS} calls for each, while workers and servers fail")
        fenced = Load(story, gateway, directory / "fenced", FENCED, ORDERS).run()
        _judge_fenced(story, fenced, servers)
        story.title("The same load in the efficiency tier: a lease in Redis, and nothing else")
        efficient = Load(story, gateway, directory / "efficient", EFFICIENT, ORDERS).run()
        story.promise("orders charged more than once, or not paid", _is_harmed(efficient))
        story.title("The same load without any guard")
        bare = Load(story, gateway, directory / "bare", BARE, ORDERS).run()
        story.promise("every order charged five times or more", bare.charges >= CALLERS * bare.orders)
    print(f"\n{table({'correctness': fenced, 'efficiency': efficient, 'bare': bare})}")


class Load:
    """One tier's load: its orders, its callers, its two workers and the faults."""

    def __init__(self, story: Story, gateway: Gateway, start: Path, task: str, count: int) -> None:
        self.story = story
        self.gateway = gateway
        self.start = start
        self.task = task
        self.orders = _create_orders(count)

    def run(self) -> Any:
        """Run it to its end; returns the counts."""
        from example_project.load_counts import Counts, Fleet

        with contextlib.ExitStack() as stack:
            callers = stack.enter_context(self._callers())
            workers = [LoadWorker(name, APP) for name in ("A", "B")]
            with ThreadPoolExecutor() as pool:  # they take a while to start
                list(pool.map(stack.enter_context, workers))
            _first_line(callers)
            self.story.tell(f"{CALLERS} processes call the task for each of {len(self.orders)} orders")
            self.start.touch()
            faults = self._let_fail(workers)
            answers = Counter(json.loads(_output(callers)))
            self._drain()
            fleet = Fleet(self.task, self.orders, answers, [worker.log() for worker in workers])
        return Counts.of(fleet, self.gateway.seen(), faults.evicted)

    def _callers(self) -> subprocess.Popen[str]:
        numbers = map(str, (CALLERS, self.orders[0], len(self.orders)))
        command = [sys.executable, "-m", "example_project.load_caller", self.task, *numbers, str(self.start)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def _let_fail(self, workers: Sequence[CeleryWorker]) -> Faults:
        from django.conf import settings

        faults = Faults(self.story, self.gateway, workers, os.environ[POSTGRES_VARIABLE], self.task == FENCED)
        first, second, third = (self.orders[len(self.orders) * part // 8] for part in (1, 3, 5))
        forgotten = [str(settings.CELERY_ONCE_FENCED["redis_url"]), settings.CELERY_RESULT_BACKEND]
        side_by_side(
            faults.kill_in_the_call(first),
            faults.freeze(second, self._taken_over(second), FROZEN_SECONDS[self.task == FENCED]),
            faults.terminate(third),
            faults.flush(forgotten, lambda: self._paid() > len(self.orders) // 2),
            seconds=DRAIN_SECONDS,
        )
        self.story.promise("every fault hit", faults.hit == FAULTS)
        return faults

    def _taken_over(self, order: int) -> Callable[[], bool]:
        """Whether another worker has done the order's work (fenced), or is at it, while the first one is frozen."""
        from django_celery_once_fenced.models import LedgerEntry

        entry = LedgerEntry.objects.filter(
            key__endswith=f"charge:{order}", takeovers__gt=0, state="succeeded"
        )
        return entry.exists if self.task == FENCED else lambda: len(self.gateway.seen().of(order)) > 1

    def _paid(self) -> int:
        from example_project.shop.models import Order

        return Order.objects.filter(pk__in=self.orders, status="paid").count()

    def _drain(self) -> None:
        from django.conf import settings

        from example_project.load_counts import pending, unfinished

        with redis.Redis.from_url(settings.CELERY_BROKER_URL, decode_responses=True) as broker:

            def left() -> dict[str, int]:
                messages = {"queued": broker.llen("celery"), "unacknowledged": broker.hlen("unacked")}
                return {name: count for name, count in {**messages, **pending()}.items() if count}

            until(
                lambda: not left(),
                DRAIN_SECONDS,
                lambda: f"it did not come to rest ({left()}, {unfinished()})",
            )


def _create_orders(count: int) -> list[int]:
    from django.db.models import Max

    from example_project.load_counts import BALANCE
    from example_project.shop.models import Account, Order

    first = (
        Account.objects.aggregate(Max("pk"))["pk__max"] or 0
    ) + 1  # the demo has made one with a number of its own
    accounts = Account.objects.bulk_create(
        Account(pk=first + number, name=f"customer {number}", balance=BALANCE)
        for number in range(count // ORDERS_PER_ACCOUNT)
    )
    made = [Order(account=accounts[number % len(accounts)], amount=AMOUNT) for number in range(count)]
    return [order.pk for order in Order.objects.bulk_create(made)]


def _judge_fenced(story: Story, counts: Any, servers: Servers) -> None:
    from example_project.load_counts import deadlocks, pending

    log = servers.postgres.log() if servers.postgres else ""
    for text, kept in {
        "a takeover, an eviction, a fenced-off attempt, a replay and a repeated request came about": min(
            counts.taken_over,
            counts.of_these_evicted,
            counts.fenced_off,
            counts.replayed,
            counts.repeats_under_the_same_key,
        )
        > 0,
        "every order was charged once, every repeat had the same key": counts.charges_per_order
        == counts.charges_per_key
        == "1"
        and counts.keys_per_order == 1,
        "every order is paid and every balance exact": not (counts.orders_unpaid or counts.balances_off_by),
        "every receipt was sent once": counts.receipts_sent == counts.orders,
        "nothing is pending": not pending(),
        "no deadlock in Postgres": deadlocks() == 0 and "deadlock detected" not in log,
    }.items():
        story.promise(text, kept)


def _is_harmed(counts: Any) -> bool:
    return bool(counts.charges > counts.orders or counts.orders_unpaid)


def _first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def _output(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=DRAIN_SECONDS)[0]


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    story = Story()
    with stage(story) as running:
        the_load(story, running)
        return story.end()


if __name__ == "__main__":
    sys.exit(main())
