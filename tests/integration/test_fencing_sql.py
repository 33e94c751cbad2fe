"""The guard under SQL that no ORM writes: upsert, MERGE, COPY, partitions, TRUNCATE, and two sessions at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg import Connection

from django_celery_once_fenced.fencing import unfenced
from tests.fixtures.fenced_app.models import Account, Vault
from tests.fixtures.fencing import raw, seen, sql, token
from tests.fixtures.ledger import eventually

pytestmark = pytest.mark.usefixtures("fenced")

STALE, MISMATCH, REQUIRED = "OF001", "OF007", "OF005"

Write = Callable[[Connection[Any], int], object]


def copy_into(connection: Connection[Any], table: str, rows: str) -> None:
    with connection.cursor().copy(f"COPY {table} FROM STDIN") as stream:
        stream.write(rows)


MERGE = """
MERGE INTO fenced_app_account a USING (VALUES (%s::bigint)) AS new (id) ON a.id = new.id
WHEN MATCHED THEN UPDATE SET balance = 1 WHEN NOT MATCHED THEN INSERT (id, balance) VALUES (new.id, 1)
"""
MERGE_DELETE = "MERGE INTO fenced_app_account a USING (VALUES (%s::bigint)) AS n (id) ON a.id = n.id WHEN MATCHED THEN DELETE"
UPSERT = """
INSERT INTO fenced_app_account (id, balance) VALUES (%s, 1)
ON CONFLICT (id) DO UPDATE SET balance = excluded.balance, fence_token = excluded.fence_token
"""
CTE = """
WITH gone AS (UPDATE fenced_app_account SET balance = 1 WHERE id = %s RETURNING id) SELECT count(*) FROM gone
"""
CHANGES: dict[str, Write] = {
    "UPDATE": lambda c, pk: c.execute("UPDATE fenced_app_account SET balance = 1 WHERE id = %s", (pk,)),
    "DELETE": lambda c, pk: c.execute("DELETE FROM fenced_app_account WHERE id = %s", (pk,)),
    "upsert": lambda c, pk: c.execute(UPSERT, (pk,)),
    "MERGE": lambda c, pk: c.execute(MERGE, (pk,)),
    "MERGE that deletes": lambda c, pk: c.execute(MERGE_DELETE, (pk,)),
    "CTE": lambda c, pk: c.execute(CTE, (pk,)),
}
INSERTS: dict[str, Write] = {
    "INSERT": lambda c, pk: c.execute("INSERT INTO fenced_app_account (id, balance) VALUES (%s, 1)", (pk,)),
    "upsert": CHANGES["upsert"],
    "MERGE": CHANGES["MERGE"],
    "COPY": lambda c, pk: copy_into(c, "fenced_app_account (id, balance)", f"{pk}\t1\n"),
}
every_change = pytest.mark.parametrize("write", CHANGES.values(), ids=CHANGES)
every_insert = pytest.mark.parametrize("write", INSERTS.values(), ids=INSERTS)


@pytest.fixture
def account(fenced: str) -> Account:
    """It has seen token 5."""
    made: Account = Account.objects.create(balance=100)
    with token(5, f"account:{made.pk}"):
        made.save()
    return made


def refused(write: Write, pk: int, number: int | None, resource: str) -> str | None:
    with pytest.raises(psycopg.DatabaseError) as raised, raw(number, resource) as connection:
        write(connection, pk)
    return raised.value.sqlstate


@every_change
def test_a_stale_change_is_refused(account: Account, write: Write) -> None:
    assert refused(write, account.pk, 4, f"account:{account.pk}") == STALE
    account.refresh_from_db()
    assert (account.balance, account.fence_token) == (100, 5)


@every_change
def test_a_change_for_another_resource_is_refused(account: Account, write: Write) -> None:
    assert refused(write, account.pk, 9, "account:0") == MISMATCH
    account.refresh_from_db()
    assert (account.balance, account.fence_token) == (100, 5)


@every_change
def test_a_change_by_the_newest_holder_is_made(account: Account, write: Write) -> None:
    with raw(6, f"account:{account.pk}") as connection:
        write(connection, account.pk)
    assert list(Account.objects.filter(pk=account.pk).values_list("balance", "fence_token")) in ([(1, 6)], [])


@every_insert
def test_an_insert_is_stamped(write: Write) -> None:
    pk = free_pk()
    with raw(6, f"account:{pk}") as connection:
        write(connection, pk)
    assert Account.objects.get(pk=pk).fence_token == 6


@every_insert
def test_an_insert_for_another_resource_is_refused(write: Write) -> None:
    pk = free_pk()
    assert refused(write, pk, 6, f"account:{pk}0") == MISMATCH
    assert not Account.objects.filter(pk=pk).exists()


def test_copy_of_many_rows_is_all_or_nothing() -> None:
    pk = free_pk()
    rows = f"{pk}\t1\n{pk + 1}\t1\n"
    assert refused(
        lambda c, _: copy_into(c, "fenced_app_account (id, balance)", rows), pk, 6, f"account:{pk}"
    ) == (MISMATCH)
    assert not Account.objects.filter(pk=pk).exists()


def test_a_restored_copy_keeps_the_column() -> None:
    pk = free_pk()
    with raw() as connection:
        copy_into(connection, "fenced_app_account (id, balance, fence_token)", f"{pk}\t1\t44\n")
    assert Account.objects.get(pk=pk).fence_token == 44


def test_require_holds_for_copy() -> None:
    write: Write = lambda c, pk: copy_into(c, "fenced_app_vault (id, content)", f"{pk}\tx\n")  # noqa: E731
    assert refused(write, 1, None, "") == REQUIRED


def test_a_transaction_carries_a_token_to_its_end_only(account: Account) -> None:
    with raw(4, f"account:{account.pk}") as connection:
        connection.commit()
        connection.execute("UPDATE fenced_app_account SET balance = 1 WHERE id = %s", (account.pk,))
    assert seen(account) == 5


def test_a_token_without_resource_writes_nothing(account: Account) -> None:
    assert refused(CHANGES["UPDATE"], account.pk, 9, "") == MISMATCH


def test_truncate_is_free(account: Account) -> None:
    with unfenced("a test"):
        Vault.objects.create()
    with raw(1, "account:0") as connection:
        connection.execute("TRUNCATE fenced_app_account, fenced_app_vault CASCADE")
    assert Account.objects.count() == Vault.objects.count() == 0


def test_the_guard_runs_after_other_triggers(account: Account) -> None:
    """A trigger that changes the row's resource is seen, by its name coming earlier."""
    assert refused(after_a_shift, account.pk, 6, f"account:{account.pk}") == MISMATCH


