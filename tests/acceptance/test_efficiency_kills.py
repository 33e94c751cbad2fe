"""Children of the pool are killed in the middle: who may run next, and when."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import pytest

from tests.acceptance.app import LEASE
from tests.acceptance.workers import Site, Trial, eventually

SLACK = 2.5
"""Seconds beyond one lease: for the pool to see its child dead, and a busy machine."""
ENOUGH, PATIENT = 2 * LEASE + SLACK, 20.0
"""Seconds in which a redelivery should have run: to show that it does not, and that it does."""


@pytest.fixture(scope="module")
def site(sites: Callable[..., Site]) -> Iterator[Site]:
    site = sites()
    with site.worker(concurrency=4):
        yield site


@pytest.fixture(scope="module")
def trials(site: Site) -> Mapping[str, Trial]:
    """All that take a while, begun at once."""
    return {
        "early": site.begin("early", "die", "sleep 0"),
        "hour": site.begin("hour", "die", "sleep 0"),
        "late": site.begin("late", "die", "sleep 0"),
        "twin": _redelivered_at_once(site, "good"),
        "drops_twins": _redelivered_at_once(site, "drops_twins"),
        "fatal": site.begin("late", "fatal", "sleep 0"),
        "after its result": site.begin("dies_after_its_result"),
        "time limit": site.begin("early", "sleep 20", time_limit=1),
        "settles_in_end": site.begin("late", "fatal", "sleep 0", variant="settles_in_end"),
    }


def _redelivered_at_once(site: Site, variant: str) -> Trial:
    """A message that is there again as soon as its body was killed, while the dead body's lease is alive."""
    trial, message = site.parked("early", "die", "sleep 0", variant=variant)
    site.deliver(message)
    trial.has_run(1)
    site.deliver(message, redelivered=True)
    return trial


def key_of_a_killed_body_is_free_within_a_lease(trial: Trial) -> None:
    until = trial.began + LEASE + SLACK
    eventually(lambda: trial.again().outcome.status == "enqueued", max(until - time.monotonic(), 0.1))


def redelivery_within_the_lease_waits_and_runs(trial: Trial, within: float = PATIENT) -> None:
    trial.has_run(2, within=max(trial.began + within - time.monotonic(), 0.1))


def killed_message_is_done_by_its_redelivery(trial: Trial, within: float = PATIENT) -> None:
    assert trial.value(within) == f"{trial.label}#2"
    assert trial.runs == 2


def test_key_of_a_killed_body_is_free_within_a_lease(trials: Mapping[str, Trial]) -> None:
    key_of_a_killed_body_is_free_within_a_lease(trials["early"].has_run(1))
    trials["early"].has_run(2)


def test_key_is_free_when_a_kill_comes_right_after_the_result(trials: Mapping[str, Trial]) -> None:
    trial = trials["after its result"]
    assert trial.value() == f"{trial.label}#1"
    key_of_a_killed_body_is_free_within_a_lease(trial)


def test_key_is_free_within_a_lease_of_the_hard_time_limit(trials: Mapping[str, Trial]) -> None:
    key_of_a_killed_body_is_free_within_a_lease(trials["time limit"].has_run(1))


def test_killed_message_is_done_by_its_redelivery(trials: Mapping[str, Trial]) -> None:
    killed_message_is_done_by_its_redelivery(trials["late"])


def test_redelivery_within_the_lease_waits_and_runs(trials: Mapping[str, Trial]) -> None:
    redelivery_within_the_lease_waits_and_runs(trials["twin"])


def test_redelivery_brings_the_result_that_a_kill_kept_back(trials: Mapping[str, Trial]) -> None:
    killed_message_is_done_by_its_redelivery(trials["fatal"])


def test_a_lock_for_an_hour_is_caught(trials: Mapping[str, Trial]) -> None:
    with pytest.raises(AssertionError, match="did not come"):
        key_of_a_killed_body_is_free_within_a_lease(trials["hour"].has_run(1))


def test_acknowledging_a_twin_away_is_caught(trials: Mapping[str, Trial]) -> None:
    with pytest.raises(AssertionError, match="run 2"):
        redelivery_within_the_lease_waits_and_runs(trials["drops_twins"], ENOUGH)


def test_settling_before_the_result_is_out_is_caught(trials: Mapping[str, Trial]) -> None:
    with pytest.raises(AssertionError, match="a result"):
        killed_message_is_done_by_its_redelivery(trials["settles_in_end"], ENOUGH)
