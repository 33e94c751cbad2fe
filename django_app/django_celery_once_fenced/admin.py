# ruff: noqa: ARG002 - the signatures are Django's
"""Pages: held locks (live), dedup records with their effects and events, events; and keys in doubt, to be resolved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.db.models import OuterRef, Q, Subquery
from django.template.loader import render_to_string
from django.template.response import TemplateResponse
from django.utils.html import format_html
from django.utils.text import Truncator
from django.utils.translation import gettext_lazy as _

from celery_once_fenced.errors import OnceError
from django_celery_once_fenced import conf
from django_celery_once_fenced.doubts import ResolveForm
from django_celery_once_fenced.locks import held_locks
from django_celery_once_fenced.models import Effect, EffectState, Event, HeldLock, InDoubt, LedgerEntry, State

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

    actions: Any = None
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
    list_display: Any = (
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
    list_filter: ClassVar[Any] = ("state", "task_name")
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


@admin.register(InDoubt)
class InDoubtAdmin(LedgerEntryAdmin):
    """Keys with a step of unknown outcome, and the one thing that a person does about them: decide."""

    list_display = ("key_text", "task_name", "step_text", "since_when", "attempt", "task_id")
    list_filter = ("task_name",)
    ordering = ("started_at",)
    actions: Any = ["resolve"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        unknown = Effect.objects.filter(entry=OuterRef("pk"), state=EffectState.STARTED).order_by(
            "started_at"
        )
        columns = {
            "step": Subquery(unknown.values("name")[:1]),
            "since": Subquery(unknown.values("started_at")[:1]),
            "downstream_key": Subquery(unknown.values("downstream_key")[:1]),
        }
        doubtful: QuerySet[Any] = super().get_queryset(request).filter(state=State.IN_DOUBT)
        annotated: QuerySet[Any] = doubtful.annotate(**columns)
        return annotated

    def has_resolve_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("once_fenced.resolve_indoubt")

    @admin.display(description=_("step of unknown outcome"))
    def step_text(self, entry: Any) -> SafeString | str:
        return isolated(entry.step)

    @admin.display(description=_("since"))
    def since_when(self, entry: Any) -> Any:
        return entry.since

    @admin.action(permissions=["resolve"], description=_("Resolve selected keys"))
    def resolve(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        """Ask what became of them, and on what grounds; then record it."""
        entries = list(queryset)
        form = ResolveForm(request.POST if "resolve" in request.POST else None)
        if form.is_valid() or not entries:
            self._decide(request, entries, form)
            return None
        context = self.admin_site.each_context(request) | {
            "title": _("Resolve what is in doubt"),
            "opts": self.opts,
            "entries": entries,
            "form": form,
            "action_checkbox_name": ACTION_CHECKBOX_NAME,
        }
        return TemplateResponse(request, "admin/once_fenced/indoubt/resolve.html", context)

    def _decide(self, request: HttpRequest, entries: list[Any], form: ResolveForm) -> None:
        try:
            decided = sum(self._decide_one(request, entry, form) for entry in entries)
        except OnceError as error:
            self.message_user(request, str(error), messages.ERROR)
            return
        left = len(set(request.POST.getlist(ACTION_CHECKBOX_NAME))) - decided
        if left > 0:
            text = _("%(count)d not resolved: in doubt no more, or for another attempt than the page showed.")
            self.message_user(request, text % {"count": left}, messages.WARNING)

    def _decide_one(self, request: HttpRequest, entry: Any, form: ResolveForm) -> bool:
        if entry.holder not in request.POST.getlist("seen"):
            return False
        decided = form.decide(entry, request.user.get_username())
        if decided:
            outcome, reason = form.cleaned_data["outcome"], form.cleaned_data["reason"]
            self.log_change(request, entry, f"{outcome}: {reason}")
            self.message_user(request, format_html("{}: {}", isolated(entry.key), outcome), messages.SUCCESS)
        return decided


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
