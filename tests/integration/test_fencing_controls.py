"""Negative controls: ways to fence a table that look right, and the checks that catch them.

Each check is passed by the guard as released and raises ``BrokenPromiseError`` on the broken ways.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from psycopg import Connection

from celery_once_fenced.stores.postgres import schema_sql
from example_project.servers import Servers
from tests.fixtures.fenced_app.models import Naive, Plain
from tests.fixtures.ledger import eventually
from tests.fixtures.servers import fresh_database

ROWS = """
create table rows (id bigint, owner bigint, place text, value bigint, fence_token bigint) partition by list (place);
create table here partition of rows for values in ('here');
create table there partition of rows for values in ('there');
"""
TRIGGER = """
create trigger zz_once_fenced before insert or update or delete on rows
for each row execute function once_fenced_guard_v1('stamp', 'owner:', 'owner', '');
"""
STALE = "OF001"
MINE = "owner:1"

Write = Callable[[Connection[Any], list[int], int], object]


class BrokenPromiseError(AssertionError):
    """The promise that a check stands for was broken."""


class RefusedError(Exception):
    """The way refused the write."""


# --- the ways ---------------------------------------------------------------------------------------------------------


def plainly(connection: Connection[Any], ids: list[int], token: int) -> None:
    """As an application that checks nothing."""
    connection.execute("update rows set value = %s where id = any(%s)", (token, ids))


def by_number_of_rows(connection: Connection[Any], ids: list[int], token: int) -> None:
    written = connection.execute(
        "update rows set value = %(t)s, fence_token = %(t)s"
        " where id = any(%(ids)s) and coalesce(fence_token, 0) <= %(t)s",
        {"t": token, "ids": ids},
    )
    if written.rowcount == 0:
        raise RefusedError


def by_sub_select(connection: Connection[Any], ids: list[int], token: int) -> None:
    written = connection.execute(
        "update rows set value = %(t)s, fence_token = %(t)s where id = any(%(ids)s)"
        " and %(t)s >= all (select coalesce(fence_token, 0) from rows where id = any(%(ids)s))",
        {"t": token, "ids": ids},
    )
    if written.rowcount == 0:
        raise RefusedError


def by_a_look_first(connection: Connection[Any], ids: list[int], token: int) -> None:
    newest = connection.execute("select max(fence_token) from rows where id = any(%s)", (ids,)).fetchone()
    if newest and (newest[0] or 0) > token:
        raise RefusedError
    connection.execute("update rows set value = %s, fence_token = %s where id = any(%s)", (token, token, ids))


@dataclass(frozen=True)
class Way:
    write: Write = plainly
    trigger: str = TRIGGER
    edits: tuple[tuple[str, str], ...] = ()


@dataclass
class Table:
    """Rows fenced in some way."""

    url: str
    way: Way

    @contextlib.contextmanager
    def session(self, token: int | None = None, resource: str = MINE) -> Iterator[Connection[Any]]:
        with psycopg.connect(self.url) as connection:
            if token is not None:
                connection.execute(
                    "select set_config('once_fenced.token', %s, true), set_config('once_fenced.resource', %s, true)",
                    (str(token), resource),
                )
            yield connection

    def write(self, ids: list[int], token: int, resource: str = MINE) -> bool:
        """Whether it was let through."""
        with (
            contextlib.suppress(RefusedError, psycopg.DatabaseError),
            self.session(token, resource) as connection,
        ):
            self.way.write(connection, ids, token)
            return True
        return False

    def execute(self, statement: str, token: int | None = None) -> bool:
        """Whether it was let through."""
        with contextlib.suppress(psycopg.DatabaseError), self.session(token) as connection:
            connection.execute(statement)
            return True
        return False

    def values(self) -> list[Any]:
        with self.session() as connection:
            return connection.execute("select value from rows order by id").fetchall()


# --- the checks -------------------------------------------------------------------------------------------------------


def refuses_a_stale_write_as_a_whole(table: Table) -> None:
    table.write([2], 7)
    table.write([1, 2], 6)
    if table.values() != [(0,), (7,)]:
        raise BrokenPromiseError(f"values {table.values()} after a stale write")


def refuses_a_stale_write_that_waited(table: Table) -> None:
    """C6: it began when the row had seen nothing newer."""
    with table.session(7) as newer, ThreadPoolExecutor(1) as thread:
        table.way.write(newer, [1], 7)
        waiting = thread.submit(table.write, [1], 6)
        eventually(lambda: waits(table))
        newer.commit()
        waiting.result()
    if table.values()[0] != (7,):
        raise BrokenPromiseError("a stale write came after the newer one")


def waits(table: Table) -> list[Any]:
    with table.session() as connection:
        return connection.execute("select 1 from pg_locks where not granted").fetchall()


def lets_a_live_holder_write(table: Table) -> None:
    """Case 49: the token of another resource says nothing of this one's."""
    table.write([1], 1000, "audit:1")
    if not table.write([1], 6):
        raise BrokenPromiseError("a live holder is refused for ever")


