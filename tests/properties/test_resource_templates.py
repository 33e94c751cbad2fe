"""A resource is the same text in Python, where a task derives it, and in SQL, where a row's guard does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from django.db import models
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from celery_once_fenced.errors import KeyDerivationError
from celery_once_fenced.stores.postgres import schema_sql
from celery_once_fenced.templates import MAX_RESOURCE, Template, render_resource
from django_celery_once_fenced.fencing.columns import arguments

COLUMNS = ("n", "t", "u", "big")
FIELDS = (
    models.BigIntegerField(name="n", db_column="n"),
    models.TextField(name="t", db_column="t"),
    models.UUIDField(name="u", db_column="u"),
    models.CharField(name="big", db_column="big"),
)
for field in FIELDS:
    field.set_attributes_from_name(field.name)

# What no template and no row holds: NUL and halves of characters, which PostgreSQL cannot store.
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
literals = st.one_of(texts, st.sampled_from(["{", "}", "%", ":", "'", "\\", "($1).", "%s", "%%"]))
pieces = st.lists(
    st.one_of(
        literals.map(lambda text: text.replace("{", "{{").replace("}", "}}")),
        st.sampled_from([f"{{{c}}}" for c in COLUMNS]),
    ),
    max_size=6,
)
rows = st.fixed_dictionaries(
    {
        "n": st.integers(-(2**63), 2**63 - 1),
        "t": st.one_of(texts, st.sampled_from(["%", ":", "%3A", "a:b", "", "x" * 250])),
        "u": st.uuids(),
        "big": st.text("aé:%🙂", max_size=300),
    }
)


@pytest.fixture(scope="module")
def connection(module_postgres_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(module_postgres_url, autocommit=True) as opened:
        opened.execute(schema_sql())
        opened.execute("create table things (n bigint, t text, u uuid, big varchar, fence_token bigint)")
        yield opened


def in_sql(connection: psycopg.Connection[Any], template: str, row: dict[str, Any]) -> str:
    """What the guard of a table says it is, in the refusal of a write for no resource at all."""
    given_to_guard = arguments(Template.parse(template, option="resource"), FIELDS, "things")
    literal = ", ".join("'" + text.replace("'", "''") + "'" for text in ["stamp", *given_to_guard])
    with connection.transaction(force_rollback=True):
        connection.execute(
            "create trigger zz_once_fenced before insert on things for each row "
            f"execute function once_fenced_guard_v1({literal})".encode()
        )
        connection.execute(
            "select set_config('once_fenced.token', '1', true), set_config('once_fenced.resource', '', true)"
        )
        with pytest.raises(psycopg.DatabaseError) as raised, connection.transaction():
            connection.execute("insert into things values (%(n)s, %(t)s, %(u)s, %(big)s)", row)
    assert raised.value.sqlstate == "OF007"
    return str(json.loads(str(raised.value.diag.message_detail))["resource"])


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(template=pieces.map("".join), row=rows)
@example(
    template="account:{n}", row={"n": 7, "t": "", "u": "6b0b1a4a-7c3e-4f5f-9a55-1f3b16d1f6a4", "big": ""}
)
@example(
    template="{t}:{big}", row={"n": 0, "t": "a:b", "u": "6b0b1a4a-7c3e-4f5f-9a55-1f3b16d1f6a4", "big": "50%"}
)
@example(
    template="{{t}}($1).{t}", row={"n": 0, "t": "$1", "u": "6b0b1a4a-7c3e-4f5f-9a55-1f3b16d1f6a4", "big": ""}
)
def test_python_and_sql_render_alike(
    connection: psycopg.Connection[Any], template: str, row: dict[str, Any]
) -> None:
    rendered = in_sql(connection, template, row) if template else ""
    try:
        expected = render_resource(template, row)
    except KeyDerivationError:
        # Nobody can hold a resource that is empty or too long, so no token ever writes such a row.
        assert not 1 <= len(rendered) <= MAX_RESOURCE
    else:
        assert rendered == expected


def test_values_cannot_run_into_each_other(connection: psycopg.Connection[Any]) -> None:
    row = {"n": 1, "u": None}
    one = in_sql(connection, "{t}:{big}", {**row, "t": "a", "big": "b:c"})
    other = in_sql(connection, "{t}:{big}", {**row, "t": "a:b", "big": "c"})
    assert (one, other) == ("a:b%3Ac", "a%3Ab:c")
