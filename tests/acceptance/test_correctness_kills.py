"""Processes and sessions that are killed at work: it is done once, by a takeover or a new attempt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
from django.db import OperationalError

from celery_once_fenced.errors import ExhaustedError
from example_project.servers import Servers
from tests.acceptance.correctness_posting import Posting, ends_with_one_effect
from tests.acceptance.correctness_site import ShopSite
from tests.acceptance.workers import eventually


@pytest.fixture(scope="module")
def site(servers: Servers, shop: str) -> Iterator[ShopSite]:
    site = ShopSite.on(servers.redis_url, shop)
    with site.worker(concurrency=5):
        yield site
    site.close()


@pytest.fixture(scope="module")
def postings(site: ShopSite) -> Mapping[str, Posting]:
    """All that take a while, begun at once."""
    return {
        "hopeless": site.posting("thrice", "post, die"),
        "in the end": site.posting("post", "die", "die", "die", "post"),
        "granted": site.posting(at={"granted": "die"}),
        "begun": site.posting(at={"begun": "die"}),
        "written": site.posting(at={"written": "die"}),
        "completed": site.posting(at={"completed": "die"}),
        "records_before": site.posting(variant="records_before", at={"completed": "die"}),
        "records_after": site.posting(variant="records_after", at={"written": "die"}),
    }


# --- the process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["granted", "begun", "written", "completed"])
def test_killed_work_is_done_once_by_a_takeover(postings: Mapping[str, Posting], place: str) -> None:
    ends_with_one_effect(postings[place])
    assert (postings[place].ledger.attempt, postings[place].ledger.takeovers) == (2, 1)


def test_a_ledger_that_is_ahead_of_the_work_is_caught(postings: Mapping[str, Posting]) -> None:
    with pytest.raises(AssertionError, match="posted 0 times"):
        ends_with_one_effect(postings["records_before"])


def test_a_ledger_that_is_behind_the_work_is_caught(postings: Mapping[str, Posting]) -> None:
    with pytest.raises(AssertionError, match="posted 2 times"):
        ends_with_one_effect(postings["records_after"])


# --- the session ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["post, disconnect", "disconnect, post", "post, idle"])
def test_work_whose_session_is_ended_is_done_by_a_new_attempt(site: ShopSite, ending: str) -> None:
    posting = site.posting("post", ending, "post")
    ends_with_one_effect(posting)
    assert (posting.runs, posting.ledger.attempt, posting.ledger.takeovers) == (2, 2, 0)


def test_lost_session_that_the_task_retries_itself_is_not_done_twice(site: ShopSite) -> None:
    posting = site.posting("autoretry", "post, disconnect", "post")
    ends_with_one_effect(posting)
    assert (posting.runs, posting.deliveries) == (2, 2)


def test_taking_a_lost_session_for_a_failure_is_caught(site: ShopSite) -> None:
    with pytest.raises(AssertionError, match="ended FAILURE"):
        ends_with_one_effect(site.posting("post", "post, disconnect", "post", variant="trusts_the_error"))


def test_work_that_loses_every_session_fails_in_the_end(site: ShopSite) -> None:
    posting = site.posting("thrice", "post, disconnect")
    assert isinstance(posting.ends("FAILURE"), OperationalError)
    eventually(lambda: not site.pending(posting.result.id))
    assert (posting.runs, posting.entries) == (3, 0)


# --- too often --------------------------------------------------------------------------------------------------------


def is_given_up_after_two_takeovers(posting: Posting) -> None:
    error = posting.ends("FAILURE", within=30)
    assert isinstance(error, ExhaustedError)
    assert (posting.runs, posting.entries, posting.ledger.state) == (3, 0, "failed")


def test_work_that_kills_its_workers_is_given_up(postings: Mapping[str, Posting]) -> None:
    is_given_up_after_two_takeovers(postings["hopeless"])


def test_later_calls_of_what_was_given_up_are_told_so(postings: Mapping[str, Posting]) -> None:
    hopeless = postings["hopeless"]
    hopeless.ends("FAILURE", within=30)
    with pytest.raises(ExhaustedError):
        hopeless.again().get(timeout=10)
    assert hopeless.runs == 3


def test_work_that_is_never_given_up_is_caught(postings: Mapping[str, Posting]) -> None:
    with pytest.raises(AssertionError, match="ended SUCCESS"):
        is_given_up_after_two_takeovers(postings["in the end"])
