# ruff: noqa: ARG002 - the signatures are Django's
"""The page *Events*: what happened to keys, newest first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import admin
from django.db.models import OuterRef, Q, Subquery
from django.utils.html import format_html
from django.utils.safestring import mark_safe
from django.utils.text import Truncator
from django.utils.translation import gettext_lazy

from celery_once_fenced import operate
from django_celery_once_fenced import readable
from django_celery_once_fenced.admin_reading import (
    isolated,
    to_the_second,
    with_note,
    with_task,
)
from django_celery_once_fenced.ledger_filters import (
    AtFilter,
    KindFilter,
)
from django_celery_once_fenced.models import Event, LedgerEntry
from django_celery_once_fenced.overview import EVENTS
from django_celery_once_fenced.templatetags.once_fenced import breakable

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.http import HttpRequest
    from django.utils.safestring import SafeString


from django_celery_once_fenced.admin_lists import LedgerListAdmin

__all__ = ["EventAdmin"]

SHOWN_BY = {"when": "at", "key_text": "entry_key", "resource_text": "resource", "detail_text": "detail"}
"""Columns by the fields that show them."""
SHORT = 80
"""Characters of a detail in a list."""


class EventAdmin(LedgerListAdmin):
    list_display = ("when", "kind_badge", "about", "tokens", "workers", "by")
    list_filter: ClassVar[Any] = (KindFilter, AtFilter)
    window_column = "id"
    window = EVENTS
    windowed_filters = ("kind", "when")
    search_fields = ("resource", "task_id")
    search_help_text = gettext_lazy("Resource, or part of it; task id; digest")
    ordering = ("-id",)
    sortable_by = ()
    fieldsets = (
        (None, {"fields": ("when", "kind", "key_text", "resource_text", "actor", "detail_text")}),
        (
            gettext_lazy("Who"),
            {"fields": ("key_digest", "task_name", "task_id", "holder", "worker", "token")},
        ),
        (
            gettext_lazy("Who held it before"),
            {"fields": ("old_key_digest", "old_task_id", "old_holder", "old_worker", "old_token")},
        ),
    )
    readonly_fields = ("when", "key_text", "resource_text", "detail_text")

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Without the columns that this kind of event has nothing in."""
        kept = [
            (title, {**options, "fields": [name for name in options["fields"] if _has(obj, name)]})
            for title, options in super().get_fieldsets(request, obj)
        ]
        return [(title, options) for title, options in kept if options["fields"]]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        entries = LedgerEntry.objects.filter(pk=OuterRef("key_digest"))
        with_keys: QuerySet[Any] = (
            super().get_queryset(request).annotate(entry_key=Subquery(entries.values("key")[:1]))
        )
        return with_keys

    @admin.display(description=gettext_lazy("at"))
    def when(self, event: Event) -> str:
        return to_the_second(event.at)

    @admin.display(description=gettext_lazy("resource and task"))
    def about(self, event: Event) -> SafeString | str:
        known = readable.resource(event.resource) or getattr(event, "entry_key", None)
        return with_task(known or event.key_digest or "", event.task_name or "")

    @admin.display(description=gettext_lazy("by"))
    def by(self, event: Event) -> SafeString | str:
        if not event.actor and not event.detail:
            return "-"
        return with_note(
            isolated(event.actor), isolated(Truncator(readable.detail(event.detail)).chars(SHORT))
        )

    @admin.display(description=gettext_lazy("event"))
    def kind_badge(self, event: Event) -> SafeString | str:
        return format_html('<span class="of-badge">{}</span>', breakable(event.kind))

    @admin.display(description=gettext_lazy("key"))
    def key_text(self, event: Any) -> SafeString | str:
        return isolated(event.entry_key)

    @admin.display(description=gettext_lazy("resource"))
    def resource_text(self, event: Event) -> SafeString | str:
        return isolated(readable.resource(event.resource))

    @admin.display(description=gettext_lazy("token"))
    def tokens(self, event: Event) -> SafeString | str:
        return _from_to(event.old_token, event.token)

    @admin.display(description=gettext_lazy("worker"))
    def workers(self, event: Event) -> SafeString | str:
        return _from_to(event.old_worker, event.worker)

    @admin.display(description=gettext_lazy("detail"))
    def detail_text(self, event: Event) -> SafeString | str:
        return isolated(readable.detail(event.detail))

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        if not search_term:
            return queryset, False
        if self.is_exact(search_term):
            return queryset.filter(Q(key_digest=search_term) | Q(old_key_digest=search_term)), False
        of_task = Q(task_id=search_term) | Q(old_task_id=search_term)
        return queryset.filter(Q(resource__contains=search_term) | of_task), False

    def is_exact(self, term: str) -> bool:
        return bool(operate.DIGEST.fullmatch(term))


def _has(event: Event | None, field: Any) -> bool:
    return event is None or getattr(event, SHOWN_BY.get(field, field), None) is not None


def _from_to(old: object, new: object) -> SafeString | str:
    if old is None and new is None:
        return "-"
    if old is None or new is None:
        return isolated(new if old is None else old)
    arrow = mark_safe('<span class="of-arrow">→</span>')
    return format_html("<bdi>{}</bdi> {} <bdi>{}</bdi>", old, arrow, new)
