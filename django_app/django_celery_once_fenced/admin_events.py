# ruff: noqa: ARG002 - the signatures are Django's
"""The page *Events*: what happened to keys, newest first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import admin
from django.db.models import Q
from django.utils.html import format_html
from django.utils.safestring import mark_safe
from django.utils.text import Truncator
from django.utils.translation import gettext_lazy

from celery_once_fenced import operate
from django_celery_once_fenced.admin_reading import (
    isolated,
    to_the_second,
    with_note,
    with_task,
)
from django_celery_once_fenced.ledger_filters import (
    KindFilter,
)
from django_celery_once_fenced.models import Event
from django_celery_once_fenced.overview import EVENTS

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.http import HttpRequest
    from django.utils.safestring import SafeString


from django_celery_once_fenced.admin_lists import LedgerListAdmin

__all__ = ["EventAdmin"]

SHORT = 80
"""Characters of a detail in a list."""


class EventAdmin(LedgerListAdmin):
    list_display = ("when", "kind_badge", "about", "tokens", "workers", "by")
    list_filter: ClassVar[Any] = (KindFilter,)
    window_column = "id"
    window = EVENTS
    windowed_filters = ("kind",)
    search_fields = ("resource", "task_id")
    search_help_text = gettext_lazy("Resource, or part of it; task id; digest")
    ordering = ("-id",)
    sortable_by = ()
    fieldsets = (
        (None, {"fields": ("at", "kind", "resource_text", "actor", "detail_text")}),
        (
            gettext_lazy("Who"),
            {"fields": ("key_digest", "task_name", "task_id", "holder", "worker", "token")},
        ),
        (
            gettext_lazy("Taken over from"),
            {"fields": ("old_key_digest", "old_task_id", "old_holder", "old_worker", "old_token")},
        ),
    )
    readonly_fields = ("resource_text", "detail_text")

    @admin.display(description=gettext_lazy("at"))
    def when(self, event: Event) -> str:
        return to_the_second(event.at)

    @admin.display(description=gettext_lazy("resource and task"))
    def about(self, event: Event) -> SafeString | str:
        return with_task(event.resource or event.key_digest or "", event.task_name or "")

    @admin.display(description=gettext_lazy("by"))
    def by(self, event: Event) -> SafeString | str:
        if not event.actor and not event.detail:
            return "-"
        return with_note(isolated(event.actor), isolated(Truncator(event.detail or "").chars(SHORT)))

    @admin.display(description=gettext_lazy("event"))
    def kind_badge(self, event: Event) -> SafeString | str:
        return format_html('<span class="of-badge">{}</span>', event.kind)

    @admin.display(description=gettext_lazy("resource"))
    def resource_text(self, event: Event) -> SafeString | str:
        return isolated(event.resource)

    @admin.display(description=gettext_lazy("token"))
    def tokens(self, event: Event) -> SafeString | str:
        return _from_to(event.old_token, event.token)

    @admin.display(description=gettext_lazy("worker"))
    def workers(self, event: Event) -> SafeString | str:
        return _from_to(event.old_worker, event.worker)

    @admin.display(description=gettext_lazy("detail"))
    def detail_text(self, event: Event) -> SafeString | str:
        return isolated(event.detail)

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


def _from_to(old: object, new: object) -> SafeString | str:
    if old is None and new is None:
        return "-"
    if old is None or new is None:
        return isolated(new if old is None else old)
    arrow = mark_safe('<span class="of-arrow">→</span>')
    return format_html("<bdi>{}</bdi> {} <bdi>{}</bdi>", old, arrow, new)
