"""The page *Keys in doubt*: what is to be decided, and the one thing that a person does about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.db.models import OuterRef, Subquery
from django.template.response import TemplateResponse
from django.utils.html import format_html
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from celery_once_fenced.errors import OnceError
from django_celery_once_fenced.admin_ledger import LedgerEntryAdmin
from django_celery_once_fenced.admin_reading import identifier, isolated, to_the_second
from django_celery_once_fenced.doubts import ResolveForm
from django_celery_once_fenced.ledger_filters import TaskFilter
from django_celery_once_fenced.models import Effect, EffectState, LedgerEntry, State

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.http import HttpRequest, HttpResponse
    from django.utils.safestring import SafeString

__all__ = ["InDoubtAdmin"]


DECIDED = {
    "succeeded": _("it succeeded. Later calls get the result."),
    "failed": _("it failed. Later calls get an error with the reason."),
    "again": _("it runs again."),
}


class InDoubtAdmin(LedgerEntryAdmin):
    """Keys with a step of unknown outcome, and the one thing that a person does about them: decide."""

    list_display: Any = ("key_and_task", "step_text", "since_when", "attempts", "task_id_text")
    list_filter: ClassVar[Any] = (TaskFilter,)
    windowed_filters = ()
    ordering = ("started_at",)
    actions: Any = ("resolve",)

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

    def buttons(self, request: HttpRequest, entry: LedgerEntry) -> list[tuple[str, Any]]:
        decidable = entry.state == State.IN_DOUBT and self.has_resolve_permission(request)
        return [("resolve", _("Resolve"))] if decidable else []

    def has_resolve_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("once_fenced.resolve_indoubt")

    @admin.display(description=_("step of unknown outcome"))
    def step_text(self, entry: Any) -> SafeString | str:
        return isolated(entry.step)

    @admin.display(description=_("since"))
    def since_when(self, entry: Any) -> Any:
        return to_the_second(entry.since)

    @admin.display(description=_("task id"))
    def task_id_text(self, entry: Any) -> SafeString | str:
        return identifier(entry.task_id)

    @admin.action(permissions=["resolve"], description=_("Resolve selected keys"))
    def resolve(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        """Ask what became of them, and on what grounds; then record it."""
        entries = list(queryset)
        form = ResolveForm(request.POST if "resolve" in request.POST else None)
        if form.is_valid() or not entries:
            self._decide(request, entries, form)
            return None
        context = self.page_context(
            request,
            title=_("Resolve what is in doubt"),
            entries=entries,
            form=form,
            action_checkbox_name=ACTION_CHECKBOX_NAME,
        )
        return TemplateResponse(request, "admin/once_fenced/indoubt/resolve.html", context)

    def _decide(self, request: HttpRequest, entries: list[Any], form: ResolveForm) -> None:
        try:
            decided = {str(entry.pk) for entry in entries if self._decide_one(request, entry, form)}
        except OnceError as error:
            self.message_user(request, str(error), messages.ERROR)
            return
        self.say_what_was_left(
            request,
            set(request.POST.getlist(ACTION_CHECKBOX_NAME)) - decided,
            gettext("{}: not resolved. It is in doubt no more, or at another attempt than the page showed."),
        )

    def _decide_one(self, request: HttpRequest, entry: Any, form: ResolveForm) -> bool:
        if entry.holder not in request.POST.getlist("seen"):
            return False
        decided = form.decide(entry, request.user.get_username())
        if decided:
            outcome, reason = form.cleaned_data["outcome"], form.cleaned_data["reason"]
            self.log_change(request, entry, f"{outcome}: {reason}")
            said = format_html("{}: {}", isolated(entry.key), DECIDED[outcome])
            self.message_user(request, said, messages.SUCCESS)
        return decided