def keeps_the_column(table: Table) -> None:
    """Case 50: an old instance is saved, with all its columns."""
    table.write([1], 8)
    table.execute("update rows set value = 1, fence_token = 3 where id = 1")
    if table.write([1], 7):
        raise BrokenPromiseError("the column went down, and a stale write passed")


def keeps_the_column_between_partitions(table: Table) -> None:
    table.write([1], 8)
    table.execute("update rows set place = 'there' where id = 1")
    if table.write([1], 7):
        raise BrokenPromiseError("the move lost the column, and a stale write passed")


def starts_anew_with_another_resource(table: Table) -> None:
    table.write([1], 50)
    table.execute("update rows set owner = 2 where id = 1")
    if not table.write([1], 2, "owner:2"):
        raise BrokenPromiseError("a live holder is refused by a token of the former resource")


def refuses_a_stale_delete(table: Table) -> None:
    table.write([1], 8)
    if table.execute("delete from rows where id = 1", token=7):
        raise BrokenPromiseError("a stale delete passed")


Check = Callable[[Table], None]

BY_NUMBER_OF_ROWS = Way(by_number_of_rows, trigger="")
BY_SUB_SELECT = Way(by_sub_select, trigger="")
BY_A_LOOK_FIRST = Way(by_a_look_first, trigger="")
COMPARES_ANY_TOKENS = Way(
    edits=(("if (was = granted and becomes = granted) is not true then", "if false then"),)
)
STAMPS_AT_EVERY_WRITE = Way(edits=(("    new.fence_token := old.fence_token;\n", ""),))
CLEARS_AT_INSERT = Way(
    edits=(
        (
            "if tg_op = 'INSERT' then return new; end if;",
            "if tg_op = 'INSERT' then new.fence_token := null; return new; end if;",
        ),
    )
)
KEEPS_ALWAYS = Way(edits=(("if was is distinct from becomes then new.fence_token := null; end if;", ""),))
NOT_ON_DELETE = Way(trigger=TRIGGER.replace(" or delete", ""))

CONTROLS: dict[str, tuple[Check, Way]] = {
    "number of changed rows": (refuses_a_stale_write_as_a_whole, BY_NUMBER_OF_ROWS),
    "sub-select": (refuses_a_stale_write_that_waited, BY_SUB_SELECT),
    "look first": (refuses_a_stale_write_that_waited, BY_A_LOOK_FIRST),
    "tokens of any resource": (lets_a_live_holder_write, COMPARES_ANY_TOKENS),
    "number of rows, two resources": (lets_a_live_holder_write, BY_NUMBER_OF_ROWS),
    "column like any other": (keeps_the_column, BY_NUMBER_OF_ROWS),
    "trigger that only stamps": (keeps_the_column, STAMPS_AT_EVERY_WRITE),
    "cleared at insert": (keeps_the_column_between_partitions, CLEARS_AT_INSERT),
    "kept over a change of resource": (starts_anew_with_another_resource, KEEPS_ALWAYS),
    "not on delete": (refuses_a_stale_delete, NOT_ON_DELETE),
}


@contextlib.contextmanager
def fenced_by(servers: Servers, way: Way) -> Iterator[Table]:
    script = schema_sql()
    for old, new in way.edits:
        assert script.count(old) == 1, f"found {script.count(old)} times: {old}"
        script = script.replace(old, new)
    with fresh_database(servers) as url:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(script + ROWS + way.trigger)
            connection.execute("insert into rows select id, 1, 'here', 0 from generate_series(1, 2) as id")
        yield Table(url, way)


@pytest.mark.parametrize(("check", "way"), CONTROLS.values(), ids=CONTROLS)
def test_the_broken_way_is_caught(check: Check, way: Way, servers: Servers) -> None:
    with fenced_by(servers, way) as table, pytest.raises(BrokenPromiseError):
        check(table)


@pytest.mark.parametrize(
    "check", dict.fromkeys(check for check, _ in CONTROLS.values()), ids=lambda check: check.__name__
)
def test_the_guard_passes(check: Check, servers: Servers) -> None:
    with fenced_by(servers, Way()) as table:
        check(table)


# --- the same in the ORM ----------------------------------------------------------------------------------------------


def keeps_what_an_old_instance_does_not_know(model: Any) -> None:
    """Case 50, without a trigger: the column is not written by ``save()``."""
    row = model.objects.create()
    old = model.objects.get(pk=row.pk)
    model.objects.filter(pk=row.pk).update(fence_token=8)
    old.save()
    if model.objects.values_list("fence_token", flat=True).get(pk=row.pk) != 8:
        raise BrokenPromiseError("save() of an old instance lowered the column")


@pytest.mark.usefixtures("fenced")
def test_a_field_like_any_other_is_written_by_save() -> None:
    keeps_what_an_old_instance_does_not_know(Plain)
    with pytest.raises(BrokenPromiseError):
        keeps_what_an_old_instance_does_not_know(Naive)
