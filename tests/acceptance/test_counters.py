"""Counters are exact: over two workers of four children that are replaced all the time, and killed.

``COUNTED_CALLS=10000`` makes it ten thousand calls instead of a few hundred.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import psycopg
import pytest
from celery import Celery
from prometheus_client.parser import text_string_to_metric_families

from celery_once_fenced.observers.prometheus import exposition
from celery_once_fenced.stores.postgres import schema_sql
from example_project.servers import Servers
from tests.acceptance.counting_app import DEADLY, build
from tests.acceptance.workers import Site, eventually

CALLS = int(os.environ.get("COUNTED_CALLS", "160"))
KILLS = 3
TASKS = ("single", "serial", "posted")
PATIENCE = 60.0 + CALLS / 20


class CountingSite(Site):
    @cached_property
    def app(self) -> Celery:
        return build(self.settings)


class Caller:
    """Calls, and counts what it was told."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self.told: Counter[str] = Counter()

    def call(self, name: str, *args: Any) -> None:
        outcome = self._app.tasks[name].apply_async(args).outcome
        self.told[f"{outcome.status} {name}"] += 1

    def calls_every_kind(self) -> None:
        for number in range(CALLS // 4):
            self.call("single", number)
            self.call("single", number)
        for number in range(CALLS // 20):
            self.call("serial", number % max(CALLS // 100, 2))
        for number in range(CALLS // 6):
            self.call("posted", number)
            self.call("posted", number)
        for number in range(KILLS):
            self.call("single", -1 - number, DEADLY)


@pytest.fixture(scope="module")
def site(servers: Servers, module_postgres_url: str) -> Iterator[CountingSite]:
    with psycopg.connect(module_postgres_url, autocommit=True) as connection:
        connection.execute(schema_sql().encode())
    site = CountingSite.at(servers.redis_url, once_fenced={"postgres_url": module_postgres_url})
    with contextlib.closing(site):
        yield site  # type: ignore[misc]
        site.app.tally.close()


@pytest.fixture(scope="module")
def caller(site: CountingSite) -> Caller:
    """Everything has been called, and is over."""
    caller = Caller(site.app)
    tally, told = site.app.tally, caller.told

    def is_over() -> bool:
        done = tally.all()
        runs = all(
            done[f"began {name}"] + done[f"ledger.replayed {name}"] == told[f"enqueued {name}"]
            for name in TASKS
        )
        return runs and site.idle()

    options = ["--max-tasks-per-child", "20"]
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(
                site.worker(app="tests.acceptance.counting_app", concurrency=4, options=options)
            )
            for _ in range(2)
        ]
        caller.calls_every_kind()
        eventually(is_over, PATIENCE, "an end of the first calls")
        for number in range(CALLS // 6):
            caller.call("posted", number)  # has finished: the ledger answers
        eventually(is_over, PATIENCE, "an end of all calls")
        eventually(lambda: not list(site.runtime.leases.holds()), what="an end of the last lease")
        for worker in workers:
            worker.stop()
    return caller


def shown(site: CountingSite) -> Counter[str]:
    """What Prometheus reads, by metric and task."""
    text, _ = exposition(lambda: site.runtime)
    return Counter(
        {
            f"{sample.name.removeprefix('once_fenced_')} {sample.labels['task']}": int(sample.value)
            for family in text_string_to_metric_families(text.decode())
            for sample in family.samples
            if "task" in sample.labels and "le" not in sample.labels
        }
    )


def counters_are_exact(counted: Counter[str], told: Counter[str], truth: Counter[str]) -> None:
    """``counted`` by the plugin, ``told`` to the caller, ``truth`` tallied one by one."""
    for name in TASKS:
        began, replayed = truth[f"began {name}"], truth[f"ledger.replayed {name}"]
        stepped_aside = truth[f"claim.answered busy {name}"]
        killed = KILLS if name == "single" else 0
        wanted = {
            "suppressed": told[f"duplicate {name}"],
            "granted": began + replayed + stepped_aside,
            "not_entered": replayed + stepped_aside,
            "released": began - killed + replayed + stepped_aside,
            "expired": killed,
            "lost": 0,
            "busy": truth[f"start.refused busy {name}"],
            "deferred": truth[f"execution.deferred {name}"],
            "replayed": replayed,
        }
        assert {counter: counted[f"{counter}_total {name}"] for counter in wanted} == wanted, name
        assert counted[f"hold_seconds_count {name}"] == truth[f"ended {name}"]


def test_counters_are_exact(site: CountingSite, caller: Caller) -> None:
    counters_are_exact(shown(site), caller.told, site.app.tally.all())


def test_there_was_something_to_count(site: CountingSite, caller: Caller) -> None:
    counted, told = shown(site), caller.told
    assert sum(told.values()) >= CALLS
    assert counted["suppressed_total single"] > 0
    assert counted["replayed_total posted"] > 0
    assert counted["expired_total single"] == KILLS
    assert site.app.tally.all()["began serial"] == told["enqueued serial"]


def test_counting_in_each_process_is_caught(site: CountingSite, caller: Caller) -> None:
    """What a process counts for itself is gone with it when it is killed."""
    naive, truth = site.app.tally.naive(), site.app.tally.all()
    assert 0 < naive["began single"] < truth["began single"]
    counted = shown(site)
    for name in TASKS:
        counted[f"granted_total {name}"] = naive[f"began {name}"] + naive[f"ledger.replayed {name}"]
    with pytest.raises(AssertionError):
        counters_are_exact(counted, caller.told, truth)
