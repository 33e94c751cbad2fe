"""``.fenced(grant)``: writes that check for themselves, on a table without a guard and on one with."""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from django.db import IntegrityError, connection, connections, transaction
from django.db.models import F
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from celery_once_fenced.errors import ConfigError, FencedOffError, FenceMismatchError, GrantError
from celery_once_fenced.grant import Grant, granted
from django_celery_once_fenced.fencing import FencedWrites, unfenced
from tests.fixtures.fenced_app.models import Account, Plain, Posting, Savings, Shelf, Vault
from tests.fixtures.fencing import grant, raw, seen, sql, token
from tests.fixtures.ledger import eventually

pytestmark = pytest.mark.usefixtures("fenced")


@pytest.fixture
def plain(fenced: str) -> Plain:
    """It has seen token 5."""
    made: Plain = Plain.objects.create(balance=100)
    writes(made, 5).update(balance=100)
    return made


def writes(row: Plain, number: int) -> FencedWrites[Plain]:
    found: FencedWrites[Plain] = Plain.objects.filter(pk=row.pk).fenced(grant(number, resource(row)))
    return found


def resource(row: Plain) -> str:
    return f"plain:{row.pk}"


def save(row: Plain, fenced: FencedWrites[Plain]) -> None:
    row.balance = 1
    fenced.save(row)


def save_one_field(row: Plain, fenced: FencedWrites[Plain]) -> None:
    row.balance = 1
    fenced.save(row, update_fields=["balance"])


def bulk_update(row: Plain, fenced: FencedWrites[Plain]) -> None:
    row.balance = 1
    fenced.bulk_update([row], ["balance"])


WRITES: dict[str, Callable[[Plain, FencedWrites[Plain]], object]] = {
    "update": lambda row, fenced: fenced.update(balance=1),
    "F": lambda row, fenced: fenced.filter(balance__gt=0).update(balance=F("balance") - 99),
    "save": save,
    "save(update_fields)": save_one_field,
    "bulk_update": bulk_update,
    "delete": lambda row, fenced: fenced.delete(),
}
every_write = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
Write = Callable[[Plain, FencedWrites[Plain]], object]


@every_write
def test_a_write_is_made_and_stamped(plain: Plain, write: Write) -> None:
    write(plain, writes(plain, 6))
    assert list(Plain.objects.filter(pk=plain.pk).values_list("balance", "fence_token")) in ([(1, 6)], [])


@every_write
def test_a_stale_write_is_refused(plain: Plain, write: Write) -> None:
    with pytest.raises(FencedOffError) as raised:
        write(plain, writes(plain, 4))
    assert (raised.value.resource, raised.value.token) == (resource(plain), 4)
    plain.refresh_from_db()
    assert (plain.balance, plain.fence_token) == (100, 5)


@every_write
def test_a_grant_for_another_resource_is_a_mismatch(plain: Plain, write: Write) -> None:
    with pytest.raises(FenceMismatchError):
        write(plain, Plain.objects.filter(pk=plain.pk).fenced(grant(99, "plain:0")))
    plain.refresh_from_db()
    assert (plain.balance, plain.fence_token) == (100, 5)


@every_write
def test_a_stale_write_that_waited_for_the_newer_one_is_refused(plain: Plain, write: Write) -> None:
    with raw() as newer, ThreadPoolExecutor(1) as thread:
        newer.execute("UPDATE fenced_app_plain SET balance = 70, fence_token = 7 WHERE id = %s", (plain.pk,))
        waiting = thread.submit(in_thread, write, plain, 6)
        eventually(lambda: sql("SELECT 1 FROM pg_locks WHERE NOT granted"))
        newer.commit()
        assert isinstance(waiting.exception(), FencedOffError)
    plain.refresh_from_db()
    assert (plain.balance, plain.fence_token) == (70, 7)


def in_thread(write: Write, plain: Plain, number: int) -> None:
    try:
        write(plain, writes(plain, number))
    finally:
        connections.close_all()


