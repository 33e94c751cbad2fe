"""Fenced tables under Django's ORM: who may write which row, and what the writer is told."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from django.core import serializers
from django.core.management import call_command
from django.db import DatabaseError, connections, transaction
from django.db.models import F

from celery_once_fenced.errors import FencedOffError, FenceMismatchError, GrantError
from celery_once_fenced.grant import Grant, granted
from celery_once_fenced.stores import Completion, Held
from celery_once_fenced.stores.postgres import BEGIN_SQL, begin_params
from django_celery_once_fenced.fencing import translated, unfenced
from django_celery_once_fenced.models import Event
from django_celery_once_fenced.store import DjangoDatabase, conninfo
from tests.fixtures.fenced_app.models import Account, Remark, Savings, Shelf, Vault
from tests.fixtures.fencing import raw, seen, sql, token
from tests.fixtures.ledger import Ledger, operation

pytestmark = pytest.mark.usefixtures("fenced")

DONE = Completion(result="1", omitted=None, retention=60)


@pytest.fixture
def account(fenced: str) -> Account:
    """It has seen token 5."""
    made: Account = Account.objects.create(balance=100)
    with token(5, resource(made)):
        made.save()
    return made


def resource(account: Account) -> str:
    return f"account:{account.pk}"


def in_atomic_save(account: Account) -> None:
    account.balance = 1
    account.save()


def bulk_update(account: Account) -> None:
    account.balance = 1
    Account.objects.bulk_update([account], ["balance"])


def upsert(account: Account) -> None:
    copied = Account(pk=account.pk, balance=1)
    Account.objects.bulk_create(
        [copied], update_conflicts=True, unique_fields=["id"], update_fields=["balance"]
    )


def locked(account: Account) -> None:
    found = Account.objects.select_for_update().get(pk=account.pk)
    found.balance = 1
    found.save(update_fields=["balance"])


WRITES: dict[str, Callable[[Account], object]] = {
    "save": in_atomic_save,
    "update": lambda account: Account.objects.filter(pk=account.pk).update(balance=1),
    "F": lambda account: Account.objects.filter(pk=account.pk).update(balance=F("balance") - 99),
    "bulk_update": bulk_update,
    "bulk_create": upsert,
    "select_for_update": locked,
    "update_or_create": lambda account: Account.objects.update_or_create(
        pk=account.pk, defaults={"balance": 1}
    ),
    "raw SQL": lambda account: sql("UPDATE fenced_app_account SET balance = 1 WHERE id = %s", account.pk),
}
every_write = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)


def balance(account: Account) -> int:
    found: int = Account.objects.get(pk=account.pk).balance
    return found


# --- a transaction that carries a token -------------------------------------------------------------------------------


@every_write
def test_a_write_stamps_the_row(account: Account, write: Callable[[Account], object]) -> None:
    with token(6, resource(account)):
        write(account)
    assert (seen(account), balance(account)) == (6, 1)


@every_write
def test_the_same_holder_writes_again(account: Account, write: Callable[[Account], object]) -> None:
    with token(5, resource(account)):
        write(account)
    assert (seen(account), balance(account)) == (5, 1)


@every_write
def test_a_stale_write_is_refused(account: Account, write: Callable[[Account], object]) -> None:
    with pytest.raises(FencedOffError) as raised, token(4, resource(account)):
        write(account)
    assert (raised.value.resource, raised.value.token) == (resource(account), 4)
    assert (seen(account), balance(account)) == (5, 100)


@every_write
def test_a_grant_for_another_resource_is_a_mismatch(
    account: Account, write: Callable[[Account], object]
) -> None:
    with pytest.raises(FenceMismatchError) as raised, token(99, "account:0"):
        write(account)
    assert raised.value.args == (resource(account), "account:0")
    assert (seen(account), balance(account)) == (5, 100)


@pytest.mark.parametrize("number", [4, 5])
def test_a_delete_is_checked_like_a_write(account: Account, number: int) -> None:
    if number == 4:
        with pytest.raises(FencedOffError), token(number, resource(account)):
            account.delete()
        assert balance(account) == 100
    else:
        with token(number, resource(account)):
            Account.objects.filter(pk=account.pk).delete()
        assert not Account.objects.filter(pk=account.pk).exists()


def test_one_stale_row_keeps_a_whole_statement_out() -> None:
    """A partial stale write does not pass, as it would where the number of changed rows decides."""
    fresh, newer = (
        Shelf.objects.create(region="r", number=1, batch="6b0b1a4a-7c3e-4f5f-9a55-1f3b16d1f6a4")
        for _ in range(2)
    )
    shared = "{r}:%:1'6b0b1a4a-7c3e-4f5f-9a55-1f3b16d1f6a4"
    with token(7, shared):
        Shelf.objects.filter(pk=newer.pk).update(region="r")
    with pytest.raises(FencedOffError), token(6, shared):
        Shelf.objects.filter(pk__in=[fresh.pk, newer.pk]).update(region="r")
    assert (seen(fresh), seen(newer)) == (None, 7)


def test_an_insert_is_stamped_and_must_be_of_the_resource() -> None:
    with token(3, "account:1001"):
        made = Account.objects.create(pk=1001)
    assert seen(made) == 3
    with pytest.raises(FenceMismatchError), token(3, "account:1001"):
        Account.objects.create(pk=1002)


def test_a_key_of_the_database_is_there_before_the_guard_looks() -> None:
    with pytest.raises(FenceMismatchError) as raised, token(3, "account:0"):
        Account.objects.create()
    assert raised.value.args[0] != "account:"


def test_a_row_cannot_be_given_to_another_resource(account: Account) -> None:
    with pytest.raises(FenceMismatchError) as raised, token(6, resource(account)):
        Account.objects.filter(pk=account.pk).update(id=account.pk + 10**6)
    assert raised.value.args == (f"account:{account.pk + 10**6}", resource(account))


def test_a_body_goes_on_after_a_refusal_in_a_savepoint(account: Account) -> None:
    other = Account.objects.create()
    with token(6, resource(account)):
        with pytest.raises(FenceMismatchError), transaction.atomic():
            Account.objects.filter(pk=other.pk).update(balance=1)
        Account.objects.filter(pk=account.pk).update(balance=1)
    assert (balance(account), balance(other)) == (1, 0)


def test_a_cascade_is_checked_too(account: Account) -> None:
    remark = Remark.objects.create(account=account, text="")
    with token(9, resource(account)):
        Remark.objects.filter(pk=remark.pk).update(text="seen 9")
    with pytest.raises(FencedOffError), token(8, resource(account)):
        account.delete()
    with token(9, resource(account)):
        account.delete()


# --- case 49: two resources on one row --------------------------------------------------------------------------------


def test_two_resources_on_one_row_do_not_shut_each_other_out(account: Account) -> None:
    """Their tokens say nothing of each other: the higher one must not refuse the other's live holder for ever."""
    with pytest.raises(FenceMismatchError), token(1000, "audit:7"):
        Account.objects.filter(pk=account.pk).update(balance=1)
    with token(6, resource(account)):
        Account.objects.filter(pk=account.pk).update(balance=2)
    assert (seen(account), balance(account)) == (6, 2)


