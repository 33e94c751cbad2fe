"""django-celery-beat: two beats with one schedule in the database, one of which does not know the tasks."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from example_project.servers import Servers
from tests.acceptance.beat_app import INTERVAL, NEARLY, label
from tests.acceptance.beats import APP, beat, begun, errors
from tests.acceptance.workers import ROOT, START_SECONDS, Site, Worker, eventually

SCHEDULER = ["-S", "django_celery_beat.schedulers:DatabaseScheduler"]
TASKS = ["bare", "nearly", "fenced_nearly"]


@dataclass(frozen=True)
class Beats:
    site: Site
    processes: list[Worker]
    since: float
    """A moment before the first of them began."""

    def runs(self, task: str) -> int:
        return len(self.site.stage.journal(label("database", task)))

    def most(self) -> float:
        """The most runs that a task may have made so far if there was one in ``NEARLY`` seconds at the most."""
        return 1 + (time.monotonic() - self.since) / NEARLY


@pytest.fixture(scope="module")
def beats(
    servers: Servers, module_postgres_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Beats]:
    django = {
        "DJANGO_SETTINGS_MODULE": "tests.acceptance.beat_settings",
        "ONCE_FENCED_POSTGRES_URL": module_postgres_url,
    }
    directory = tmp_path_factory.mktemp("beats")
    with contextlib.ExitStack() as stack:
        site = Site.at(servers.redis_url, once_fenced={"database": "default"})
        stack.enter_context(contextlib.closing(site))
        worker = site.start(app=f"{APP}:app", pool="threads", concurrency=8, env=django)
        stack.enter_context(contextlib.closing(worker))
        command = [sys.executable, "-m", "tests.acceptance.beat_schedule", str(INTERVAL), *TASKS]
        subprocess.run(command, cwd=ROOT, env={**os.environ, **django}, check=True)
        processes = [
            stack.enter_context(beat(site, name, directory, groups={}, options=SCHEDULER, env=django))
            for name in ("one", "two")
        ]
        since = last_moment_before(processes)
        worker.ready()
        yield Beats(site, [begun(process) for process in processes], since)


def last_moment_before(processes: list[Worker]) -> float:
    """A moment at which none of them had begun, on the monotonic clock."""
    moments = [time.monotonic()]

    def has_begun() -> bool:
        now = time.monotonic()
        if any("beat: Starting..." in process.log() for process in processes):
            return True
        moments.append(now)
        return False

    eventually(has_begun, START_SECONDS, "the beginning of a beat")
    return moments[-1]


@pytest.mark.parametrize("task", ["nearly", "fenced_nearly"])
def test_one_run_in_every_interval(beats: Beats, task: str) -> None:
    """The two beats do not tick together: each counts from its own start.  The window is nearly an interval."""
    eventually(lambda: beats.runs(task) >= 4, 60, "four runs")
    eventually(
        lambda: beats.runs("bare") > beats.most(), 60, "more runs of the bare task than one in every interval"
    )
    assert beats.runs(task) <= beats.most()


def test_no_beat_has_an_error_to_tell(beats: Beats) -> None:
    eventually(lambda: beats.runs("nearly") >= 4, 60, "four runs")
    assert [errors(process) for process in beats.processes] == [[], []]