def test_one_stale_row_refuses_them_all() -> None:
    """Shelves name no resource, so the rows count as the grant's."""
    old, new = (Shelf.objects.create(region="r", number=n, batch=uuid.uuid4()) for n in (1, 2))
    sql("ALTER TABLE fenced_app_shelf DISABLE TRIGGER zz_once_fenced")
    sql("UPDATE fenced_app_shelf SET fence_token = 9 WHERE id = %s", new.pk)
    with pytest.raises(FencedOffError):
        Shelf.objects.fenced(grant(8, "shelves")).update(region="s")
    assert Shelf.objects.fenced(grant(9, "shelves")).update(region="s") == 2
    sql("ALTER TABLE fenced_app_shelf ENABLE TRIGGER zz_once_fenced")
    assert (seen(old), seen(new)) == (9, 9)


def test_no_row_is_no_error() -> None:
    assert Plain.objects.fenced(grant(1, "plain:0")).filter(pk=0).update(balance=1) == 0
    assert Plain.objects.fenced(grant(1, "plain:0")).filter(pk=0).delete()[0] == 0


def test_rows_are_narrowed_by_filter_and_exclude(plain: Plain) -> None:
    fenced = writes(plain, 6)
    assert fenced.exclude(balance=100).update(balance=1) == 0
    assert fenced.filter(balance=100).update(balance=2) == 1


def test_annotations_can_be_used(plain: Plain) -> None:
    rows = Plain.objects.filter(pk=plain.pk).annotate(double=F("balance") * 2)
    assert rows.fenced(grant(6, resource(plain))).update(balance=F("double")) == 1
    plain.refresh_from_db()
    assert plain.balance == 200


def test_inserts_are_stamped() -> None:
    fenced = Plain.objects.fenced(grant(3, "plain:9001"))
    assert seen(fenced.create(pk=9001)) == 3
    fenced = Plain.objects.fenced(grant(4, "plain:9002"))
    (made,) = fenced.bulk_create([Plain(pk=9002)])
    assert seen(made) == made.fence_token == 4
    fresh = Plain(pk=9003)
    Plain.objects.fenced(grant(5, "plain:9003")).save(fresh)
    assert seen(fresh) == 5


@pytest.mark.parametrize("write", ["create", "bulk_create", "save"])
def test_an_insert_for_another_resource_is_refused(write: str) -> None:
    fenced = Plain.objects.fenced(grant(3, "plain:0"))
    calls: dict[str, Callable[[], object]] = {
        "create": lambda: fenced.create(balance=-1),
        "bulk_create": lambda: fenced.bulk_create([Plain(balance=-1)]),
        "save": lambda: fenced.save(Plain(balance=-1)),
    }
    with pytest.raises(FenceMismatchError):
        calls[write]()
    assert not Plain.objects.filter(balance=-1).exists()


def test_an_update_cannot_give_a_row_to_another_resource(plain: Plain) -> None:
    with pytest.raises(FenceMismatchError):
        writes(plain, 6).update(id=plain.pk + 10**6)
    assert seen(plain) == 5


def test_a_row_inserted_since_it_was_looked_for_is_not_overwritten(
    plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """save() found no row; then a newer holder made it.  Django's own save would update it unseen."""
    monkeypatch.setattr(FencedWrites, "_look", lambda self, rows: [])
    with pytest.raises(IntegrityError):
        writes(plain, 6).save(Plain(pk=plain.pk, balance=1))
    assert seen(plain) == 5


def test_what_a_saved_instance_knows_is_not_written_back(plain: Plain) -> None:
    instance = Plain.objects.get(pk=plain.pk)
    writes(plain, 6).save(instance)
    writes(plain, 7).update(balance=70)
    instance.save()
    assert seen(plain) == 7


def test_the_grant_is_the_current_one_by_default(plain: Plain) -> None:
    with granted(grant(6, resource(plain))):
        Plain.objects.filter(pk=plain.pk).fenced().update(balance=1)
    assert seen(plain) == 6
    with pytest.raises(GrantError):
        Plain.objects.fenced()


def test_a_grant_without_a_token_is_refused() -> None:
    with pytest.raises(GrantError, match="has none"):
        Plain.objects.fenced(Grant("efficiency"))


def test_a_wrong_template_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plain, "fence_resource", "plain:{number}")
    with pytest.raises(ConfigError, match="'number'"):
        Plain.objects.fenced(grant(1, "plain:1"))