def test_a_row_that_moves_to_another_resource_brings_no_token_along(account: Account) -> None:
    remark = Remark.objects.create(account=account, text="")
    with token(50, resource(account)):
        remark.save()
    other = Account.objects.create()
    Remark.objects.filter(pk=remark.pk).update(account=other)
    with token(2, resource(other)):
        Remark.objects.filter(pk=remark.pk).update(text="the live holder writes")
    assert sql("SELECT fence_token FROM fenced_app_remark WHERE id = %s", remark.pk) == [(2,)]


# --- case 50: save() of an old instance -------------------------------------------------------------------------------


def test_an_old_instance_cannot_lower_the_column(account: Account) -> None:
    old = Account.objects.get(pk=account.pk)
    with token(8, resource(account)):
        account.save()
    old.save()
    assert seen(account) == 8


@pytest.mark.parametrize("lower", ["3", "null", "99"])
def test_no_statement_without_a_token_moves_the_column(account: Account, lower: str) -> None:
    sql(f"UPDATE fenced_app_account SET fence_token = {lower} WHERE id = %s", account.pk)
    assert seen(account) == 5


def test_a_statement_with_a_token_moves_it_to_that_token_only(account: Account) -> None:
    with token(6, resource(account)):
        sql("UPDATE fenced_app_account SET fence_token = 1000 WHERE id = %s", account.pk)
    assert seen(account) == 6


