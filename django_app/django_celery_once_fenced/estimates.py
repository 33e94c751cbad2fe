"""How many rows there are, about: an exact count of a million rows costs more than the page that shows it."""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING, Any

from django.core.paginator import Paginator
from django.db import connections

from django_celery_once_fenced import conf

if TYPE_CHECKING:
    from django.db.models import Model

    _Paginator = Paginator[Any]
else:
    _Paginator = Paginator

__all__ = ["EXACT", "PAGES", "EstimatingPaginator", "rows_of"]

EXACT = 10_000
"""Rows that are counted; of more, PostgreSQL's own estimate is shown."""
PAGES = 100
"""Pages that can be turned; further back leads a filter by date."""


def rows_of(connection: Any, model: type[Model]) -> int:
    """PostgreSQL's estimate for a table, as of its last vacuum or analyze; -1 where it has none yet."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT reltuples::bigint FROM pg_class WHERE oid = to_regclass(%s)", [model._meta.db_table]
        )
        found = cursor.fetchone()
    return int(found[0]) if found else -1


class EstimatingPaginator(_Paginator):
    """Counts exactly up to ``EXACT`` rows.  ``about`` says whether ``count`` is an estimate."""

    about = False

    @cached_property
    def count(self) -> int:
        queryset: Any = self.object_list
        counted = int(queryset.order_by()[: EXACT + 1].count())
        if counted <= EXACT:
            return counted
        self.about = True
        return max(self._estimate(queryset), counted)

    @cached_property
    def num_pages(self) -> int:
        return min(super().num_pages, PAGES)

    def _estimate(self, queryset: Any) -> int:
        if not queryset.query.where:
            return rows_of(connections[conf.alias()], queryset.model)
        (plan,) = json.loads(queryset.order_by().explain(format="json"))
        return int(plan["Plan"]["Plan Rows"])
