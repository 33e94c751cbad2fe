"""Bodies that fail, retry, or are betrayed at the end: one commit, and the right outcome (L3, L8, L10)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_once_fenced.errors import GrantError
from example_project.servers import Servers
from tests.acceptance.correctness_posting import Posting, ends_with_one_effect, has_run_once
from tests.acceptance.correctness_site import ShopSite
from tests.acceptance.shop_app import DeclinedError
from tests.acceptance.workers import eventually


@pytest.fixture(scope="module")
def site(servers: Servers, shop: str) -> Iterator[ShopSite]:
    site = ShopSite.on(servers.redis_url, shop)
    with site.worker(concurrency=4):
        yield site
    site.close()


# --- retries ----------------------------------------------------------------------------------------------------------


def attempts_that_retry_leave_nothing(posting: Posting, runs: int) -> None:
    ends_with_one_effect(posting)
    assert posting.runs == runs


@pytest.mark.parametrize(
    ("name", "acts"),
    [("post", ("post, retry", "post")), ("autoretry", ("post, fail", "post, fail", "post"))],
)
def test_attempts_that_retry_leave_nothing(site: ShopSite, name: str, acts: tuple[str, ...]) -> None:
    posting = site.posting(name, *acts)
    attempts_that_retry_leave_nothing(posting, len(acts))
    assert (posting.ledger.attempt, posting.ledger.takeovers) == (len(acts), 0)


def test_retrying_without_a_transaction_is_caught(site: ShopSite) -> None:
    with pytest.raises(AssertionError, match="posted 2 times"):
        attempts_that_retry_leave_nothing(site.posting("post", "post, retry", "post", variant="unguarded"), 2)


def test_retries_are_no_takeovers(site: ShopSite) -> None:
    attempts_that_retry_leave_nothing(site.posting("thrice", *["post, retry"] * 4, "post"), 5)


def test_key_is_retryable_while_a_retry_waits(site: ShopSite) -> None:
    posting = site.posting("post", "post, retry 0.5", "post")
    eventually(lambda: posting.state == "RETRY")
    assert (posting.ledger.state, posting.entries) == ("retryable", 0)
    assert posting.again().outcome.status == "duplicate"
    ends_with_one_effect(posting)


# --- failures ---------------------------------------------------------------------------------------------------------


def test_key_of_a_failure_may_be_called_again(site: ShopSite) -> None:
    posting = site.posting("post", "post, fail", "post")
    assert isinstance(posting.ends("FAILURE"), ValueError)
    assert (posting.ledger.state, posting.entries) == ("retryable", 0)
    posting.call()
    ends_with_one_effect(posting)


def final_error_ends_the_key(posting: Posting) -> None:
    first = posting.ends("FAILURE")
    later = posting.again()
    with pytest.raises(type(first), match=posting.label):
        later.get(timeout=10)
    assert isinstance(first, DeclinedError)
    has_run_once(posting)
    assert (posting.entries, posting.ledger.state) == (0, "failed")


def test_final_error_ends_the_key_and_is_raised_for_duplicates(site: ShopSite) -> None:
    final_error_ends_the_key(site.posting("final", "post, decline"))


def test_an_error_that_ends_nothing_is_caught(site: ShopSite) -> None:
    with pytest.raises(AssertionError, match="it ran 2 times"):
        final_error_ends_the_key(site.posting("post", "post, decline"))


def test_body_that_ends_its_transaction_is_told_so(site: ShopSite) -> None:
    posting = site.posting("post", "post, commit")
    error = posting.ends("FAILURE")
    assert isinstance(error, GrantError)
    assert "atomic=False" in str(error)
    assert posting.ledger.state == "retryable"


# --- after the commit -------------------------------------------------------------------------------------------------


def raising_hook_fails_no_committed_work(posting: Posting) -> None:
    ends_with_one_effect(posting)
    assert posting.runs == 1


def test_raising_hook_fails_no_committed_work(site: ShopSite) -> None:
    raising_hook_fails_no_committed_work(site.posting("post", "post, hook"))


def test_taking_a_raising_hook_for_a_failure_is_caught(site: ShopSite) -> None:
    with pytest.raises(AssertionError, match="ended FAILURE"):
        raising_hook_fails_no_committed_work(site.posting("post", "post, hook", variant="trusts_the_error"))