def test_a_copy_of_an_instance_starts_without_a_token(account: Account) -> None:
    copied = copy.copy(Account.objects.get(pk=account.pk))
    copied.pk, copied._state.adding = None, True
    copied.save()
    assert seen(copied) is None
    (made,) = Account.objects.bulk_create([Account(fence_token=77)])
    assert seen(made) is None


def test_a_restored_dump_keeps_the_column(account: Account) -> None:
    dump = serializers.serialize("json", [Account.objects.get(pk=account.pk)])
    Account.objects.filter(pk=account.pk).delete()
    for one in serializers.deserialize("json", dump):
        one.save()
    assert seen(account) == 5


# --- stale, and the application checks nothing ------------------------------------------------------------------------


def test_case_25_a_zombie_is_refused_by_the_row_it_writes(ledger: Ledger) -> None:
    """A real claim, begun and then superseded; its session was not found for eviction."""
    account = Account.objects.create(balance=100)
    zombie = ledger.lapsed(operation(resource=resource(account)))
    with psycopg.connect(**conninfo("default")) as late:
        late.execute(BEGIN_SQL, begin_params(zombie))
        late.execute("SET LOCAL application_name = 'hidden'")
        successor = ledger.hold(operation(resource=resource(account)))
        work(successor, account, 90)
        with pytest.raises(psycopg.DatabaseError, match="newer") as raised:
            late.execute("UPDATE fenced_app_account SET balance = 0 WHERE id = %s", (account.pk,))
        assert raised.value.sqlstate == "OF001"
    assert (seen(account), balance(account)) == (successor.token, 90)


def test_a_body_that_writes_another_accounts_row_fails_with_the_mismatch(
    ledger: Ledger, account: Account
) -> None:
    held = ledger.hold(operation(resource="account:0"))
    with pytest.raises(FenceMismatchError):
        work(held, account, 1)
    assert balance(account) == 100


def work(held: Held, account: Account, value: int) -> None:
    with DjangoDatabase("default").transaction(held) as opened:
        Account.objects.filter(pk=account.pk).update(balance=value)
        opened.complete(held, DONE)


# --- multi-table inheritance ------------------------------------------------------------------------------------------


def test_both_tables_of_a_child_are_guarded() -> None:
    savings = Savings.objects.create(balance=1, rate=1)
    with token(6, resource(savings)):
        savings.save()
    assert (seen(savings), child_token(savings)) == (6, 6)
    with pytest.raises(FencedOffError), token(5, resource(savings)):
        Savings.objects.filter(pk=savings.pk).update(rate=9)
    with pytest.raises(FencedOffError), token(5, resource(savings)):
        Savings.objects.filter(pk=savings.pk).update(balance=9)
    with pytest.raises(FenceMismatchError), token(9, "account:0"):
        Savings.objects.filter(pk=savings.pk).update(rate=9)


def test_a_child_is_created_and_deleted_under_one_token() -> None:
    with token(3, "account:5001"):
        savings = Savings.objects.create(pk=5001, rate=1)
    with pytest.raises(FencedOffError), token(2, "account:5001"):
        savings.delete()
    with token(3, "account:5001"):
        savings.delete()
    assert not Account.objects.filter(pk=5001).exists()


def child_token(savings: Savings) -> Any:
    return sql("SELECT fence_token FROM fenced_app_savings WHERE account_ptr_id = %s", savings.pk)[0][0]


# --- require ----------------------------------------------------------------------------------------------------------

WITHOUT: dict[str, Callable[[], object]] = {
    "create": Vault.objects.create,
    "update": lambda: Vault.objects.update(content="x"),
    "delete": lambda: Vault.objects.all().delete(),
    "raw SQL": lambda: sql("UPDATE fenced_app_vault SET content = 'x'"),
}


@pytest.fixture
def vault(fenced: str) -> Vault:
    with unfenced("a test"):
        made: Vault = Vault.objects.create(content="old")
    return made


@pytest.mark.parametrize("write", WITHOUT.values(), ids=WITHOUT)
def test_require_refuses_a_write_without_a_token(vault: Vault, write: Callable[[], object]) -> None:
    with pytest.raises(GrantError, match=r"fenced_app_vault takes no write .* unfenced"):
        write()
    vault.refresh_from_db()
    assert vault.content == "old"


def test_require_lets_a_token_write(vault: Vault) -> None:
    with token(1, f"vault:{vault.pk}"):
        Vault.objects.filter(pk=vault.pk).update(content="new")
    assert seen(vault) == 1


