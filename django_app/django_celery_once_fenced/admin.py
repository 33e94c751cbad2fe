# ruff: noqa: ARG002 - the signatures are Django's
"""Read-only pages: held locks (live), dedup records with their effects and events, events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.db.models import Q
from django.template.loader import render_to_string
from django.template.response import TemplateResponse
from django.utils.html import format_html
from django.utils.text import Truncator
from django.utils.translation import gettext_lazy as _

from django_celery_once_fenced import conf
from django_celery_once_fenced.locks import held_locks
from django_celery_once_fenced.models import Effect, Event, HeldLock, LedgerEntry

if TYPE_CHECKING:
    from django.db.models import Model, QuerySet
    from django.http import HttpRequest, HttpResponse
    from django.utils.safestring import SafeString

    _ModelAdmin = admin.ModelAdmin[Any]
else:
    _ModelAdmin = admin.ModelAdmin

PAGE = 100
SHORT = 80
"""Characters of a result or an error in a list."""


def isolated(text: str | None) -> SafeString | str:
    """Text from a task's arguments: escaped, and kept from turning the direction of what stands beside it."""
    return format_html("<bdi>{}</bdi>", text) if text else "-"


class ReadOnlyAdmin(_ModelAdmin):
    """For looking, not for touching; always the configured database, whatever a router says (C12)."""

    actions = None
    list_per_page = PAGE
    show_full_result_count = False

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).using(conf.alias())


@admin.register(HeldLock)
class HeldLockAdmin(ReadOnlyAdmin):
    """Not a list of rows but of what both stores say at this moment."""

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        context = self.admin_site.each_context(request) | self._page(request) | (extra_context or {})
        return TemplateResponse(request, "admin/once_fenced/heldlock/change_list.html", context)

    def _page(self, request: HttpRequest) -> dict[str, Any]:
        query = request.GET.get("q", "").strip()
        locks, problems = held_locks()
        found = [lock for lock in locks if lock.matches(query)]
        page = Paginator(found, PAGE).get_page(request.GET.get("p"))
        return {
            "title": _("Held locks"),
            "opts": self.opts,
            "page": page,
            "problems": problems,
            "query": query,
        }


@admin.register(LedgerEntry)
class LedgerEntryAdmin(ReadOnlyAdmin):
    list_display = (
        "key_text",
        "state",
        "task_name",
        "attempt",
        "takeovers",
        "token",
        "started_at",
        "finished_at",
        "short",
    )
    list_filter = ("state", "task_name")
    search_fields = ("key", "task_id")
    ordering = ("-started_at",)
    fieldsets = (
        (None, {"fields": ("key_text", "state", "task_name", "task_id", "attempt", "takeovers")}),
        (_("Outcome"), {"fields": ("result_text", "result_omitted", "error_text")}),
        (_("Fence"), {"fields": ("resource_text", "token", "holder")}),
        (_("Times"), {"fields": ("created_at", "started_at", "finished_at", "retain_until")}),
        (_("Identity"), {"fields": ("key_digest", "fingerprint", "scope")}),
        (_("What happened"), {"fields": ("effects_table", "events_table")}),
    )
    readonly_fields = (
        "key_text",
        "result_text",
        "error_text",
        "resource_text",
        "effects_table",
        "events_table",
    )

    @admin.display(description=_("key"), ordering="key")
    def key_text(self, entry: LedgerEntry) -> SafeString | str:
        return isolated(entry.key)

    @admin.display(description=_("resource"))
    def resource_text(self, entry: LedgerEntry) -> SafeString | str:
        return isolated(entry.resource)

    @admin.display(description=_("result"))
    def short(self, entry: LedgerEntry) -> SafeString | str:
        return isolated(Truncator(entry.result or entry.error or entry.result_omitted or "").chars(SHORT))

    @admin.display(description=_("result"))
    def result_text(self, entry: LedgerEntry) -> SafeString | str:
        return isolated(entry.result)

    @admin.display(description=_("error"))
    def error_text(self, entry: LedgerEntry) -> SafeString | str:
        return isolated(entry.error)

    @admin.display(description=_("effects"))
    def effects_table(self, entry: LedgerEntry) -> str:
        effects = Effect.objects.using(conf.alias()).filter(entry=entry.pk).order_by("started_at")
        return render_to_string("admin/once_fenced/ledgerentry/effects.html", {"effects": effects[:PAGE]})

    @admin.display(description=_("events"))
    def events_table(self, entry: LedgerEntry) -> str:
        events = Event.objects.using(conf.alias()).filter(Q(key_digest=entry.pk) | Q(old_key_digest=entry.pk))
        return render_to_string(
            "admin/once_fenced/ledgerentry/events.html", {"events": events.order_by("-id")[:PAGE]}
        )


@admin.register(Event)
class EventAdmin(ReadOnlyAdmin):
    list_display = (
        "at",
        "kind",
        "resource_text",
        "token",
        "old_token",
        "task_id",
        "old_task_id",
        "actor",
        "detail_text",
    )
    list_filter = ("kind",)
    search_fields = ("resource", "task_id")
    ordering = ("-id",)
    fieldsets = (
        (None, {"fields": ("at", "kind", "resource_text", "actor", "detail_text")}),
        (_("Who"), {"fields": ("key_digest", "task_name", "task_id", "holder", "worker", "token")}),
        (
            _("Taken over from"),
            {"fields": ("old_key_digest", "old_task_id", "old_holder", "old_worker", "old_token")},
        ),
    )
    readonly_fields = ("resource_text", "detail_text")

    @admin.display(description=_("resource"), ordering="resource")
    def resource_text(self, event: Event) -> SafeString | str:
        return isolated(event.resource)

    @admin.display(description=_("detail"))
    def detail_text(self, event: Event) -> SafeString | str:
        return isolated(event.detail)
