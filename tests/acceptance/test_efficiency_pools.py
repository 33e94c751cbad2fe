"""The lease is renewed in every pool: a body that lasts three leases keeps its key (E6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing

import pytest

from tests.acceptance.app import LEASE
from tests.acceptance.workers import Site, Trial

POOLS = ("prefork", "threads", "solo", "gevent")
BODY = 3 * LEASE


@pytest.fixture(scope="module")
def trials(sites: Callable[..., Site]) -> Iterator[Mapping[str, Trial]]:
    """One long body in each pool, all at once; and one that is not renewed, for comparison."""
    site = sites()
    with ExitStack() as stack:
        workers = [
            stack.enter_context(closing(site.start(pool=pool, concurrency=2, queues=[pool])))
            for pool in POOLS
        ]
        trials = {pool: site.begin("early", f"sleep {BODY}, note_trust", queue=pool) for pool in POOLS} | {
            "unrenewed": site.begin("unrenewed", f"sleep {BODY}, note_trust", queue="prefork")
        }
        for worker in workers:
            worker.ready()
        for pool in POOLS:
            assert trials[pool].has_run(1).again(queue=pool).outcome.reason == "running"
        yield trials


def body_of_three_leases_keeps_its_key(trial: Trial) -> None:
    assert trial.value(within=30) == f"{trial.label}#1"
    assert trial.site.stage.events(trial.label) == ["began", "kept", "returned"]


@pytest.mark.parametrize("pool", POOLS)
def test_body_of_three_leases_keeps_its_key(trials: Mapping[str, Trial], pool: str) -> None:
    body_of_three_leases_keeps_its_key(trials[pool])


def test_a_lease_that_nobody_renews_is_caught(trials: Mapping[str, Trial]) -> None:
    with pytest.raises(AssertionError):
        body_of_three_leases_keeps_its_key(trials["unrenewed"])
