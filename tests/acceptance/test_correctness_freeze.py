"""A frozen worker is overtaken and, when it wakes up, refused by the database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from example_project.servers import Servers
from tests.acceptance.correctness_freeze import (
    PLACES,
    Frozen,
    first_is_refused_when_it_wakes,
    freezes,
    frozen,
    site_for_freezes,
    successor_finishes_while_the_first_is_frozen,
)
from tests.acceptance.workers import Worker, eventually

Scene = dict[str, Frozen]


@pytest.fixture(scope="module")
def first(servers: Servers, shop: str) -> Iterator[tuple[Scene, Worker]]:
    """The frozen worker, and all that it was at."""
    with ExitStack() as stack:
        site = stack.enter_context(closing(site_for_freezes(servers.redis_url, shop)))
        worker = stack.enter_context(site.worker(concurrency=len(PLACES) + 4))
        postings = {place: (freezes(site, place=place), place) for place in PLACES}
        for variant, place in (
            ("plain_lock", "begun"),
            ("plain_lock", "written"),
            ("checks_before", "begun"),
        ):
            postings[f"{variant} {place}"] = freezes(site, variant=variant, place=place), place
        postings["patient"] = freezes(site, "patient", place="written"), "written"
        yield stack.enter_context(frozen(site, worker, postings)), worker


@pytest.fixture(scope="module")
def scene(first: tuple[Scene, Worker]) -> Scene:
    return first[0]


@pytest.mark.parametrize("place", PLACES)
def test_successor_finishes_while_the_first_is_frozen(scene: Scene, place: str) -> None:
    successor_finishes_while_the_first_is_frozen(scene[place])


@pytest.mark.parametrize("place", PLACES)
def test_successor_has_the_higher_token(scene: Scene, place: str) -> None:
    first, second = [event["token"] for event in scene[place].posting.events("fence.acquired")]
    assert first < second == scene[place].posting.ledger.token == scene[place].posting.fence.token


def test_a_successor_that_waits_for_the_firsts_row_lock_is_caught(scene: Scene) -> None:
    with pytest.raises(AssertionError, match="the end of the successor"):
        successor_finishes_while_the_first_is_frozen(scene["plain_lock written"])


@pytest.mark.parametrize("name", ["plain_lock begun", "checks_before begun"])
def test_without_a_fence_the_successor_finishes_too(scene: Scene, name: str) -> None:
    successor_finishes_while_the_first_is_frozen(scene[name])


def test_redelivery_within_the_lease_waits_for_its_end(scene: Scene) -> None:
    successor_finishes_while_the_first_is_frozen(scene["patient"])
    assert scene["patient"].posting.events("execution.deferred")


# --- it wakes up ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thawed(first: tuple[Scene, Worker]) -> Scene:
    scene, worker = first
    worker.sigcont()
    return scene


@pytest.mark.parametrize("place", [*PLACES, "patient"])
def test_first_is_refused_when_it_wakes(thawed: Scene, place: str) -> None:
    first_is_refused_when_it_wakes(thawed[place])


@pytest.mark.parametrize("place", [*PLACES, "patient"])
def test_afterwards_nothing_is_pending(thawed: Scene, place: str) -> None:
    posting = thawed[place].posting
    eventually(lambda: not posting.site.pending(posting.result.id))
    assert (posting.ledger.state, posting.fence.holder) == ("succeeded", None)


@pytest.mark.parametrize("name", ["plain_lock begun", "plain_lock written", "checks_before begun"])
def test_a_write_without_a_fence_is_caught(thawed: Scene, name: str) -> None:
    with pytest.raises(AssertionError, match=r"posted [^1] times"):
        first_is_refused_when_it_wakes(thawed[name])
