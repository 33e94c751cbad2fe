"""Redelivery by the broker's clock: a body that lasts four visibility timeouts, and a worker that dies in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field

import pytest

from tests.acceptance.workers import HASTY, Site, Trial, eventually

BODY = 4 * HASTY
"""Seconds."""
KILLED = ("killed", "killed, drops_twins")


@dataclass
class Scene:
    """Everything that takes a while, begun at once."""

    site: Site
    trials: dict[str, Trial]
    killed_at: float = 0.0
    left: dict[str, float] = field(default_factory=dict)
    """Seconds that the lease of a killed body had left."""

    def __getitem__(self, name: str) -> Trial:
        return self.trials[name]


@pytest.fixture(scope="module")
def scene(sites: Callable[..., Site]) -> Iterator[Scene]:
    site = sites(visibility_timeout=HASTY)
    with site.worker(concurrency=8), closing(site.start(concurrency=4, queues=["doomed"])) as doomed:
        doomed.ready()
        scene = Scene(site, _begun(site))
        for trial in scene.trials.values():
            trial.has_run(1)
        with site.worker(concurrency=4, queues=["jobs", "doomed"]):
            for name in KILLED:  # their messages have been delivered again while they run
                task = scene[name].task
                eventually(lambda task=task: site.stats(task).get("twin", 0) >= 1, 30, f"a twin of {name}")
            doomed.sigkill()
            scene.killed_at = time.monotonic()
            for name in KILLED:
                scene.left[name] = site.holds(scene[name].task, scene[name].label)["r"].left
            yield scene


def _begun(site: Site) -> dict[str, Trial]:
    body, killed = f"sleep {BODY}", ("hold", "sleep 0")
    return {
        "late": site.begin("late", body),
        "linked": site.begin("late", body, link=site.task("late").si("tail")),
        "failing": site.begin("tracked", f"{body}, fail"),
        "waiters": site.begin("late_serial", body, "sleep 0"),
        "unguarded": site.begin("late", body, variant="unguarded"),
        "killed": site.begin("patient", *killed, queue="doomed"),
        "killed, drops_twins": site.begin("patient", *killed, variant="drops_twins", queue="doomed"),
    }


# --- longer than the visibility timeout -------------------------------------------------------------------------------


def long_body_runs_once(trial: Trial) -> None:
    trial.result.get(timeout=3 * BODY, propagate=False)
    assert trial.runs == 1


def test_body_longer_than_the_visibility_timeout_runs_once(scene: Scene) -> None:
    waiter = scene["waiters"].again("sleep 0")
    long_body_runs_once(scene["late"])
    assert scene["late"].value() == f"{scene['late'].label}#1"
    assert scene.site.stats(scene["late"].task)["twin"] >= 1
    assert waiter.get(timeout=20) == f"{scene['waiters'].label}#2"


def test_redelivery_of_a_body_that_fails_does_not_touch_its_result(scene: Scene) -> None:
    long_body_runs_once(scene["failing"])
    assert scene["failing"].state == "FAILURE"


def test_callback_of_a_redelivered_body_is_called_once(scene: Scene) -> None:
    long_body_runs_once(scene["linked"])
    eventually(lambda: scene.site.stage.runs("tail") == 1)


def test_a_task_without_a_guard_is_caught(scene: Scene) -> None:
    with pytest.raises(AssertionError):
        long_body_runs_once(scene["unguarded"])


# --- its worker dies --------------------------------------------------------------------------------------------------


def killed_body_runs_again_after_the_lease(scene: Scene, name: str) -> None:
    trial = scene[name]
    assert trial.value(within=scene.killed_at - trial.at + 20) == f"{trial.label}#2"
    second = [note.at for note in scene.site.stage.journal(trial.label) if note.event == "began"][1]
    assert second >= scene.killed_at + scene.left[name] - 0.1
    assert trial.runs == 2


def test_body_of_a_killed_worker_runs_again_after_the_lease(scene: Scene) -> None:
    killed_body_runs_again_after_the_lease(scene, "killed")


def test_acknowledging_a_twin_away_is_caught(scene: Scene) -> None:
    with pytest.raises(AssertionError, match="a result"):
        killed_body_runs_again_after_the_lease(scene, "killed, drops_twins")


# --- afterwards -------------------------------------------------------------------------------------------------------


def test_when_all_is_over_nothing_ran_twice_and_no_copy_is_left(scene: Scene) -> None:
    eventually(scene.site.idle, 30)
    ran = {name: scene[name].runs for name in ("late", "linked", "failing", "waiters", "killed")}
    assert ran == {"late": 1, "linked": 1, "failing": 1, "waiters": 2, "killed": 2}
    assert (scene["failing"].state, scene.site.stage.runs("tail")) == ("FAILURE", 1)
    assert scene.site.stage.most_at_once(scene["waiters"].label) == 1
