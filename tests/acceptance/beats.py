"""Real beats: two of the same schedule, as when one is started by mistake, or while an old one is being replaced."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

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


class Tick(NamedTuple):
    """One run.  Times are of the wall clock."""

    due: float
    sent: float
    beat: str
    ran: float


class Journal:
    """What has run of one group: tick by tick."""

    def __init__(self, site: Site, group: str) -> None:
        self._site = site
        self._group = group

    def of(self, task: str) -> list[Tick]:
        notes = self._site.stage.journal(label(self._group, task))
        return [Tick(*json.loads(note.event)) for note in notes]

    def runs(self, task: str) -> Counter[float]:
        """How often a task has run for each tick."""
        return Counter(tick.due for tick in self.of(task))

    def clean(self, task: str = "bare") -> list[float]:
        """The ticks that went as a recipe supposes: two beats sent them, and they ran, less than a window after they, and
        those before them, were due.

        The bare task tells: it runs for each.  The last tick is left out, of which only a half may be there.
        """
        late: defaultdict[float, list[float]] = defaultdict(list)
        beats: defaultdict[float, set[str]] = defaultdict(set)
        for tick in self.of("bare"):
            beats[tick.due].add(tick.beat)
        for tick in [*self.of("bare"), *self.of(task)]:
            late[tick.due].append(tick.ran - tick.due)
        on_time = {due for due in late if len(beats[due]) == 2 and max(late[due]) < WINDOW * 0.9}
        return sorted(due for due in on_time if due - PERIOD in on_time and len(beats[due + PERIOD]) == 2)

    def times(self, task: str) -> set[int]:
        """How often a task has run at each clean tick, as a set: of one number, if it was always as often."""
        runs = self.runs(task)
        return {runs[due] for due in self.clean(task)}

    def wait(self, ticks: int, task: str = "bare", least: int = 1) -> set[int]:
        """Wait for so many clean ticks, at each of which a task has run at least so often; how often it has."""
        found: set[int] = set()

        def enough() -> bool:
            found.clear()
            found.update(self.times(task))
            return len(self.clean(task)) >= ticks and min(found) >= least

        eventually(enough, 60, f"{ticks} ticks of two beats, with {least} runs of {task} or more")
        return found


def errors(process: Worker, *, of: str = "") -> list[str]:
    """Lines in a beat's log that tell of an error; only those of one entry if it is named."""
    # Indented, it is a line of the code that a traceback quotes.
    entries = [line for line in process.log().splitlines() if not line.startswith(" ")]
    return [line for line in entries if ("ERROR/" in line or "Couldn't apply" in line) and of in line]
