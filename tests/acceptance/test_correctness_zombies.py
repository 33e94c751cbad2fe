"""Frozen processes wake up after another has taken over: what they do then (W10, C10, C11, L10; CASES 24, 25, 28)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from example_project.servers import Servers
from tests.acceptance.correctness_site import BALANCE, ShopSite, Zombie, ends_with_one_effect, has_one_effect
from tests.acceptance.shop_app import AMOUNT, LEASE
from tests.acceptance.workers import eventually


@pytest.fixture(scope="module")
def site(servers: Servers, shop: str) -> Iterator[ShopSite]:
    site = ShopSite.on(servers.redis_url, shop)
    with site.worker(concurrency=12):
        yield site
    site.close()


# --- its own key was taken over ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["begun", "completed"])
def test_zombie_of_another_call_is_answered_from_the_ledger(site: ShopSite, place: str) -> None:
    zombie = Zombie.of(site.posting(at={place: "freeze"}), place).lapses()
    successor = zombie.posting.again()
    assert (successor.outcome.status, successor.get(timeout=10)) == ("enqueued", 90)
    assert zombie.posting.state == "PENDING"
    zombie.wakes()
    ends_with_one_effect(zombie.posting)
    zombie.was_fenced_off(then="replay")


def test_zombie_of_another_call_waits_for_its_successor(site: ShopSite) -> None:
    zombie = Zombie.of(
        site.posting("post", "post", "hold, post", at={"written": "freeze"}), "written"
    ).lapses()
    successor = zombie.posting.again()
    zombie.posting.has_run(2)
    zombie.wakes()
    zombie.was_fenced_off(then="defer")
    zombie.posting.release()
    ends_with_one_effect(zombie.posting)
    assert successor.get(timeout=10) == 90


def test_zombie_of_its_own_redelivery_leaves_the_result_alone(site: ShopSite) -> None:
    zombie = Zombie.of(site.posting(at={"written": "freeze"}), "written").lapses()
    site.redeliver(zombie.posting.result.id)
    ends_with_one_effect_but_one_copy(zombie)
    zombie.wakes()
    zombie.was_fenced_off(then="leave")
    ends_with_one_effect(zombie.posting)


def ends_with_one_effect_but_one_copy(zombie: Zombie) -> None:
    """Its own copy of the message is not acknowledged while it is frozen."""
    assert zombie.posting.value() == BALANCE - AMOUNT
    has_one_effect(zombie.posting)


@pytest.mark.parametrize("name", ["post", "autoretry"])
def test_zombie_of_its_own_redelivery_publishes_nothing(site: ShopSite, name: str) -> None:
    posting = site.prepared(name, "post, look", at={"written": "freeze"})
    posting.call_with_tail()
    zombie = Zombie.of(posting, "written").lapses()
    site.redeliver(posting.result.id)
    eventually(lambda: posting.tails == 1)
    zombie.wakes()
    zombie.was_fenced_off(then="leave")
    eventually(lambda: posting.ended_in(zombie.pid) and site.idle())
    ends_with_one_effect(posting)
    assert (posting.deliveries, posting.tails) == (2, 1)


# --- another key took its resource ------------------------------------------------------------------------------------


def late_write_is_done_again_on_top(site: ShopSite, name: str) -> None:
    """Read 100, freeze; another posts to the same account; wake up and write what has been read."""
    zombie = Zombie.of(site.posting(name, "overwrite", at={"begun": "freeze"}), "begun").lapses()
    other = site.posting(name, account=zombie.posting.account)
    assert other.value() == BALANCE - AMOUNT
    zombie.wakes()
    zombie.posting.value()
    assert zombie.posting.balance == BALANCE - 2 * AMOUNT, "an update was lost"


def test_late_write_is_done_again_on_top(site: ShopSite) -> None:
    late_write_is_done_again_on_top(site, "post")


def test_a_fence_for_the_key_alone_is_caught(site: ShopSite) -> None:
    with pytest.raises(AssertionError, match="an update was lost"):
        late_write_is_done_again_on_top(site, "own")


def test_zombie_whose_resource_was_taken_runs_again_as_a_new_attempt(site: ShopSite) -> None:
    zombie = Zombie.of(site.posting(at={"completed": "freeze"}), "completed").lapses()
    other = site.posting(account=zombie.posting.account)
    assert other.value() == BALANCE - AMOUNT
    zombie.wakes()
    assert zombie.posting.value() == BALANCE - 2 * AMOUNT
    zombie.was_fenced_off(then="again")
    assert (zombie.posting.runs, zombie.posting.entries, other.entries) == (2, 1, 1)
    assert (zombie.posting.ledger.attempt, zombie.posting.ledger.takeovers) == (2, 0)


# --- two keys of one resource -----------------------------------------------------------------------------------------


def second_key_of_a_resource_does_not_sleep_a_lease(site: ShopSite, variant: str = "good") -> None:
    first = site.posting("post", "post, hold", variant=variant).has_run(1)
    second = site.posting(account=first.account, variant=variant).has_told("execution.deferred")
    first.release()
    assert (first.value(), second.value()) == (BALANCE - AMOUNT, BALANCE - 2 * AMOUNT)
    (waited, *_) = second.events("execution.deferred")
    assert waited["why"] == "fence_busy"
    assert waited["seconds"] < LEASE / 3, f"it slept {waited['seconds']} s"


def test_second_key_of_a_resource_does_not_sleep_a_lease(site: ShopSite) -> None:
    second_key_of_a_resource_does_not_sleep_a_lease(site)


def test_waiting_for_the_lease_of_a_resource_is_caught(site: ShopSite) -> None:
    with pytest.raises(AssertionError, match="it slept"):
        second_key_of_a_resource_does_not_sleep_a_lease(site, "waits_for_the_lease")


def test_key_that_waits_for_a_resource_stays_a_duplicate(site: ShopSite) -> None:
    first = site.posting("post", "post, hold").has_run(1)
    second = site.posting(account=first.account).has_told("execution.deferred")
    assert (second.again().outcome.status, second.again().id) == ("duplicate", second.result.id)
    first.release()
    assert second.value() == BALANCE - 2 * AMOUNT
