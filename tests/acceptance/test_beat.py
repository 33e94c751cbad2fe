"""Two beats with the same entry: one run for each tick, and no error in a beat's log.  How-to: docs/how-to/beat.

All recipes run at once, on one worker: ``bare`` is the control that runs twice at every tick.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from example_project.servers import Servers
from tests.acceptance.beat_app import LONG, LONG_RUNNING, PERIOD
from tests.acceptance.beats import APP, Journal, beat, begun, errors
from tests.acceptance.workers import Site, Worker, eventually
from tests.fixtures.ledger import ledger_at

TICKS = 2
RECIPES = ["bare", "windowed", "due", "fenced", "fenced_due"]
STRANGE = ["bare", "windowed", "fenced"]
LONGER = ["overlapping", *LONG_RUNNING]
RAISING = "raising"
WAIT = 0.6
"""Seconds between call and body that nothing but waiting for another body explains, here."""


@dataclass(frozen=True)
class Beats:
    """Four beats: two that know the tasks and two that do not; one of each shares the group ``mixed``."""

    site: Site
    processes: Mapping[str, Worker]

    def journal(self, group: str) -> Journal:
        return Journal(self.site, group)


@pytest.fixture(scope="module")
def beats(
    servers: Servers, module_postgres_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Beats]:
    directory = tmp_path_factory.mktemp("beats")
    once_fenced = {"postgres_url": module_postgres_url}
    with contextlib.ExitStack() as stack:
        stack.enter_context(ledger_at(module_postgres_url))
        site = stack.enter_context(contextlib.closing(Site.at(servers.redis_url, once_fenced=once_fenced)))
        worker = stack.enter_context(
            contextlib.closing(site.start(app=f"{APP}:app", pool="threads", concurrency=20))
        )

        def start(name: str, groups: Mapping[str, Any], app: str) -> Worker:
            return stack.enter_context(beat(site, name, directory, groups=groups, app=f"{APP}:{app}"))

        known, strange = {"known": [*RECIPES, *LONGER, RAISING]}, {"strange": [*STRANGE, *LONGER]}
        mixed = {"mixed": ["bare", "windowed", "fenced_due"]}
        processes = {
            "known": start("known", {**known, **mixed}, "app"),
            "known_too": start("known_too", known, "app"),
            "strange": start("strange", {**strange, **mixed}, "stranger"),
            "strange_too": start("strange_too", strange, "stranger"),
        }
        worker.ready()
        yield Beats(site, {name: begun(process) for name, process in processes.items()})


@pytest.mark.parametrize("group", ["known", "mixed", "strange"])
def test_a_bare_task_runs_twice_at_every_tick(beats: Beats, group: str) -> None:
    """The negative control of all the others."""
    assert beats.journal(group).wait(TICKS, "bare", least=2) == {2}


@pytest.mark.parametrize("recipe", ["windowed", "due", "fenced", "fenced_due"])
def test_beats_that_know_the_task(beats: Beats, recipe: str) -> None:
    """Never two runs at a tick, and none is left out."""
    assert beats.journal("known").wait(TICKS, recipe) == {1}


@pytest.mark.parametrize(
    ("group", "recipe"),
    [("strange", "windowed"), ("strange", "fenced"), ("mixed", "windowed"), ("mixed", "fenced_due")],
)
def test_beats_that_do_not_know_the_task(beats: Beats, group: str, recipe: str) -> None:
    """Their messages have no header: the worker alone decides, by the window or the ledger."""
    assert beats.journal(group).wait(TICKS, recipe) == {1}


# --- a body that is not done at the next tick -------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", LONG_RUNNING)
@pytest.mark.parametrize("group", ["known", "strange"])
def test_one_run_at_a_time(beats: Beats, group: str, recipe: str) -> None:
    """When the call is made, or else by the worker, where beat does not know the task (E14)."""
    name = f"{group}.{recipe}"
    eventually(lambda: ended(beats, name) >= 3, 20 * LONG, "three runs")
    assert beats.site.stage.most_at_once(name) == 1


def test_ticks_are_skipped_while_it_runs(beats: Beats) -> None:
    """``until_executed``, the default: what runs was sent when nothing ran."""
    runs = sent_and_began(beats, "known.skipping", 3)
    assert min(later - earlier for (earlier, _), (later, _) in pairwise(runs)) > PERIOD
    assert max(began - sent for sent, began in runs) < WAIT


@pytest.mark.parametrize("recipe", ["once_more", "keeping_last"])
def test_a_tick_that_came_meanwhile_is_made_up_for(beats: Beats, recipe: str) -> None:
    """The next run waits for the end of the last one, and not for a tick."""
    assert max(began - sent for sent, began in sent_and_began(beats, f"known.{recipe}", 4)) > WAIT


def sent_and_began(beats: Beats, name: str, runs: int) -> list[list[float]]:
    """Of each run of a task, in order."""
    eventually(lambda: ended(beats, name) >= runs, 30 * LONG, f"{runs} runs")
    return [json.loads(note.event) for note in beats.site.stage.journal(f"{name}.sent")]


@pytest.mark.parametrize("group", ["known", "strange"])
def test_a_bare_task_overlaps_itself(beats: Beats, group: str) -> None:
    """The negative control."""
    name = f"{group}.overlapping"
    eventually(lambda: ended(beats, name) >= 2, 20 * LONG, "two runs")
    assert beats.site.stage.most_at_once(name) >= 2


def ended(beats: Beats, name: str) -> int:
    return beats.site.stage.events(name).count("returned")


# --- the beats themselves ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["known", "known_too", "strange", "strange_too"])
def test_no_beat_has_an_error_to_tell(beats: Beats, name: str) -> None:
    beats.journal("known").wait(TICKS)
    beats.journal("strange").wait(TICKS)
    process = beats.processes[name]
    assert [line for line in errors(process) if f"known.{RAISING}" not in line] == []


def test_on_duplicate_raise_is_an_error_at_every_tick(beats: Beats) -> None:
    """The negative control, and why the doctor warns of it (W5)."""
    processes = [beats.processes[name] for name in ("known", "known_too")]

    def told() -> list[str]:
        return [line for process in processes for line in errors(process, of=f"known.{RAISING}")]

    eventually(lambda: len(told()) >= TICKS, 20 * PERIOD, "an error at every tick")
    assert "SchedulingError" in "".join(told())
