# ruff: noqa: ARG002 - the signatures are Django's
"""The migration operation that installs the package's own SQL, the same files that ``celery … once sql`` prints.

A released ``.sql`` file is never edited: the migration that names it has been applied somewhere.  What changes is a
new file, with functions of a new version beside the old ones, and a new migration (rolling deploys).
"""

from __future__ import annotations

import re
from importlib import resources
from typing import TYPE_CHECKING, Any

from django.db import connections
from django.db.migrations.operations.base import Operation
from django.db.migrations.recorder import MigrationRecorder

from celery_once_fenced.stores.postgres_schema import schema_sql
from django_celery_once_fenced import conf

if TYPE_CHECKING:
    from django.db.backends.base.schema import BaseDatabaseSchemaEditor

__all__ = ["InstallSQL", "functions", "is_migrated", "missing_functions", "released"]

_FUNCTION = re.compile(r"^create\s+(?:or\s+replace\s+)?function\s+(\w+)", re.IGNORECASE | re.MULTILINE)


class InstallSQL(Operation):
    """Run files of ``celery_once_fenced/stores/sql``, forwards in the given order; ``remove`` is the way back.

    Only on the database that fence and ledger live in, and whatever a router says about it (C12); on any other
    database the migration is recorded and nothing is done.
    """

    reduces_to_sql = True
    reversible = True

    def __init__(self, *files: str, remove: str) -> None:
        self.files = files
        self.remove = remove

    def deconstruct(self) -> tuple[str, list[Any], dict[str, Any]]:
        return type(self).__qualname__, list(self.files), {"remove": self.remove}

    def state_forwards(self, app_label: str, state: Any) -> None:
        pass

    def database_forwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: Any, to_state: Any
    ) -> None:
        self._run(schema_editor, "\n".join(map(released, self.files)))

    def database_backwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: Any, to_state: Any
    ) -> None:
        self._run(schema_editor, self.remove)

    def describe(self) -> str:
        return f"Install {', '.join(self.files)}"

    def _run(self, schema_editor: BaseDatabaseSchemaEditor, script: str) -> None:
        if schema_editor.connection.alias == conf.alias() and schema_editor.connection.vendor == "postgresql":
            schema_editor.execute(script, params=None)  # None: the % signs of PL/pgSQL are not placeholders.


def released(name: str) -> str:
    """The text of one SQL file of the core."""
    return (resources.files("celery_once_fenced.stores") / "sql" / name).read_text(encoding="utf-8")


def missing_functions(alias: str) -> set[str]:
    """The SQL functions that a database should have by its applied migrations, and has not.  Asks the database."""
    connection = connections[alias]
    if connection.vendor != "postgresql":
        return set()
    if not is_migrated(alias):
        return set()  # Django itself reports it.
    with connection.cursor() as cursor:
        cursor.execute("SELECT n FROM unnest(%s::text[]) AS n WHERE to_regproc(n) IS NULL", [functions()])
        return {name for (name,) in cursor.fetchall()}


def is_migrated(alias: str) -> bool:
    """Whether the tables and functions should be there.  Asks the database."""
    connection = connections[alias]
    if connection.vendor != "postgresql":
        return False
    return ("once_fenced", "0001_initial") in MigrationRecorder(connection).applied_migrations()


def functions() -> list[str]:
    """Names of all SQL functions of this release."""
    return sorted(set(_FUNCTION.findall(schema_sql())))
