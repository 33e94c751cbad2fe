"""Tables that defend themselves, written to by real workers: a stale holder, a stranger, another resource, an old
instance.  Nothing in the bodies checks anything that PostgreSQL does not.
"""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import pytest

from celery_once_fenced.errors import FenceMismatchError, GrantError
from django_celery_once_fenced.models import Fence
from example_project.servers import Servers
from tests.acceptance.correctness_orders import Orders
from tests.acceptance.correctness_posting import BALANCE, is_frozen
from tests.acceptance.fenced_tables_app import build
from tests.acceptance.shop_app import AMOUNT, POSTGRES
from tests.acceptance.workers import Site, Worker, eventually
from tests.fixtures.fenced_app.models import Account, Naive, Plain, Vault
from tests.fixtures.fencing import token


class Tables(Site):
    """A site whose workers have the app of fenced tables."""

    @cached_property
    def app(self) -> Any:
        return build(self.settings)

    def start(self, **options: Any) -> Worker:
        return super().start(**{"app": "tests.acceptance.fenced_tables_app", **options})

    def call(self, name: str, row: Any, label: str = "") -> Any:
        return self.app.tasks[name].delay(label or uuid.uuid4().hex[:8], row.pk)

    def done(self, name: str, row: Any) -> Any:
        return self.call(name, row).get(timeout=15)


@pytest.fixture(scope="module")
def site(servers: Servers, fenced: str) -> Iterator[Tables]:
    site = Tables.at(servers.redis_url, **{POSTGRES: fenced})
    assert isinstance(site, Tables)
    with site.worker(concurrency=4):
        yield site
    site.close()


def balance(row: Any) -> int:
    return int(type(row).objects.values_list("balance", flat=True).get(pk=row.pk))


def seen(row: Any) -> int | None:
    number: int | None = type(row).objects.values_list("fence_token", flat=True).get(pk=row.pk)
    return number


# --- a stale holder (case 25) -----------------------------------------------------------------------------------------


def late_write_of_a_zombie_is_refused(site: Tables, name: str, row: Any) -> None:
    """It is frozen outside any transaction, so there is no session to end: only the row can refuse it."""
    orders, label = Orders.of(site.app), uuid.uuid4().hex[:8]
    orders.give(label, "begun", "freeze")
    late = site.call(name, row, label)
    eventually(lambda: orders.stopped(label) != 0 and is_frozen(orders.stopped(label)), what="the freeze")
    site.done(name, row)
    os.kill(orders.stopped(label), signal.SIGCONT)
    late.get(timeout=30)
    assert site.stage.runs(label) == 2
    assert balance(row) == BALANCE - 2 * AMOUNT, f"the balance is {balance(row)} after two withdrawals"


def test_late_write_of_a_zombie_is_refused(site: Tables) -> None:
    account = Account.objects.create(balance=BALANCE)
    late_write_of_a_zombie_is_refused(site, "good.withdraw", account)
    assert seen(account) == Fence.objects.get(pk=f"account:{account.pk}").token


def test_a_write_that_nothing_checks_is_caught(site: Tables) -> None:
    plain = Plain.objects.create(balance=BALANCE)
    with pytest.raises(AssertionError, match="the balance is 70"):
        late_write_of_a_zombie_is_refused(site, "naive.withdraw", plain)


# --- a stranger -------------------------------------------------------------------------------------------------------


def task_without_a_token_is_refused(site: Tables, row: Any) -> None:
    with pytest.raises(GrantError, match="takes no write without a fencing token"):
        site.app.tasks["bare.fill"].delay(type(row).__name__, row.pk, "1").get(timeout=15)


def test_task_without_a_token_is_refused_by_the_table(site: Tables) -> None:
    with token(1, "vault:1"):
        vault = Vault.objects.create(pk=1, content="kept")
    task_without_a_token_is_refused(site, vault)
    vault.refresh_from_db()
    assert vault.content == "kept"


def test_a_table_without_a_guard_is_caught(site: Tables) -> None:
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        task_without_a_token_is_refused(site, Plain.objects.create())


# --- another resource (case 49) ---------------------------------------------------------------------------------------


def holder_of_another_resource_shuts_nobody_out(site: Tables, variant: str, row: Any) -> None:
    """Its tokens are higher, which says nothing."""
    Fence.objects.update_or_create(resource=f"audit:{row.pk}", defaults={"token": 1000})
    with pytest.raises(FenceMismatchError):
        site.done(f"{variant}.audit", row)
    site.done(f"{variant}.account", row)
    assert balance(row) == BALANCE - AMOUNT


def test_holder_of_another_resource_is_told_and_shuts_nobody_out(site: Tables) -> None:
    account = Account.objects.create(balance=BALANCE)
    holder_of_another_resource_shuts_nobody_out(site, "good", account)
    assert seen(account) == Fence.objects.get(pk=f"account:{account.pk}").token


def test_tokens_that_cannot_be_compared_are_caught(site: Tables) -> None:
    row = Naive.objects.create(balance=BALANCE)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        holder_of_another_resource_shuts_nobody_out(site, "naive", row)
    with pytest.raises(ValueError, match="the row has seen a newer token"):
        site.done("naive.account", row)


# --- an old instance (case 50) ----------------------------------------------------------------------------------------


def old_instance_does_not_lower_the_column(site: Tables, variant: str, row: Any) -> None:
    label = uuid.uuid4().hex[:8]
    saved = site.app.tasks["bare.save_old"].delay(type(row).__name__, row.pk, label)
    eventually(lambda: site.stage.runs(label) == 1, what="the old instance")
    site.done(f"{variant}.account", row)
    before = seen(row)
    assert before is not None
    site.stage.release(label)
    saved.get(timeout=15)
    assert seen(row) == before, f"the column went from {before} to {seen(row)}"


def test_old_instance_does_not_lower_the_column(site: Tables) -> None:
    old_instance_does_not_lower_the_column(site, "good", Account.objects.create(balance=BALANCE))


def test_a_column_like_any_other_is_caught(site: Tables) -> None:
    with pytest.raises(AssertionError, match="the column went from"):
        old_instance_does_not_lower_the_column(site, "naive", Naive.objects.create(balance=BALANCE))
