"""Late finishers, frozen workers, shutdowns, and redelivery by the broker's clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass

import pytest

from tests.acceptance.app import LEASE
from tests.acceptance.workers import HASTY, Site, Trial, Worker, eventually

LONG = HASTY * 2.5
"""Seconds: a body that outlasts the visibility timeout twice."""


@dataclass(frozen=True)
class Scene:
    """Everything that takes a while, begun at once; ``frozen`` and ``warm`` are workers of one task each."""

    site: Site
    trials: Mapping[str, Trial]
    frozen: Worker
    warm: Worker

    def __getitem__(self, name: str) -> Trial:
        return self.trials[name]


@pytest.fixture(scope="module")
def scene(sites: Callable[..., Site]) -> Iterator[Scene]:
    site = sites(visibility_timeout=HASTY)
    with ExitStack() as stack:

        def start(concurrency: int, *queues: str) -> Worker:
            return stack.enter_context(closing(site.start(concurrency=concurrency, queues=queues)))

        workers = [start(6, "jobs"), start(6, "jobs"), start(2, "frozen"), start(2, "cold"), start(1, "warm")]
        _, _, frozen, cold, warm = [worker.ready() for worker in workers]
        trials = _begun(site)
        for trial in trials.values():
            trial.has_run(1)
        frozen.sigstop()
        heirs = start(4, "frozen", "cold")  # takes what the frozen and the stopped worker leave
        cold.cold()
        heirs.ready()
        yield Scene(site, trials, frozen, warm)


def _begun(site: Site) -> Mapping[str, Trial]:
    twice = ("hold first", "hold second")
    return {
        "late": site.begin("late", f"sleep {LONG}"),
        "tracked": site.begin("tracked", f"sleep {LONG}, fail"),
        "unguarded": site.begin("late", f"sleep {LONG}", variant="unguarded"),
        "waiters": site.begin("late_serial", f"sleep {LONG}", "sleep 0"),
        "unrenewed": site.begin("unrenewed", *twice),
        "unrenewed plain_delete": site.begin("unrenewed", *twice, variant="plain_delete"),
        "frozen": site.begin("late", *twice, queue="frozen"),
        "frozen plain_delete": site.begin("late", *twice, variant="plain_delete", queue="frozen"),
        "cold": site.begin("late", "hold first", "sleep 0", queue="cold"),
        "cold settles_without_state": site.begin(
            "late", "hold first", "sleep 0", variant="settles_without_state", queue="cold"
        ),
        "warm": site.begin("early", "hold", queue="warm"),
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


# --- shutdowns --------------------------------------------------------------------------------------------------------


def message_given_back_by_a_cold_shutdown_is_done(trial: Trial, within: float = 20) -> None:
    assert trial.value(within) == f"{trial.label}#2"


def test_message_given_back_by_a_cold_shutdown_is_done(scene: Scene) -> None:
    message_given_back_by_a_cold_shutdown_is_done(scene["cold"])


def test_workers_that_start_and_stop_free_nothing_of_others(scene: Scene) -> None:
    assert scene["warm"].again().outcome.reason == "running"


def test_warm_shutdown_holds_the_key_until_the_body_ends(scene: Scene) -> None:
    trial = scene["warm"]
    scene.warm.sigterm()
    eventually(lambda: "Warm shutdown" in scene.warm.log())
    assert trial.again().outcome.reason == "running"
    assert trial.release().value(within=30) == f"{trial.label}#1"
    scene.warm.join()


# --- longer than the visibility timeout -------------------------------------------------------------------------------


def body_longer_than_the_visibility_timeout_runs_once(trial: Trial) -> None:
    trial.result.get(timeout=LONG * 2, propagate=False)
    assert trial.runs == 1


def test_body_longer_than_the_visibility_timeout_runs_once(scene: Scene) -> None:
    waiter = scene["waiters"].again("sleep 0")
    body_longer_than_the_visibility_timeout_runs_once(scene["late"])
    assert scene["late"].value() == f"{scene['late'].label}#1"
    assert scene.site.stats(scene["late"].task)["twin"] >= 1
    assert waiter.get(timeout=10) == f"{scene['waiters'].label}#2"


def test_redelivery_of_a_body_that_fails_does_not_touch_its_result(scene: Scene) -> None:
    body_longer_than_the_visibility_timeout_runs_once(scene["tracked"])
    assert scene["tracked"].state == "FAILURE"


def test_a_task_without_a_guard_is_caught(scene: Scene) -> None:
    with pytest.raises(AssertionError):
        body_longer_than_the_visibility_timeout_runs_once(scene["unguarded"])


def test_when_all_is_over_nothing_ran_twice_and_no_copy_is_left(scene: Scene) -> None:
    eventually(scene.site.idle, 2 * LONG)
    assert {name: scene[name].runs for name in ("late", "tracked", "waiters")} == {
        "late": 1,
        "tracked": 1,
        "waiters": 2,
    }
    assert scene["tracked"].state == "FAILURE"
    assert scene.site.stage.most_at_once(scene["waiters"].label) == 1


def test_settling_without_a_state_is_caught(scene: Scene) -> None:
    with pytest.raises(AssertionError, match="a result"):
        message_given_back_by_a_cold_shutdown_is_done(scene["cold settles_without_state"], within=LONG + 3)
