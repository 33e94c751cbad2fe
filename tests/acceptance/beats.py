"""Real beats: two of the same schedule, as when one is started by mistake, or while an old one is being replaced."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.acceptance.app import SETTINGS
from tests.acceptance.beat_app import BEAT, GROUPS, PERIOD, WINDOW, label
from tests.acceptance.workers import START_SECONDS, Site, Worker, eventually

APP = "tests.acceptance.beat_app"


@contextlib.contextmanager
def beat(
    site: Site,
    name: str,
    directory: Path,
    *,
    groups: Mapping[str, Sequence[str]],
    app: str = f"{APP}:app",
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[Worker]:
    """A beat, which may take a moment to begin; killed at the end of the block."""
    command = [sys.executable, "-m", "celery", "-A", app, "beat", "-l", "INFO", "--pidfile="]
    given = options or ["-s", str(directory / name)]
    environment = {
        **os.environ,
        SETTINGS: json.dumps(site.settings),
        BEAT: name,
        GROUPS: json.dumps(groups),
        **(env or {}),
    }
    with contextlib.closing(Worker([*command, *given], environment)) as process:
        yield process


def begun(process: Worker) -> Worker:
    """Wait until a beat has begun."""
    eventually(lambda: "beat: Starting..." in process.log(), START_SECONDS, "the beginning of a beat")
    return process


class Journal:
    """What has run of one group: tick by tick."""

    def __init__(self, site: Site, group: str) -> None:
        self._site = site
        self._group = group

    def of(self, task: str) -> list[tuple[float, float, str]]:
        """Due, sent and beat of each run of a task."""
        notes = self._site.stage.journal(label(self._group, task))
        return [tuple(json.loads(note.event)) for note in notes]  # type: ignore[misc]

    def runs(self, task: str) -> Counter[float]:
        """How often a task has run for each tick."""
        return Counter(due for due, _, _ in self.of(task))

    def clean(self) -> list[float]:
        """The ticks that two beats sent as a recipe supposes: less than a window after they, and those before, were due.

        The bare task tells: it runs for each.  Of the ticks between the first and the last one, which may be half.
        """
        late: defaultdict[float, list[float]] = defaultdict(list)
        beats: defaultdict[float, set[str]] = defaultdict(set)
        for due, sent, name in self.of("bare"):
            late[due].append(sent - due)
            beats[due].add(name)
        on_time = {due for due in late if len(beats[due]) == 2 and max(late[due]) < WINDOW * 0.9}
        return sorted(due for due in on_time if due - PERIOD in on_time and due + PERIOD in on_time)

    def wait(self, ticks: int) -> list[float]:
        """Wait for so many clean ticks; these."""
        eventually(lambda: len(self.clean()) >= ticks, 60, f"{ticks} ticks of two beats")
        return self.clean()


def errors(process: Worker, *, of: str = "") -> list[str]:
    """Lines in a beat's log that tell of an error; only those of one entry if it is named."""
    lines = [line for line in process.log().splitlines() if "ERROR/" in line or "Couldn't apply" in line]
    return [line for line in lines if of in line]


def times(runs: Mapping[Any, int], ticks: Sequence[float]) -> set[int]:
    """How often a task has run at each of these ticks, as a set: of one number, if it was always as often."""
    return {runs.get(due, 0) for due in ticks}
