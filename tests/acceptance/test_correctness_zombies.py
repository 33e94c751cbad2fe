"""Frozen processes wake up after another has taken over: what they do then (W10, C10, C11, L10)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from celery_once_fenced import explain, runtime
from example_project.servers import Servers
from tests.acceptance.correctness_posting import BALANCE, Posting, Zombie, ends_with_one_effect
from tests.acceptance.correctness_site import ShopSite
from tests.acceptance.shop_app import AMOUNT, LEASE
from tests.acceptance.workers import eventually

PLANS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "begun": ("post", "begun", ()),
    "completed": ("post", "completed", ()),
    "slow successor": ("post", "written", ("post", "hold, post")),
    "own": ("post", "written", ("post, look", "post")),
    "own, autoretry": ("autoretry", "written", ("post, look", "post")),
    "own, fails": ("post", "written", ("post, fail", "post")),
    "own, ends the key": ("final", "written", ("post, decline", "post")),
    "resource": ("post", "completed", ()),
    "overwrites": ("post", "begun", ("overwrite",)),
    "overwrites, fence for the key": ("own", "begun", ("overwrite",)),
}
"""Options of the task, the place where its first run is frozen, and what its runs do."""


@pytest.fixture(scope="module")
def site(servers: Servers, shop: str) -> Iterator[ShopSite]:
    site = ShopSite.on(servers.redis_url, shop)
    with site.worker(concurrency=len(PLANS) + 3):
        yield site
    site.close()


@pytest.fixture(scope="module")
def zombies(site: ShopSite) -> Mapping[str, Zombie]:
    """All frozen at once, and their leases over."""
    postings = {
        name: site.prepared(task, *acts, at={place: "freeze"}) for name, (task, place, acts) in PLANS.items()
    }
    for posting in postings.values():
        posting.call_with_tail()
    frozen = {name: Zombie.of(posting, PLANS[name][1]) for name, posting in postings.items()}
    return {name: zombie.lapses() for name, zombie in frozen.items()}


# --- another call of its key has taken over ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["begun", "completed"])
def test_zombie_of_another_call_is_answered_from_the_ledger(zombies: Mapping[str, Zombie], name: str) -> None:
    zombie, posting = zombies[name], zombies[name].posting
    successor = posting.again()
    assert (successor.outcome.status, successor.get(timeout=10)) == ("enqueued", BALANCE - AMOUNT)
    assert posting.state == "PENDING"
    zombie.wakes()
    ends_with_one_effect(posting, within=30)
    zombie.was_fenced_off(then="replay")
    eventually(lambda: posting.tails == 1)


def test_zombie_of_another_call_waits_for_its_successor(zombies: Mapping[str, Zombie]) -> None:
    zombie, posting = zombies["slow successor"], zombies["slow successor"].posting
    successor = posting.again()
    holder = posting.has_run(2).fence.holder
    zombie.wakes()
    zombie.was_fenced_off(then="defer")
    assert (posting.fence.holder, posting.running) == (holder, True)
    posting.release()
    ends_with_one_effect(posting, within=30)
    assert successor.get(timeout=10) == BALANCE - AMOUNT


# --- its own message, delivered again, has taken over -----------------------------------------------------------------


def overtaken_by_its_own_message(zombie: Zombie) -> Posting:
    """The redelivery has done all there is to do; then the zombie wakes up, and ends."""
    posting = zombie.posting
    posting.site.redeliver(posting.result.id)
    eventually(lambda: posting.tails == 1)
    zombie.wakes()
    zombie.was_fenced_off(then="leave")
    eventually(lambda: posting.ended_in(zombie.pid) and not posting.site.pending(posting.result.id))
    return posting


@pytest.mark.parametrize("name", ["own", "own, autoretry", "own, fails", "own, ends the key"])
def test_zombie_leaves_result_and_entry_of_its_redelivery_alone(
    zombies: Mapping[str, Zombie], name: str
) -> None:
    posting = overtaken_by_its_own_message(zombies[name])
    ends_with_one_effect(posting, within=30)
    assert (posting.deliveries, posting.tails) == (2, 1)


# --- another key took its resource ------------------------------------------------------------------------------------


def test_zombie_whose_resource_was_taken_runs_again_as_a_new_attempt(zombies: Mapping[str, Zombie]) -> None:
    zombie, posting = zombies["resource"], zombies["resource"].posting
    other = posting.site.posting(account=posting.account)
    assert other.value() == BALANCE - AMOUNT
    zombie.wakes()
    assert posting.value(within=30) == BALANCE - 2 * AMOUNT
    zombie.was_fenced_off(then="again")
    assert (posting.runs, posting.entries, other.entries) == (2, 1, 1)
    assert (posting.ledger.attempt, posting.ledger.takeovers) == (2, 0)


def late_write_is_done_again_on_top(zombie: Zombie, name: str) -> None:
    """It has read 100; another posts to the same account; it wakes up and writes what it has read."""
    posting = zombie.posting
    other = posting.site.posting(name, account=posting.account)
    assert other.value() == BALANCE - AMOUNT
    zombie.wakes()
    posting.value(within=30)
    assert posting.balance == BALANCE - 2 * AMOUNT, "an update was lost"


def test_late_write_is_done_again_on_top(zombies: Mapping[str, Zombie]) -> None:
    late_write_is_done_again_on_top(zombies["overwrites"], "post")


def test_a_fence_for_the_key_alone_is_caught(zombies: Mapping[str, Zombie]) -> None:
    with pytest.raises(AssertionError, match="an update was lost"):
        late_write_is_done_again_on_top(zombies["overwrites, fence for the key"], "own")


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


def test_person_is_told_who_has_the_resource_and_how_many_wait_for_it(
    site: ShopSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "current", lambda: site.runtime)
    first = site.posting("post", "post, hold").has_run(1)
    second = site.posting(account=first.account)
    second.has_told("execution.deferred")
    eventually(lambda: bool((told := explain(second.digest)).blocker and told.holds), what="its explanation")
    blocked = explain(second.digest)
    assert blocked.blocker is not None
    assert (blocked.blocker.digest, blocked.blocker.task_id) == (bytes.fromhex(first.digest), first.result.id)
    eventually(lambda: [hold.slot for hold in explain(second.digest).holds] == ["q"], what="its queued hold")
    queued = explain(second.digest)
    assert queued.around.waiting_since is not None
    assert queued.holds[0].since < queued.around.waiting_since, "it is queued since it was called"
    blocker = explain(first.digest)
    assert (blocker.blocker, blocker.waiters[blocker.fences[0].resource].number) == (None, 1)
    first.release()
    second.value()
    assert site.runtime.leases.waiters(blocker.fences[0].resource).number == 0