# --- on a table with a guard ------------------------------------------------------------------------------------------


def test_it_carries_its_token_past_a_guard() -> None:
    """In no body's transaction: the guard would keep the column, or refuse under require."""
    account = Account.objects.create()
    Account.objects.fenced(grant(3, f"account:{account.pk}")).filter(pk=account.pk).update(balance=1)
    assert seen(account) == 3
    vault = Vault.objects.fenced(grant(3, "vault:801")).create(pk=801)
    assert seen(vault) == 3


def test_what_was_carried_before_is_carried_again() -> None:
    account, other = Account.objects.create(), Account.objects.create()
    with token(5, f"account:{account.pk}"):
        Account.objects.filter(pk=other.pk).fenced(grant(2, f"account:{other.pk}")).update(balance=1)
        account.save()
        with pytest.raises(FencedOffError):
            Account.objects.filter(pk=other.pk).fenced(grant(1, f"account:{other.pk}")).update(balance=1)
        account.save()
    assert (seen(account), seen(other)) == (5, 2)
    with transaction.atomic():
        Account.objects.filter(pk=other.pk).fenced(grant(2, f"account:{other.pk}")).update(balance=1)
        Account.objects.filter(pk=account.pk).update(balance=1)


def test_a_child_in_multi_table_inheritance_is_locked_with_its_parent() -> None:
    savings = Savings.objects.create(balance=1, rate=1)
    fenced = Savings.objects.filter(pk=savings.pk).fenced
    assert fenced(grant(6, f"account:{savings.pk}")).update(rate=2, balance=2) == 1
    with pytest.raises(FencedOffError):
        fenced(grant(5, f"account:{savings.pk}")).update(rate=3)
    fenced(grant(6, f"account:{savings.pk}")).save(savings)
    assert seen(savings) == 6


def test_partitioned_tables_do_too() -> None:
    with raw() as admin:
        admin.execute("TRUNCATE fenced_app_posting")
    Posting.objects.fenced(grant(3, "posting:1")).create(id=1, region="north")
    Posting.objects.filter(id=1).fenced(grant(4, "posting:1")).update(region="south")
    with pytest.raises(FencedOffError):
        Posting.objects.filter(id=1).fenced(grant(3, "posting:1")).update(region="north")


def test_rows_are_locked_in_the_order_of_their_keys(plain: Plain) -> None:
    with CaptureQueriesContext(connection) as captured:
        writes(plain, 6).update(balance=1)
    (locking,) = [query["sql"] for query in captured if "FOR NO KEY UPDATE" in query["sql"]]
    assert re.search(r'ORDER BY (1|"fenced_app_plain"."id") ASC FOR', locking)


# --- on another database ----------------------------------------------------------------------------------------------


@pytest.fixture
def lite(tmp_path: Path) -> Iterator[str]:
    """An SQLite alias with a table of plain rows."""
    sqlite = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "lite")}
    connections.settings["lite"] = connections.settings["default"] | sqlite | {"OPTIONS": {}}
    with connections["lite"].schema_editor() as editor:
        editor.create_model(Plain)
    yield "lite"
    connections["lite"].close()
    del connections.settings["lite"], connections["lite"]


def test_it_checks_where_there_are_no_fences(lite: str) -> None:
    rows = Plain.objects.using(lite)
    row = rows.fenced(grant(3, "plain:1")).create(pk=1)
    rows.fenced(grant(4, "plain:1")).update(balance=4)
    with pytest.raises(FencedOffError):
        rows.fenced(grant(3, "plain:1")).save(row)
    with pytest.raises(FenceMismatchError):
        rows.fenced(grant(9, "plain:2")).delete()
    assert list(rows.values_list("balance", "fence_token")) == [(4, 4)]


def test_unfenced_is_a_transaction_where_there_are_no_fences(lite: str) -> None:
    with override_settings(CELERY_ONCE_FENCED={"database": lite}):
        with contextlib.suppress(ZeroDivisionError), unfenced(reason="rolled back"):
            Plain.objects.using(lite).create()
            raise ZeroDivisionError
        with unfenced(reason="kept"):
            Plain.objects.using(lite).create()
    assert Plain.objects.using(lite).count() == 1
