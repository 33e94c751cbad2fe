"""The lock server is killed, frozen or restarted while calls are made, started, renewed and ended (E5, E7, E17).

For each fault one story is played, in which every moment meets it under both policies; the tests look at what came of
it.  The server keeps nothing over a restart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from celery_once_fenced import StoreUnavailableError
from celery_once_fenced.events import Event, observing
from example_project.servers import RedisServer, start_redis
from tests.acceptance.app import LEASE
from tests.acceptance.workers import Site, Trial, Worker, eventually

SOCKET_TIMEOUT = 0.5
BOUND = 6 * SOCKET_TIMEOUT
"""Seconds that a call may take on a busy machine; without a deadline of its own it would hang until the server is back."""
POLICIES = {"open": "early", "raise": "strict"}
"""By value of ``on_store_error``: the task that has it."""


@contextmanager
def killed(server: RedisServer) -> Iterator[None]:
    server.kill()
    yield
    server.start()


@contextmanager
def stopped(server: RedisServer) -> Iterator[None]:
    server.pause()
    yield
    server.resume()


@contextmanager
def restarted(server: RedisServer) -> Iterator[None]:
    """It answers again before anybody asks, and has forgotten everything."""
    server.kill()
    server.start()
    yield


FAULTS = {"killed": killed, "stopped": stopped, "restarted": restarted}


@dataclass
class Story:
    """What happened under one fault, by policy."""

    fault: str
    worker: Worker
    called: dict[str, Trial] = field(default_factory=dict)
    refused: dict[str, StoreUnavailableError] = field(default_factory=dict)
    took: dict[str, float] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    started: dict[str, Trial] = field(default_factory=dict)
    renewed: dict[str, Trial] = field(default_factory=dict)
    ended: dict[str, Trial] = field(default_factory=dict)
    ran_meanwhile: dict[str, int] = field(default_factory=dict)

    @property
    def silent(self) -> bool:
        """Whether there was nobody to answer."""
        return self.fault != "restarted"

    def tells(self, event: str, trial: Trial) -> None:
        """The worker's log explains what became of a key."""
        key = f"key={trial.site.digest(trial.task, trial.label)}"
        eventually(
            lambda: any(event in line and key in line for line in self.worker.log().splitlines()), what=event
        )


@pytest.fixture(scope="module", params=FAULTS)
def story(request: pytest.FixtureRequest, sites: Callable[..., Site]) -> Iterator[Story]:
    with ExitStack() as stack:
        server = stack.enter_context(start_redis())
        site = sites(lock_url=server.url, once_fenced={"socket_timeout": SOCKET_TIMEOUT})
        worker = stack.enter_context(site.worker(pool="threads", concurrency=8))
        yield play(Story(request.param, worker), site, server)


def play(story: Story, site: Site, server: RedisServer) -> Story:
    messages = []
    for policy, name in POLICIES.items():
        story.renewed[policy] = site.begin(name, f"await_loss {LEASE * 3},note_trust")
        story.ended[policy] = site.begin(name, "hold")
        story.started[policy], message = site.parked(name)
        messages.append(message)
    for trial in [*story.renewed.values(), *story.ended.values()]:
        trial.has_run(1)
    with FAULTS[story.fault](server):
        with observing(story.events.append):
            for policy, name in POLICIES.items():
                call(story, site, policy, name)
        for message in messages:
            site.deliver(message)
        for trial in story.ended.values():
            trial.release().value()
        for trial in story.renewed.values():
            eventually(lambda trial=trial: "lost" in site.stage.events(trial.label), what="the loss")
        story.started["open"].has_run(1)
        story.ran_meanwhile = {policy: trial.runs for policy, trial in story.started.items()}
    eventually(lambda: answers(site), what="the end of the outage for the caller")
    return story


def answers(site: Site) -> bool:
    with suppress(StoreUnavailableError):
        return site.runtime.leases.server_clock() > 0
    return False


def call(story: Story, site: Site, policy: str, name: str) -> None:
    began = time.monotonic()
    try:
        story.called[policy] = site.begin(name)
    except StoreUnavailableError as error:
        story.refused[policy] = error
    story.took[policy] = time.monotonic() - began


# --- calls ------------------------------------------------------------------------------------------------------------


def test_call_goes_out_or_is_refused_in_time(story: Story) -> None:
    assert max(story.took.values()) < BOUND
    assert set(story.refused) == ({"raise"} if story.silent else set())
    assert {trial.value() for trial in story.called.values()} == {
        f"{trial.label}#1" for trial in story.called.values()
    }


def test_call_says_why_it_is_not_guarded(story: Story) -> None:
    outcome = story.called["open"].result.outcome
    assert (outcome.status, outcome.reason) == (
        ("unguarded", "store_unavailable") if story.silent else ("enqueued", "free")
    )
    told = [event for event in story.events if event.name == "call.unguarded"]
    assert len(told) == (1 if story.silent else 0)  # the other one did not go out
    assert all("redis" in event.fields["why"] for event in told)
    if story.silent:
        assert "redis" in str(story.refused["raise"])


def test_what_went_on_without_the_server_is_counted_when_it_is_back(story: Story) -> None:
    """By the caller once, by the worker once; each tells it with its next question.  What was refused, or waited, did
    not go on.
    """
    for policy, trial in story.started.items():
        trial.value(within=30)
        site, owed = trial.site, 2 if story.silent and policy == "open" else 0
        site.begin(POLICIES[policy]).value(within=30)
        leases = site.runtime.leases
        eventually(lambda: leases.stats()[trial.task.name].get("unguarded", 0) >= owed, what="the count")  # noqa: B023
        assert owed or "unguarded" not in leases.stats()[trial.task.name]
    if not story.silent:
        assert not any("unguarded" in counters for counters in leases.stats().values())


# --- starts -----------------------------------------------------------------------------------------------------------


def test_message_runs_at_once_or_waits_as_the_policy_says(story: Story) -> None:
    assert story.ran_meanwhile["open"] == 1
    if story.silent:
        assert story.ran_meanwhile["raise"] == 0
        story.tells("execution.unguarded", story.started["open"])
        story.tells("execution.deferred", story.started["raise"])


@pytest.mark.parametrize("policy", POLICIES)
def test_message_is_not_lost_and_runs_once(story: Story, policy: str) -> None:
    trial = story.started[policy]
    assert trial.value(within=30) == f"{trial.label}#1"
    assert trial.runs == 1


# --- renewals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_body_is_told_that_its_lease_is_lost_and_does_not_fail(story: Story, policy: str) -> None:
    trial = story.renewed[policy]
    assert trial.value() == f"{trial.label}#1"
    assert (trial.runs, trial.state) == (1, "SUCCESS")
    story.tells("lease.lost", trial)


# --- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_result_is_out_though_the_key_could_not_be_freed(story: Story, policy: str) -> None:
    trial = story.ended[policy]
    assert (trial.value(), trial.runs, trial.state) == (f"{trial.label}#1", 1, "SUCCESS")
    if story.silent:
        story.tells("store.failed", trial)
    else:
        story.tells("lease.lost", trial)


@pytest.mark.parametrize("moment", ["renewed", "ended", "started"])
@pytest.mark.parametrize("policy", POLICIES)
def test_key_is_free_again_within_a_lease(story: Story, moment: str, policy: str) -> None:
    trial: Any = getattr(story, moment)[policy]
    trial.value(within=30)
    eventually(lambda: trial.again().outcome.status == "enqueued", 3 * LEASE, "a free key")