def test_a_detached_grant_is_refused_too(vault: Vault) -> None:
    with granted(Grant("detached")), pytest.raises(GrantError):
        vault.save()


def test_unfenced_lets_it_write_and_keeps_the_token(vault: Vault) -> None:
    with token(4, f"vault:{vault.pk}"):
        vault.save()
    with unfenced(reason="by hand"):
        Vault.objects.filter(pk=vault.pk).update(content="new")
    assert seen(vault) == 4


def test_unfenced_is_recorded_with_reason_and_actor() -> None:
    with unfenced(reason="ticket 4711", actor="ada"):
        pass
    event = Event.objects.filter(kind="table.unfenced").latest("id")
    assert (event.detail, event.actor) == ("ticket 4711", "ada")
    with unfenced(reason="nobody said who"):
        (user,) = sql("SELECT current_user")[0]
    assert Event.objects.filter(kind="table.unfenced").latest("id").actor == user


def test_what_was_rolled_back_is_not_recorded(vault: Vault) -> None:
    with contextlib.suppress(ZeroDivisionError), unfenced(reason="comes to nothing"):
        Vault.objects.update(content="new")
        raise ZeroDivisionError
    assert not Event.objects.filter(detail="comes to nothing").exists()


@pytest.mark.parametrize("reason", ["", "  "])
def test_unfenced_needs_a_reason(reason: str) -> None:
    with pytest.raises(GrantError, match="reason"), unfenced(reason=reason):
        pytest.fail("the block ran")


def test_unfenced_ends_with_its_block(vault: Vault) -> None:
    with transaction.atomic():
        with unfenced(reason="outer"):
            with unfenced(reason="inner"):
                vault.save()
            vault.save()
        with pytest.raises(GrantError), transaction.atomic():
            vault.save()
        with pytest.raises(ZeroDivisionError), unfenced(reason="fails"):
            raise ZeroDivisionError
        with pytest.raises(GrantError), transaction.atomic():
            vault.save()


def test_unfenced_does_not_help_a_stale_holder(vault: Vault) -> None:
    with token(4, f"vault:{vault.pk}"):
        vault.save()
    with pytest.raises(FencedOffError), token(3, f"vault:{vault.pk}"), unfenced(reason="I insist"):
        vault.save()


def test_unfenced_is_this_transactions_alone(vault: Vault) -> None:
    with (
        unfenced(reason="mine"),
        raw() as other,
        pytest.raises(psycopg.DatabaseError, match="without a fencing"),
    ):
        other.execute("UPDATE fenced_app_vault SET content = 'x' WHERE id = %s", (vault.pk,))


# --- errors -----------------------------------------------------------------------------------------------------------


def test_the_drivers_error_is_the_cause(vault: Vault) -> None:
    with pytest.raises(GrantError) as raised:
        vault.save()
    assert isinstance(raised.value.__cause__, DatabaseError)
    assert raised.value.__cause__.__cause__.sqlstate == "OF005"  # type: ignore[union-attr]


def test_what_goes_past_djangos_cursors_is_translated_on_request(account: Account) -> None:
    with pytest.raises(FenceMismatchError), token(6, resource(account)), translated(), transaction.atomic():
        copy_in("fenced_app_account (id, balance)", "70001\t1\n")


def copy_in(table: str, rows: str) -> None:
    with connections["default"].cursor() as cursor, cursor.copy(f"COPY {table} FROM STDIN") as stream:
        stream.write(rows)


def test_other_errors_stay_what_they_are(account: Account) -> None:
    with pytest.raises(DatabaseError), translated():
        sql("SELECT 1/0")
    with pytest.raises(ZeroDivisionError), translated():
        raise ZeroDivisionError


def test_the_translation_survives_a_wrapper_that_was_open_when_the_connection_was_made(vault: Vault) -> None:
    connection = connections["default"]
    connection.close()
    connection.execute_wrappers.clear()
    with connection.execute_wrapper(lambda execute, *statement: execute(*statement)):
        connection.ensure_connection()
    assert len(connection.execute_wrappers) == 1
    with pytest.raises(GrantError):
        vault.save()


# --- the rest of the project ------------------------------------------------------------------------------------------


def test_fixtures_of_the_project_can_be_flushed(account: Account) -> None:
    """TRUNCATE stays free: test runners need it."""
    call_command("flush", interactive=False, verbosity=0, stdout=io.StringIO())
    assert Account.objects.count() == Vault.objects.count() == 0
