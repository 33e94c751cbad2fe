# ruff: noqa: ARG002 - the signatures are Django's
"""``AddFence`` and ``RemoveFence``: the trigger of a fenced table, in a migration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from django.db import router
from django.db.migrations.operations.base import Operation

from celery_once_fenced.errors import ConfigError
from celery_once_fenced.templates import Template
from celery_once_fenced.wording import did_you_mean
from django_celery_once_fenced import conf
from django_celery_once_fenced.fencing.columns import arguments

if TYPE_CHECKING:
    from django.db.backends.base.schema import BaseDatabaseSchemaEditor

__all__ = ["TRIGGER", "AddFence", "RemoveFence"]

Mode = Literal["stamp", "require"]
COLUMN = "fence_token"
GUARD = "once_fenced_guard_v1"
TRIGGER = "zz_once_fenced"
"""Triggers of one kind run in the order of their names: this one is to see the row as it will be written."""


class AddFence(Operation):
    """Put a guard on the table of a model; a model without ``fence_token`` of its own gets the column too.

    The migration depends on ``("once_fenced", "0001_initial")``.  On other databases than the configured one, and on
    those the model does not live in, nothing is done.

    Args:
        model: ``"shop.Account"``.
        resource: The resource of a row, with its columns in braces: ``"account:{id}"``.  Integer, text and UUID
            columns that are never NULL, rendered as ``Once(resource=…)`` renders arguments.
        mode: ``"stamp"`` checks the writes that carry a token; ``"require"`` also refuses those that do not.

    Raises:
        ConfigError: a wrong mode, label or template; in ``migrate``, a column that is not there or does not do.
    """

    reduces_to_sql = True
    reversible = True
    verb: ClassVar = "Add"

    def __init__(self, model: str, resource: str, mode: Mode = "stamp") -> None:
        if mode not in get_args(Mode):
            raise ConfigError(f"mode={mode!r} is not a mode of a fence{did_you_mean(mode, get_args(Mode))}")
        if model.count(".") != 1:
            raise ConfigError(f"{model!r} names no model: write 'app_label.Model'")
        self.model = model
        self.resource = resource
        self.mode = mode
        self._template = Template.parse(resource, option="resource")

    def deconstruct(self) -> tuple[str, list[Any], dict[str, Any]]:
        return type(self).__qualname__, [self.model], {"resource": self.resource, "mode": self.mode}

    def state_forwards(self, app_label: str, state: Any) -> None:
        pass

    def database_forwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: Any, to_state: Any
    ) -> None:
        self._add(schema_editor, to_state)

    def database_backwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: Any, to_state: Any
    ) -> None:
        self._remove(schema_editor, from_state)

    def describe(self) -> str:
        return f"{self.verb} the fence of {self.model}, {self.resource!r} ({self.mode})"

    @property
    def migration_name_fragment(self) -> str:
        return f"{self.verb.lower()}_fence_{self.model.partition('.')[2].lower()}"

    def references_model(self, name: str, app_label: str) -> bool:
        return self.model.lower() == f"{app_label}.{name}".lower()

    def _add(self, schema_editor: Any, state: Any) -> None:
        model = self._fenced_here(schema_editor, state)
        if model is None:
            return
        if ("once_fenced", "fence") not in state.models:
            raise ConfigError(
                f"the migration that fences {self.model} must have ('once_fenced', '0001_initial') among its dependencies"
            )
        given = arguments(self._template, model._meta.local_concrete_fields, self.model)
        table = schema_editor.quote_name(model._meta.db_table)
        if not _has_column(model):
            _run(schema_editor, f"ALTER TABLE {table} ADD COLUMN {COLUMN} bigint")
        _run(
            schema_editor,
            f"CREATE TRIGGER {TRIGGER} BEFORE INSERT OR UPDATE OR DELETE ON {table} FOR EACH ROW "
            f"EXECUTE FUNCTION {GUARD}({', '.join(map(_literal, [self.mode, *given]))})",
        )

    def _remove(self, schema_editor: Any, state: Any) -> None:
        model = self._fenced_here(schema_editor, state)
        if model is None:
            return
        table = schema_editor.quote_name(model._meta.db_table)
        _run(schema_editor, f"DROP TRIGGER {TRIGGER} ON {table}")
        if not _has_column(model):
            _run(schema_editor, f"ALTER TABLE {table} DROP COLUMN {COLUMN}")

    def _fenced_here(self, schema_editor: Any, state: Any) -> Any:
        model = state.apps.get_model(self.model)
        connection = schema_editor.connection
        here = connection.alias == conf.alias() and connection.vendor == "postgresql"
        return model if here and router.allow_migrate_model(connection.alias, model) else None


class RemoveFence(AddFence):
    """Take the guard off again: :class:`AddFence` backwards, with the same arguments, which its own way back needs."""

    verb = "Remove"

    def database_forwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: Any, to_state: Any
    ) -> None:
        self._remove(schema_editor, from_state)

    def database_backwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: Any, to_state: Any
    ) -> None:
        self._add(schema_editor, to_state)


def _has_column(model: Any) -> bool:
    return any(field.column == COLUMN for field in model._meta.local_concrete_fields)


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _run(schema_editor: Any, statement: str) -> None:
    schema_editor.execute(statement, params=None)  # None: a % of the template is no placeholder
