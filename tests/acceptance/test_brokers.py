"""The efficiency tier on Debian's brokers: RabbitMQ, which redelivers as soon as a connection ends, and Redis 7.

The wheel's Valkey is the broker of all other acceptance tests.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass

import pytest
from celery.exceptions import TaskRevokedError

from example_project.servers import Servers
from tests.acceptance.app import LEASE
from tests.acceptance.brokers import DebianRedis, RabbitServer
from tests.acceptance.test_efficiency_canvas import (
    body_of_a_chord_with_equal_headers_runs_once,
    both_tails_of_an_equal_head_run,
)
from tests.acceptance.test_efficiency_retries import retries_run_until_one_succeeds, task_id_can_be_used_again
from tests.acceptance.workers import HASTY, Site, Trial, Worker, eventually
from tests.fixtures.proxy import TcpProxy

pytestmark = pytest.mark.debian

LONG_BODY = 2 * HASTY + 1.0
"""Seconds: on RabbitMQ the body outlasts its connection, on Redis the visibility timeout."""


@dataclass(frozen=True)
class Broker:
    """A site on one broker: a worker, one that loses its connection, and one that is killed."""

    site: Site
    name: str
    way: TcpProxy
    cut: Worker
    doomed: Worker


@pytest.fixture(scope="module", params=["rabbitmq", "redis"])
def broker(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Broker]:
    with ExitStack() as stack:
        if request.param == "rabbitmq":
            url = stack.enter_context(RabbitServer().open()).url
            # The transport options of Redis are none of RabbitMQ's.
            site = Site.at(servers.redis_url, broker_url=url, broker_transport_options={})
        else:
            url = stack.enter_context(DebianRedis().open()).url
            site = Site.at(url, visibility_timeout=HASTY)
        stack.enter_context(closing(site))
        way = stack.enter_context(closing(TcpProxy(url)))
        through = site.through(broker_url=way.url)
        cut = stack.enter_context(closing(through.start(concurrency=4, queues=["cut"])))
        doomed = stack.enter_context(closing(site.start(concurrency=4, queues=["doomed"])))
        worker = stack.enter_context(closing(site.start(concurrency=5)))
        for one in (cut, doomed, worker):
            one.ready()
        yield Broker(site, request.param, way, cut, doomed)


@pytest.fixture
def site(broker: Broker) -> Site:
    return broker.site


# --- calls ------------------------------------------------------------------------------------------------------------


def test_duplicates_are_suppressed_while_queued_and_while_running(site: Site) -> None:
    trial = site.begin("early", "hold", countdown=0.5)
    assert trial.again("hold").outcome.reason == "queued"
    second = trial.has_run(1).again("hold")
    assert second.outcome.reason == "running"
    trial.release()
    assert second.get(timeout=10) == trial.value() == f"{trial.label}#1"
    assert trial.runs == 1


def test_key_is_free_before_the_result_is_out(site: Site, label: str) -> None:
    for _ in range(20):
        called = site.task("all_arguments").delay(label)
        assert called.outcome.status == "enqueued"
        called.get(timeout=10, interval=0.001)


@pytest.mark.parametrize(("name", "runs"), [("autoretry", 3), ("autoretry_late", 3)])
def test_retries_run_until_one_succeeds(site: Site, name: str, runs: int) -> None:
    retries_run_until_one_succeeds(site.begin(name, "fail", "fail", "sleep 0"), runs)


def test_task_id_can_be_used_again(site: Site) -> None:
    task_id_can_be_used_again(site)


def test_conflicts_are_skipped_or_wait(site: Site) -> None:
    trial = site.begin("early", "hold").has_run(1)
    with pytest.raises(TaskRevokedError, match=trial.result.id):
        site.app.send_task("good.early", (trial.label,)).get(timeout=10)
    trial.release()
    first = site.begin("serial", "hold", "sleep 0").has_run(1)
    with site.counted(first.task, "deferred", times=2):
        second = first.again("sleep 0")
    first.release()
    assert second.get(timeout=10) == f"{first.label}#2"


def test_canvas_loses_no_tail(site: Site) -> None:
    both_tails_of_an_equal_head_run(site)
    body_of_a_chord_with_equal_headers_runs_once(site)


def test_message_that_the_body_gives_back_runs_again(site: Site) -> None:
    trial = site.begin("late", "requeue", "sleep 0")
    assert trial.value() == f"{trial.label}#2"


def test_expiry_caps_the_hold(site: Site) -> None:
    trial = site.begin("early", expires=1, queue="nobody")
    eventually(lambda: trial.again().outcome.status == "enqueued", 3)


# --- redelivery -------------------------------------------------------------------------------------------------------


def killed_child_is_done_by_a_redelivery(trial: Trial, within: float = 20) -> None:
    assert trial.value(within) == f"{trial.label}#2"


def test_killed_child_is_done_by_a_redelivery(site: Site) -> None:
    killed_child_is_done_by_a_redelivery(site.begin("late", "die", "sleep 0"))


def long_body_runs_once(trial: Trial) -> None:
    """Although its message is delivered again while it runs."""
    trial.result.get(timeout=30)
    assert (trial.runs, trial.result.result) == (1, f"{trial.label}#1")


def test_body_that_outlasts_its_connection_runs_once(broker: Broker) -> None:
    names = {"good": "tracked", "unguarded": "late"}
    trials = {
        variant: broker.site.begin(name, f"sleep {LONG_BODY}", "sleep 0", variant=variant, queue="cut")
        for variant, name in names.items()
    }
    for trial in trials.values():
        trial.has_run(1)
    with broker.site.counted(trials["good"].task, "done"):  # at last its copy is dropped
        broker.way.cut()
        broker.way.resume()
        long_body_runs_once(trials["good"])
    assert (trials["good"].state, trials["good"].runs) == ("SUCCESS", 1)
    with pytest.raises(AssertionError):
        long_body_runs_once(trials["unguarded"])


def test_message_of_a_killed_worker_runs_again_after_the_lease(broker: Broker) -> None:
    trial = broker.site.begin("late", "hold", "sleep 0", queue="doomed").has_run(1)
    broker.doomed.sigkill()
    killed, left = time.monotonic(), broker.site.holds(trial.task, trial.label)["r"].left
    with broker.site.worker(queues=["doomed"]):
        assert trial.value(within=40) == f"{trial.label}#2"
    second = [note.at for note in broker.site.stage.journal(trial.label) if note.event == "began"][1]
    assert left - 0.1 <= second - killed
    assert 0 < left <= LEASE