def after_a_shift(connection: Connection[Any], pk: int) -> None:
    connection.execute(
        "CREATE FUNCTION shift() RETURNS trigger LANGUAGE plpgsql AS "
        "'begin new.id := new.id + 1000000; return new; end'"
    )
    connection.execute(
        "CREATE TRIGGER yy BEFORE UPDATE ON fenced_app_account FOR EACH ROW EXECUTE FUNCTION shift()"
    )
    connection.execute("UPDATE fenced_app_account SET balance = 1 WHERE id = %s", (pk,))


def free_pk() -> int:
    return (Account.objects.order_by("-pk").values_list("pk", flat=True).first() or 0) + 1000


# --- two sessions at once ---------------------------------------------------------------------------------------------


@every_change
def test_a_stale_change_that_waited_for_the_newer_one_is_refused(account: Account, write: Write) -> None:
    """It began when the row had seen nothing newer: the guard looks at the version it gets the lock of (C6)."""
    with raw(7, f"account:{account.pk}") as newer, ThreadPoolExecutor(1) as thread:
        newer.execute("UPDATE fenced_app_account SET balance = 70 WHERE id = %s", (account.pk,))
        waiting = thread.submit(refused, write, account.pk, 6, f"account:{account.pk}")
        eventually(lambda: sql("SELECT 1 FROM pg_locks WHERE NOT granted"))
        newer.commit()
        assert waiting.result() == STALE
    account.refresh_from_db()
    assert (account.balance, account.fence_token) == (70, 7)


# --- partitions -------------------------------------------------------------------------------------------------------


@pytest.fixture
def posting(fenced: str) -> Any:
    """A row in the north that has seen token 5."""
    pk = sql("SELECT coalesce(max(id), 0) + 1 FROM fenced_app_posting")[0][0]
    with token(5, f"posting:{pk}"):
        sql("INSERT INTO fenced_app_posting (id, region) VALUES (%s, 'north')", pk)
    return pk


def move(connection: Connection[Any], pk: int) -> None:
    connection.execute("UPDATE fenced_app_posting SET region = 'south' WHERE id = %s", (pk,))


def place(pk: int) -> list[Any]:
    return sql("SELECT tableoid::regclass::text, fence_token FROM fenced_app_posting WHERE id = %s", pk)


def test_a_row_moves_to_another_partition_with_its_token(posting: int) -> None:
    with raw(6, f"posting:{posting}") as connection:
        move(connection, posting)
    assert place(posting) == [("fenced_app_posting_south", 6)]


def test_a_stale_move_is_refused(posting: int) -> None:
    assert refused(move, posting, 4, f"posting:{posting}") == STALE
    assert refused(move, posting, 9, "posting:0") == MISMATCH
    assert refused(move, posting, None, "") == REQUIRED
    assert place(posting) == [("fenced_app_posting_north", 5)]


def test_a_move_without_a_token_does_not_lose_the_one_seen(posting: int) -> None:
    with unfenced("moved by hand"):
        sql("UPDATE fenced_app_posting SET region = 'south' WHERE id = %s", posting)
    assert place(posting) == [("fenced_app_posting_south", 5)]


def test_a_partition_written_by_its_own_name_is_guarded(posting: int) -> None:
    write: Write = lambda c, pk: c.execute(  # noqa: E731
        "UPDATE fenced_app_posting_north SET amount = 1 WHERE id = %s", (pk,)
    )
    assert refused(write, posting, 4, f"posting:{posting}") == STALE
    assert refused(write, posting, None, "") == REQUIRED


def test_a_partition_that_comes_later_is_guarded(posting: int) -> None:
    with raw() as connection:
        connection.execute(
            "CREATE TABLE fenced_app_posting_west PARTITION OF fenced_app_posting FOR VALUES IN ('west')"
        )
    write: Write = lambda c, pk: c.execute("INSERT INTO fenced_app_posting VALUES (%s, 'west')", (pk,))  # noqa: E731
    assert refused(write, 1, None, "") == REQUIRED
