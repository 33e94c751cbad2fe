"""System checks of fenced models: where they live, and whether their tables have a guard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.core import checks
from django.db import connections, router
from django.db.migrations.loader import MigrationLoader

from django_celery_once_fenced import conf
from django_celery_once_fenced.fencing.models import FencedModel
from django_celery_once_fenced.fencing.operations import TRIGGER

if TYPE_CHECKING:
    from django.core.checks import CheckMessage

TAG = "once_fenced"


@checks.register(TAG)
def check_home(**_kwargs: Any) -> list[CheckMessage]:
    """W010: a fenced model is written to another database than the one whose transactions carry tokens."""
    return [
        checks.Warning(
            f"{model._meta.label} is written to the database {router.db_for_write(model)!r}, but tokens are carried by "
            f"transactions of {conf.alias()!r} only.",
            hint='There it has no guard; write by .fenced(), or name its database in CELERY_ONCE_FENCED["database"].',
            obj=model,
            id="once_fenced.W010",
        )
        for model in _fenced_models()
        if conf.mapping() and router.db_for_write(model) != conf.alias()
    ]


@checks.register(checks.Tags.database)
def check_guards(databases: Sequence[str] | None = None, **_kwargs: Any) -> list[CheckMessage]:
    """W011: a fenced model's migrations are applied, and its table has no guard.  Asks the database."""
    alias = conf.alias()
    models = {
        model._meta.db_table: model for model in _fenced_models() if router.db_for_write(model) == alias
    }
    if not models or alias not in (databases or ()) or connections[alias].vendor != "postgresql":
        return []
    unguarded = [models[table] for table in sorted(models.keys() - _guarded(alias))]
    return [
        checks.Warning(
            f"{model._meta.label} is a FencedModel, but its table has no guard: only .fenced() checks its writes.",
            hint=f'Add AddFence("{model._meta.label}", resource="…") to a migration.',
            obj=model,
            id="once_fenced.W011",
        )
        for model in unguarded
        if _is_migrated(model, alias)
    ]


def _fenced_models() -> Iterator[Any]:
    for model in apps.get_models():
        if issubclass(model, FencedModel) and not model._meta.proxy:
            yield model


def _guarded(alias: str) -> set[str]:
    with connections[alias].cursor() as cursor:
        cursor.execute(
            "SELECT relname FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid WHERE tgname = %s",
            [TRIGGER],
        )
        return {table for (table,) in cursor.fetchall()}


def _is_migrated(model: Any, alias: str) -> bool:
    """Whether nothing is left to be applied that could bring the guard: ``migrate`` runs this check first."""
    loader = MigrationLoader(connections[alias], ignore_no_migrations=True)
    leaves = set(loader.graph.leaf_nodes(model._meta.app_label))
    return bool(leaves) and leaves <= loader.applied_migrations.keys()
