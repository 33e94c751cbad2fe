"""Every ending frees the key: within one lease once it has started, within its queue hold if it never starts.

The table is ``endings.ENDINGS``; all of it is played once, in all pools at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from example_project.servers import Servers
from tests.acceptance.endings import POOLS, cases
from tests.acceptance.endings_scene import GUARDED, PLAIN, SLACK, Case, Scene, played
from tests.acceptance.workers import eventually

CASES = [(ending.name, pool) for ending, pool in cases()]
BLOCKS = [(ending.name, pool) for ending, pool in cases() if ending.blocks and pool == ending.pools[0]]
BROKEN = [
    (ending.name, pool, ending.broken)
    for ending, pool in cases()
    if ending.broken and pool == ending.pools[0]
]


@pytest.fixture(scope="module")
def scene(servers: Servers) -> Iterator[Scene]:
    with played(servers.redis_url) as scene:
        yield scene


def key_is_free_in_time(case: Case) -> None:
    left = case.free_by - time.monotonic()
    eventually(lambda: not case.held, left if 0.1 < left < SLACK else 0.1, f"a free key: {case.name}")
    assert not case.overdue


def ending_is_as_it_is_told(case: Case) -> None:
    ending = case.ending
    assert (case.runs, case.state, case.callbacks) == (ending.runs, ending.state, set(ending.callbacks))
    if ending.free == "body":  # a body that was killed never says that it has ended
        assert case.site.stage.most_at_once(case.label) <= 1
    assert "lost" not in case.site.stage.events(case.label)


@pytest.mark.parametrize(("name", "pool"), CASES)
def test_key_is_free_after_every_ending(scene: Scene, name: str, pool: str) -> None:
    key_is_free_in_time(scene[name, pool, GUARDED])
    eventually(lambda: scene[name, pool, GUARDED].call_again() == "enqueued")


@pytest.mark.parametrize(("name", "pool"), CASES)
def test_every_ending_is_as_it_is_told(scene: Scene, name: str, pool: str) -> None:
    ending_is_as_it_is_told(scene[name, pool, GUARDED])


@pytest.mark.parametrize("pool", POOLS)
def test_warm_shutdown_holds_the_key_until_the_body_ends(scene: Scene, pool: str) -> None:
    assert scene["warm shutdown", pool, GUARDED].told == "duplicate"


@pytest.mark.parametrize(("name", "pool"), BLOCKS)
def test_a_lock_that_a_hook_frees_is_caught(scene: Scene, name: str, pool: str) -> None:
    with pytest.raises(AssertionError, match="did not come"):
        key_is_free_in_time(scene[name, pool, PLAIN])


@pytest.mark.parametrize(("name", "pool", "broken"), BROKEN)
def test_a_broken_guard_is_caught(scene: Scene, name: str, pool: str, broken: str) -> None:
    with pytest.raises(AssertionError):
        ending_is_as_it_is_told(scene[name, pool, broken])
