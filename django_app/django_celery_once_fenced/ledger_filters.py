# ruff: noqa: ARG002 - the signatures are Django's
"""The filters of the ledger's lists, and the window that keeps a search among millions of rows short."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from celery_once_fenced import runtime
from celery_once_fenced.errors import OnceError
from django_celery_once_fenced import tiers
from django_celery_once_fenced.records import KINDS
from django_celery_once_fenced.templatetags.once_fenced import breakable

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.http import HttpRequest

__all__ = ["WINDOW", "AtFilter", "AttemptsFilter", "KindFilter", "TaskFilter", "WhenFilter", "cut", "of_when"]

WINDOW = 100_000
"""Dedup records, the newest, among which a filter without an index looks."""
RANGES: dict[str, tuple[Any, timedelta | None, timedelta | None]] = {
    "hour": (_("in the last hour"), None, timedelta(hours=1)),
    "day": (_("in the last 24 hours"), None, timedelta(days=1)),
    "seven": (_("in the last 7 days"), None, timedelta(days=7)),
    "week": (_("1 to 7 days ago"), timedelta(days=1), timedelta(days=7)),
    "month": (_("7 to 30 days ago"), timedelta(days=7), timedelta(days=30)),
    "older": (_("longer ago"), timedelta(days=30), None),
}
"""Title, youngest and oldest age."""
EVENT_KINDS = (
    "fence.taken_over",
    "fence.force_released",
    "table.unfenced",
    "ledger.exhausted",
    "ledger.resolved",
    "ledger.forgotten",
    "effect.interrupted",
    "effect.late_outcome",
    *KINDS,
)


def cut(queryset: QuerySet[Any], column: str, window: int) -> Any:
    """The value of an indexed column from which on lie the newest ``window`` rows; None where there are fewer."""
    return queryset.order_by(f"-{column}").values_list(column, flat=True)[window : window + 1].first()


class TaskFilter(admin.SimpleListFilter):
    """The tasks that this process or Redis knows: asking the table for them would read all of it."""

    title = _("task")
    parameter_name = "task_name"

    def lookups(self, request: HttpRequest, model_admin: admin.ModelAdmin[Any]) -> Iterable[tuple[str, str]]:
        return [
            (name, breakable(name))
            for name in sorted({*tiers.tasks_of("correctness"), *_counted(), self.value() or ""} - {""})
        ]

    def has_output(self) -> bool:
        return bool(self.lookup_choices)

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(task_name=self.value()) if self.value() else queryset


def _counted() -> set[str]:
    """Tasks of the correctness tier that ran somewhere, and that this process does not know."""
    try:
        return {task for task in runtime.current().readings.stats() if task and not tiers.tier_of(task)}
    except OnceError:
        return set()


class WhenFilter(admin.SimpleListFilter):
    """Ranges with an end as well: a search among the older ones looks only at those."""

    title = _("started")
    parameter_name = "when"
    column = "started_at"

    def lookups(self, request: HttpRequest, model_admin: admin.ModelAdmin[Any]) -> Iterable[tuple[str, Any]]:
        return [(name, title) for name, (title, _youngest, _oldest) in RANGES.items()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return of_when(queryset, self.value() or "", self.column)


class AtFilter(WhenFilter):
    title = _("time")
    column = "at"


def of_when(queryset: QuerySet[Any], name: str, column: str = "started_at") -> QuerySet[Any]:
    """What was started in a range of ``RANGES``; everything, where it is none of these."""
    if name not in RANGES:
        return queryset
    _title, youngest, oldest = RANGES[name]
    now = timezone.now()
    found = queryset if youngest is None else queryset.filter(**{f"{column}__lte": now - youngest})
    return found if oldest is None else found.filter(**{f"{column}__gt": now - oldest})


class AttemptsFilter(admin.SimpleListFilter):
    title = _("attempts")
    parameter_name = "attempts"

    def lookups(self, request: HttpRequest, model_admin: admin.ModelAdmin[Any]) -> Iterable[tuple[str, Any]]:
        return [
            ("one", _("one")),
            ("more", _("more than one")),
            ("taken_over", _("taken over from another worker")),
        ]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        conditions: dict[str, dict[str, int]] = {
            "one": {"attempt": 1},
            "more": {"attempt__gt": 1},
            "taken_over": {"takeovers__gt": 0},
        }
        return queryset.filter(**conditions.get(self.value() or "", {}))


class KindFilter(admin.SimpleListFilter):
    title = _("event")
    parameter_name = "kind"

    def lookups(self, request: HttpRequest, model_admin: admin.ModelAdmin[Any]) -> Iterable[tuple[str, str]]:
        return [(kind, kind) for kind in EVENT_KINDS]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(kind=self.value()) if self.value() else queryset
