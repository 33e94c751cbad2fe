"""What a finished key answers with, and what it refuses (L2, L6, L15)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import transaction

from celery_once_fenced.errors import KeyReusedError
from celery_once_fenced.ledger import ResultOmitted
from django_celery_once_fenced.models import LedgerEntry
from example_project.servers import Servers
from tests.acceptance.correctness_posting import (
    BALANCE,
    Posting,
    ends_with_one_effect,
    has_one_effect,
    has_run_once,
)
from tests.acceptance.correctness_settings import ToTheReplica
from tests.acceptance.correctness_site import ShopSite
from tests.acceptance.shop_app import AMOUNT
from tests.acceptance.workers import PARKED, QUEUE, eventually


@pytest.fixture(scope="module")
def site(servers: Servers, shop: str) -> Iterator[ShopSite]:
    site = ShopSite.on(servers.redis_url, shop)
    with site.worker(concurrency=3):
        yield site
    site.close()


# --- results ----------------------------------------------------------------------------------------------------------


def replay_answers_what_the_first_run_did(site: ShopSite, name: str, variant: str = "good") -> Any:
    posting = site.posting("give", name, variant=variant)
    first = posting.value()
    again = posting.again().get(timeout=10)
    assert (type(again), repr(again)) == (type(first), repr(first)), f"first {first!r}, then {again!r}"
    has_run_once(posting)
    has_one_effect(posting)
    return again


@pytest.mark.parametrize(
    ("name", "value"),
    [("zero", 0), ("text", ""), ("list", []), ("dict", {}), ("false", False), ("none", None)],
)
def test_falsy_result_is_replayed_as_it_was(site: ShopSite, name: str, value: Any) -> None:
    assert replay_answers_what_the_first_run_did(site, name) == value


@pytest.mark.parametrize("name", ["zero", "text", "list", "dict", "false"])
def test_a_replay_of_what_is_true_alone_is_caught(site: ShopSite, name: str) -> None:
    with pytest.raises(AssertionError, match="then None"):
        replay_answers_what_the_first_run_did(site, name, "replays_truth")


def result_that_jsonb_refuses_is_recorded(site: ShopSite, name: str, variant: str = "good") -> Any:
    return replay_answers_what_the_first_run_did(site, name, variant)


def test_result_that_jsonb_refuses_is_recorded(site: ShopSite) -> None:
    assert math.isnan(result_that_jsonb_refuses_is_recorded(site, "nan"))
    assert result_that_jsonb_refuses_is_recorded(site, "nul") == "a\0b"
    assert result_that_jsonb_refuses_is_recorded(site, "surrogate") == "\ud800"


@pytest.mark.parametrize("name", ["nan", "nul", "surrogate"])
def test_jsonb_inside_the_commit_is_caught(site: ShopSite, name: str) -> None:
    with pytest.raises(AssertionError, match="ended FAILURE"):
        result_that_jsonb_refuses_is_recorded(site, name, "keeps_jsonb")


def unrecorded_result_is_marked(site: ShopSite, name: str, reason: str, variant: str = "good") -> None:
    marker = replay_answers_what_the_first_run_did(site, name, variant)
    assert ResultOmitted.matches(marker)
    assert marker["reason"] == reason


@pytest.mark.parametrize(("name", "reason"), [("large", "too_large"), ("object", "not_serialisable")])
def test_unrecorded_result_is_marked_in_run_and_replay(site: ShopSite, name: str, reason: str) -> None:
    unrecorded_result_is_marked(site, name, reason)


@pytest.mark.parametrize(("name", "reason"), [("large", "too_large"), ("object", "not_serialisable")])
def test_a_task_without_a_marker_is_caught(site: ShopSite, name: str, reason: str) -> None:
    with pytest.raises(AssertionError, match=r"it ran 2 times|ended FAILURE: EncodeError"):
        unrecorded_result_is_marked(site, name, reason, "unguarded")


# --- key reuse --------------------------------------------------------------------------------------------------------


def same_key_for_another_call_is_an_error(posting: Posting) -> None:
    posting.value()
    other = posting.task.delay(posting.label, posting.account, "post, sleep 0")
    with pytest.raises(KeyReusedError, match=posting.result.id):
        other.get(timeout=10)
    ends_with_one_effect(posting)


def test_same_key_for_another_call_is_an_error(site: ShopSite) -> None:
    same_key_for_another_call_is_an_error(site.posting())


def test_an_answer_to_another_call_is_caught(site: ShopSite) -> None:
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        same_key_for_another_call_is_an_error(site.posting("loose"))


def refused_call_leaves_the_winners_record(posting: Posting) -> None:
    posting.value()
    refused = posting.task.delay(posting.label, posting.account, "post, sleep 0")
    with pytest.raises(KeyReusedError):
        refused.get(timeout=10)
    posting.again().get(timeout=10)
    has_run_once(posting)
    has_one_effect(posting)


def test_refused_call_leaves_the_winners_record(site: ShopSite) -> None:
    refused_call_leaves_the_winners_record(site.posting())


def test_an_error_handler_that_deletes_by_key_is_caught(site: ShopSite) -> None:
    with pytest.raises(AssertionError, match="it ran 2 times"):
        refused_call_leaves_the_winners_record(site.posting(variant="cleans_up"))


# --- calls in transactions --------------------------------------------------------------------------------------------


def rolled_back_call_holds_nothing(posting: Posting, call: Any) -> None:
    with transaction.atomic():
        call(posting.label, posting.account)
        transaction.set_rollback(True)
    held = posting.site.holds(posting.task, posting.label, posting.account)
    eventually(posting.site.idle)
    assert (held, posting.entries) == ({}, 0), f"posted {posting.entries} times, for nothing"
    posting.call()
    assert posting.result.outcome.status == "enqueued"
    ends_with_one_effect(posting)


def test_rolled_back_call_holds_nothing(site: ShopSite) -> None:
    posting = site.prepared()
    rolled_back_call_holds_nothing(posting, posting.task.delay_on_commit)


def test_a_call_before_the_commit_is_caught(site: ShopSite) -> None:
    posting = site.prepared()
    with pytest.raises(AssertionError, match="for nothing"):
        rolled_back_call_holds_nothing(posting, posting.task.delay)


def test_call_of_a_body_is_made_when_the_body_commits(site: ShopSite) -> None:
    follower = site.prepared()
    posting = site.posting(
        "post",
        f"post, follow {follower.label}, retry",
        f"follow {follower.label}, post",
        account=follower.account,
    )
    posting.value()
    eventually(lambda: follower.entries == 1)
    assert (posting.runs, follower.deliveries) == (2, 1)


# --- redeliveries -----------------------------------------------------------------------------------------------------


def settled(site: ShopSite) -> tuple[Posting, dict[str, Any]]:
    """A finished call with a tail, and its message."""
    posting = site.prepared()
    posting.call_with_tail(queue="parked")
    message = site.caught()
    site.deliver(message, queue=QUEUE)
    eventually(lambda: posting.tails == 1 and site.idle())
    return posting, message


def test_redelivery_of_a_settled_call_is_dropped(site: ShopSite) -> None:
    posting, message = settled(site)
    site.deliver(message, redelivered=True)
    eventually(lambda: posting.deliveries == 2 and site.idle())
    has_one_effect(posting)
    assert (posting.tails, posting.state) == (1, "SUCCESS")


def test_redelivery_without_a_tombstone_is_answered_and_sends_its_tail(site: ShopSite) -> None:
    posting, message = settled(site)
    site.forget_settled()
    site.deliver(message, redelivered=True)
    eventually(lambda: posting.tails == 2 and site.idle())
    ends_with_one_effect(posting)
    assert posting.runs == 1


# --- where the ledger is ----------------------------------------------------------------------------------------------


def test_plugin_asks_no_database_router(site: ShopSite) -> None:
    """The router of these workers would send the plugin's tables to a replica that nobody answers for."""
    assert ToTheReplica().db_for_read(LedgerEntry) == "replica"
    ends_with_one_effect(site.posting())


# --- the newest call counts here, too (E13) ---------------------------------------------------------------------------


def test_newer_call_takes_the_place_of_a_queued_one(site: ShopSite) -> None:
    posting = site.prepared("replaces")
    old = posting.again(queue=PARKED)
    message = site.caught()
    new = posting.task.apply_async((posting.label, posting.account, "look"))
    assert (old.outcome.status, new.outcome.status) == ("enqueued", "replaced")
    assert new.get(timeout=15) == BALANCE
    site.deliver(message)
    eventually(lambda: site.app.AsyncResult(old.id).state == "REVOKED")
    assert (posting.balance, posting.runs) == (BALANCE, 1)


def test_queued_call_runs_with_the_newest_arguments_also_after_a_kill(site: ShopSite) -> None:
    posting = site.prepared("keeps_last")
    first = posting.again(queue=PARKED)
    message = site.caught()
    kept = posting.task.apply_async((posting.label, posting.account, "die", "post"))
    assert (kept.outcome.status, kept.id) == ("kept_last", first.id)
    site.deliver(message)
    assert first.get(timeout=15) == BALANCE - AMOUNT
    assert (posting.balance, posting.runs) == (BALANCE - AMOUNT, 2)
