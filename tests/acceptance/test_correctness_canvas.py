"""Chains and chords through fenced tasks: a member that is replayed keeps no tail waiting (E12)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import chain, chord

from example_project.servers import Servers
from tests.acceptance.correctness_posting import BALANCE, Posting, ends_with_one_effect, has_one_effect
from tests.acceptance.correctness_site import ShopSite
from tests.acceptance.shop_app import AMOUNT
from tests.acceptance.workers import eventually


@pytest.fixture(scope="module")
def site(servers: Servers, shop: str) -> Iterator[ShopSite]:
    site = ShopSite.on(servers.redis_url, shop)
    with site.worker(concurrency=5):
        yield site
    site.close()


def step(posting: Posting) -> Any:
    return posting.task.si(posting.label, posting.account, *posting.acts)


def tail(posting: Posting) -> Any:
    return posting.site.app.signature("unguarded.collect", (f"{posting.label} tail",))


def done(site: ShopSite, **given: Any) -> Posting:
    posting = site.posting(**given)
    posting.value()
    return posting


# --- chains -----------------------------------------------------------------------------------------------------------


def tail_follows_a_replayed_step(posting: Posting, fresh: Posting) -> None:
    result = chain(step(fresh), step(posting), tail(posting)).apply_async()
    eventually(result.ready, 3, "the end of the chain")
    assert result.get(timeout=1) == BALANCE - AMOUNT
    assert (posting.runs, fresh.runs, posting.tails) == (1, 1, 1)
    has_one_effect(posting)


def test_tail_follows_a_replayed_step(site: ShopSite) -> None:
    tail_follows_a_replayed_step(done(site), site.prepared())


def test_dropping_what_has_been_done_is_caught(site: ShopSite) -> None:
    with pytest.raises(AssertionError, match="the end of the chain"):
        tail_follows_a_replayed_step(done(site, variant="drops_replays"), site.prepared())


def test_chains_with_the_same_head_both_go_on(site: ShopSite) -> None:
    head = site.prepared("post", "hold, post")
    results = [chain(step(head), tail(head)).apply_async() for _ in range(3)]
    head.has_run(1).release()
    assert [result.get(timeout=15) for result in results] == [BALANCE - AMOUNT] * 3
    has_one_effect(head)
    assert (head.runs, head.tails) == (1, 3)


# --- a step that raises on duplicates ---------------------------------------------------------------------------------


def step_that_may_not_be_called_twice_fails_no_finished_task(held: Posting, fresh: Posting) -> None:
    held.has_run(1)
    fresh.call(link=step(held))
    ends_with_one_effect(fresh)
    eventually(lambda: held.deliveries >= 2, 3, "the step that follows")
    held.release()
    ends_with_one_effect(held)
    assert fresh.state == "SUCCESS"


def test_step_that_raises_on_duplicates_fails_no_finished_task(site: ShopSite) -> None:
    held = site.posting("strict", "hold, post")
    step_that_may_not_be_called_twice_fails_no_finished_task(held, site.prepared())


def test_raising_where_a_worker_publishes_is_caught(site: ShopSite) -> None:
    held = site.posting("strict", "hold, post", variant="plain_lock")
    with pytest.raises(AssertionError, match="ended FAILURE: AlreadyQueued"):
        step_that_may_not_be_called_twice_fails_no_finished_task(held, site.prepared(variant="unguarded"))
    held.release()


# --- chords -----------------------------------------------------------------------------------------------------------


def test_chord_with_a_replayed_member_ends_once_with_all_results(site: ShopSite) -> None:
    replayed, fresh = done(site), site.prepared()
    result = chord([step(replayed), step(fresh)], tail(fresh)).apply_async()
    assert result.get(timeout=15) == [BALANCE - AMOUNT] * 2
    assert (replayed.runs, fresh.runs, fresh.tails) == (1, 1, 1)


def chord_with_equal_members_ends_once(site: ShopSite, variant: str = "good") -> None:
    member = site.prepared("post", "sleep 0.2, post", variant=variant)
    result = chord([step(member), step(member)], tail(member)).apply_async()
    eventually(result.ready, 8, "the end of the chord")
    answer = result.get(timeout=1)
    assert answer == [BALANCE - AMOUNT] * 2, f"it answered {answer}"
    assert (member.runs, member.tails) == (1, 1)
    has_one_effect(member)


def test_chord_with_equal_members_ends_once(site: ShopSite) -> None:
    chord_with_equal_members_ends_once(site)


def test_a_chord_of_unguarded_members_is_caught(site: ShopSite) -> None:
    with pytest.raises(AssertionError, match=r"it answered .*80"):
        chord_with_equal_members_ends_once(site, "unguarded")


def test_member_that_fails_for_good_ends_the_chord(site: ShopSite) -> None:
    failing, fresh = site.prepared("final", "post, decline"), site.prepared()
    result = chord([step(failing), step(fresh)], tail(fresh)).apply_async()
    eventually(result.ready)
    assert (result.state, failing.entries, fresh.tails) == ("FAILURE", 0, 0)
