"""Late finishers and frozen workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass

import pytest

from tests.acceptance.app import LEASE
from tests.acceptance.workers import HASTY, Site, Trial, Worker, eventually


@dataclass(frozen=True)
class Scene:
    """Everything that takes a while, begun at once, and the worker that is frozen."""

    site: Site
    trials: Mapping[str, Trial]
    frozen: Worker

    def __getitem__(self, name: str) -> Trial:
        return self.trials[name]


@pytest.fixture(scope="module")
def scene(sites: Callable[..., Site]) -> Iterator[Scene]:
    site = sites(visibility_timeout=HASTY)
    with ExitStack() as stack:

        def start(concurrency: int, *queues: str) -> Worker:
            return stack.enter_context(closing(site.start(concurrency=concurrency, queues=queues)))

        worker, frozen = start(4, "jobs"), start(2, "frozen")
        worker.ready()
        frozen.ready()
        trials = _begun(site)
        for trial in trials.values():
            trial.has_run(1)
        frozen.sigstop()
        start(4, "frozen").ready()  # takes what the frozen worker leaves
        yield Scene(site, trials, frozen)


def _begun(site: Site) -> Mapping[str, Trial]:
    twice = ("hold first", "hold second")
    return {
        "unrenewed": site.begin("unrenewed", *twice),
        "unrenewed plain_delete": site.begin("unrenewed", *twice, variant="plain_delete"),
        "frozen": site.begin("late", *twice, queue="frozen"),
        "frozen plain_delete": site.begin("late", *twice, variant="plain_delete", queue="frozen"),
    }


# --- longer than the lease --------------------------------------------------------------------------------------------


def late_finisher_leaves_the_next_holder_alone(trial: Trial) -> None:
    """Both bodies have begun; the first one, whose lease is over, ends now."""
    holder = trial.running
    trial.release("first")
    assert trial.value(within=30) == f"{trial.label}#1"
    assert trial.running == holder
    assert trial.again().outcome.reason == "running"
    trial.release("second")


def _next_holder_runs(trial: Trial) -> None:
    eventually(
        lambda: trial.runs == 2 or trial.again("", "hold second").outcome.status == "enqueued", 3 * LEASE
    )
    trial.has_run(2)


def test_late_finisher_does_not_release_the_next_holder(scene: Scene) -> None:
    _next_holder_runs(scene["unrenewed"])
    late_finisher_leaves_the_next_holder_alone(scene["unrenewed"])


def test_a_plain_delete_of_a_late_finisher_is_caught(scene: Scene) -> None:
    _next_holder_runs(scene["unrenewed plain_delete"])
    with pytest.raises(AssertionError):
        late_finisher_leaves_the_next_holder_alone(scene["unrenewed plain_delete"])


# --- frozen -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thawed(scene: Scene) -> Scene:
    """The frozen worker goes on when its messages have begun elsewhere."""
    for name in ("frozen", "frozen plain_delete"):
        scene[name].has_run(2)
    scene.frozen.sigcont()
    return scene


def test_zombie_does_not_renew_or_release_its_successors_lease(thawed: Scene) -> None:
    late_finisher_leaves_the_next_holder_alone(thawed["frozen"])
    assert thawed.site.stats(thawed["frozen"].task)["lost"] == 1


def test_a_plain_delete_of_a_zombie_is_caught(thawed: Scene) -> None:
    with pytest.raises(AssertionError):
        late_finisher_leaves_the_next_holder_alone(thawed["frozen plain_delete"])
