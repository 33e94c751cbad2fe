"""The lock store does not answer, answers too late, or its answer is lost (E7, E17)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import pytest

from celery_once_fenced import StoreUnavailableError
from example_project.servers import Servers
from tests.acceptance.app import LEASE
from tests.acceptance.workers import Site, Worker, eventually
from tests.fixtures.proxy import TcpProxy

SOCKET_TIMEOUT = 0.5
BOUND = SOCKET_TIMEOUT + 0.5
"""Seconds that one call may take, on a busy machine, when the lock store is silent."""


@pytest.fixture(scope="module")
def proxy(servers: Servers) -> Iterator[TcpProxy]:
    """The worker's way to the lock store; broker and results are reached directly."""
    proxy = TcpProxy(servers.redis_url)
    yield proxy
    proxy.close()


@pytest.fixture(scope="module")
def site(sites: Callable[..., Site]) -> Site:
    return sites()


@pytest.fixture(scope="module", autouse=True)
def worker(site: Site, proxy: TcpProxy) -> Iterator[Worker]:
    with site.through(once_fenced={"redis_url": proxy.url}).worker(concurrency=3) as worker:
        yield worker


@pytest.fixture
def flaky(site: Site, tcp_proxy: Callable[[str], TcpProxy]) -> Iterator[tuple[Site, TcpProxy]]:
    """A caller with a way of its own to the lock store."""
    proxy = tcp_proxy(site.settings["once_fenced"]["redis_url"])
    caller = site.through(once_fenced={"redis_url": proxy.url})
    caller.begin("early").value()  # connects to the broker and the result backend
    yield caller, proxy
    proxy.resume()
    caller.disconnect()


# --- calling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["hang", "cut"])
def test_call_goes_out_unguarded_in_time_when_the_store_is_silent(
    flaky: tuple[Site, TcpProxy], fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    caller, proxy = flaky
    getattr(proxy, fault)()
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, "celery_once_fenced"):
        trials = [caller.begin("early") for _ in range(20)]
    assert time.monotonic() - began < BOUND + 20 * 0.05  # one timeout in all, not one for each call
    assert {trial.result.outcome.status for trial in trials} == {"unguarded"}
    assert {trial.result.outcome.reason for trial in trials} == {"store_unavailable"}
    assert sum("call.unguarded" in record.message for record in caplog.records) == 20
    assert [trial.value() for trial in trials] == [f"{trial.label}#1" for trial in trials]


def test_call_raises_in_time_where_it_should(flaky: tuple[Site, TcpProxy]) -> None:
    caller, proxy = flaky
    proxy.hang()
    began = time.monotonic()
    with pytest.raises(StoreUnavailableError):
        caller.begin("strict")
    assert time.monotonic() - began < BOUND
    assert caller.begin("strict", task_id="awaited").result.outcome.status == "unguarded"


def test_lost_reply_of_a_call_is_no_refusal(flaky: tuple[Site, TcpProxy], label: str) -> None:
    caller, proxy = flaky
    task = caller.task("early")
    proxy.drop_reply_to(caller.digest(task, label).encode())
    result = task.delay(label)
    assert (proxy.dropped.is_set(), result.outcome.status) == (True, "enqueued")
    assert result.get(timeout=10) == f"{label}#1"


# --- running ----------------------------------------------------------------------------------------------------------


def test_lost_reply_of_a_start_is_no_refusal(site: Site, proxy: TcpProxy, label: str) -> None:
    task = site.task("early")
    proxy.drop_reply_to(site.digest(task, label).encode())
    assert task.delay(label).get(timeout=10) == f"{label}#1"
    assert proxy.dropped.is_set()
    assert site.stage.runs(label) == 1


def test_one_failed_renewal_loses_no_lease(site: Site, proxy: TcpProxy) -> None:
    trial = site.begin("early", f"await_loss {LEASE * 1.6}").has_run(1)
    proxy.drop_reply_to(site.digest(trial.task, trial.label).encode())
    assert trial.value() == f"{trial.label}#1"
    assert proxy.dropped.is_set()
    assert "kept" in site.stage.events(trial.label)


def test_loss_is_delivered_at_the_end_of_the_trust_window_and_fails_nothing(
    site: Site, proxy: TcpProxy, worker: Worker
) -> None:
    trial = site.begin("early", "await_loss 10").has_run(1)
    proxy.cut()
    eventually(lambda: "lost" in site.stage.events(trial.label), 2 * LEASE)
    proxy.resume()
    began, lost = (
        next(note.at for note in site.stage.journal(trial.label) if note.event == event)
        for event in ("began", "lost")
    )
    assert lost - began > LEASE * 0.6
    assert trial.value() == f"{trial.label}#1"
    eventually(lambda: f"lease.lost key={site.digest(trial.task, trial.label)}" in worker.log())


def test_worker_without_the_store_runs_or_defers_as_the_policy_says(site: Site, proxy: TcpProxy) -> None:
    proxy.cut()
    opened, strict = site.begin("early"), site.begin("strict")
    assert opened.value() == f"{opened.label}#1"
    assert strict.runs == 0
    proxy.resume()
    assert strict.value() == f"{strict.label}#1"


def test_next_step_of_a_chain_goes_out_without_the_store(site: Site, proxy: TcpProxy, label: str) -> None:
    head = site.task("early").si(f"{label}-head", "hold")
    result = (head | site.task("strict").si(label)).apply_async()
    eventually(lambda: site.stage.runs(f"{label}-head") == 1)
    proxy.cut()
    site.stage.release(f"{label}-head")
    assert result.parent.get(timeout=10) == f"{label}-head#1"
    proxy.resume()
    assert result.get(timeout=10) == f"{label}#1"
