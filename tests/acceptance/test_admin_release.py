"""A person releases a hold in the admin while its task runs, in a real worker: what the task can still do, and the next one."""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Callable, Iterator
from html import unescape
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connections
from django.test import Client

from celery_once_fenced import runtime
from example_project.servers import Servers
from tests.acceptance.correctness_posting import BALANCE, Posting, has_one_effect
from tests.acceptance.correctness_site import ShopSite
from tests.acceptance.shop_app import AMOUNT
from tests.acceptance.workers import Site, Trial, eventually

LOCKS = "/admin/once_fenced/heldlock/"
Admin = Callable[[Site], Client]


@pytest.fixture
def admin(shop: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Admin]:
    """A browser of somebody who may, at an admin that has the settings of a site's workers."""

    def at(site: Site) -> Client:
        monkeypatch.setattr(runtime, "current", lambda: site.runtime)
        user = User.objects.create_superuser(secrets.token_hex(4))
        client = Client()
        client.force_login(user)
        return client

    yield at
    with connections["default"].cursor() as cursor:
        cursor.execute("TRUNCATE auth_user CASCADE")


def release(client: Client, key: str, action: str) -> str:
    """The whole way: search for the key, select it, read what will happen, give a reason."""
    page = client.get(LOCKS, {"q": key, "slot": "running"}).text
    (seen,) = re.findall(r'value="([^"]*)" class="action-select"', page)
    asked = client.post(LOCKS, {"action": action, "_selected_action": unescape(seen)}).text
    assert "What will happen" in asked
    data = {"_selected_action": unescape(seen), "confirmed": "1", "reason": "it hangs"}
    return client.post(f"{LOCKS}ask/{action}/", data, follow=True).text


# --- the correctness tier ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fenced(servers: Servers, shop: str) -> Iterator[ShopSite]:
    site = ShopSite.on(servers.redis_url, shop)
    with contextlib.closing(site), site.worker(concurrency=4):
        yield site


def first_commits_nothing_and_the_next_has_a_higher_token(posting: Posting, free: Callable[[], str]) -> None:
    posting.has_run(1)
    eventually(lambda: posting.fence.holder is not None)
    first = posting.fence.token
    assert ": released" in free()
    posting.release()  # the body goes on, and ends
    posting.ends("SUCCESS", within=30)
    assert posting.fence.token > first
    assert posting.ledger.token > first
    assert posting.events("fence.rejected")
    has_one_effect(posting)
    assert posting.result.get() == BALANCE - AMOUNT


def test_what_was_bumped_commits_nothing_and_the_next_run_has_a_higher_token(
    fenced: ShopSite, admin: Admin
) -> None:
    client = admin(fenced)
    posting = fenced.posting("post", "post, hold, look", "post")
    first_commits_nothing_and_the_next_has_a_higher_token(
        posting, lambda: release(client, f"account:{posting.account}", "bump")
    )


def test_a_release_without_the_bump_is_caught(fenced: ShopSite, admin: Admin) -> None:
    """The control: the lease alone is freed, as the page says, and the task commits with its token."""
    client = admin(fenced)
    posting = fenced.posting("post", "post, hold, look", "post")
    with pytest.raises(AssertionError):
        first_commits_nothing_and_the_next_has_a_higher_token(
            posting, lambda: release(client, f"account:{posting.account}", "release")
        )
    has_one_effect(posting)
    assert posting.runs == 1


# --- the efficiency tier ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def leased(sites: Callable[..., Site]) -> Iterator[Site]:
    site = sites()
    with site.worker(concurrency=4):
        yield site


def late_one_ends_and_frees_nothing_of_the_next(trial: Trial, free: Callable[[], Any]) -> None:
    trial.has_run(1)
    assert ": released" in free()
    eventually(lambda: trial.again("", "hold second").outcome.status == "enqueued", 10)
    trial.has_run(2)
    holder = trial.running
    assert holder
    trial.release("first")
    assert trial.value(within=30) == f"{trial.label}#1"
    assert trial.running == holder
    assert trial.again().outcome.reason == "running"
    trial.release("second")


def test_what_was_released_ends_and_frees_nothing_of_its_successors(leased: Site, admin: Admin) -> None:
    client = admin(leased)
    trial = leased.begin("early", "hold first", "hold second")
    late_one_ends_and_frees_nothing_of_the_next(trial, lambda: release(client, trial.label, "release"))
    counted = leased.stats(trial.task)
    assert (counted["released_by_hand"] >= 1, counted.get("lost", 0)) == (True, 0)


def test_a_task_that_deletes_whatever_is_there_is_caught(leased: Site, admin: Admin) -> None:
    client = admin(leased)
    trial = leased.begin("late", "hold first", "hold second", variant="plain_delete")
    with pytest.raises(AssertionError):
        late_one_ends_and_frees_nothing_of_the_next(trial, lambda: release(client, trial.label, "release"))
    trial.release("second")
