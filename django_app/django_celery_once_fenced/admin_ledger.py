# ruff: noqa: ARG002 - the signatures are Django's
"""The page *Dedup records*: the ledger, with what can be done to an entry."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import unquote
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import PermissionDenied
from django.db.models import Q
from django.http import HttpResponseRedirect
from django.template.loader import render_to_string
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.html import format_html
from django.utils.text import Truncator
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from celery_once_fenced import operate, runtime
from celery_once_fenced.errors import OnceError
from celery_once_fenced.stores import Pruned
from django_celery_once_fenced import conf, readable
from django_celery_once_fenced.admin_locks import ReasonForm
from django_celery_once_fenced.admin_reading import (
    PAGE,
    isolated,
    moment_of,
    to_the_second,
    with_note,
    with_task,
)
from django_celery_once_fenced.ledger_filters import (
    AttemptsFilter,
    TaskFilter,
    WhenFilter,
)
from django_celery_once_fenced.models import Effect, Event, LedgerEntry, State
from django_celery_once_fenced.records import log, note_pruned
from django_celery_once_fenced.spans import lasting

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.http import HttpRequest, HttpResponse
    from django.utils.safestring import SafeString


from django_celery_once_fenced.admin_lists import LedgerListAdmin

__all__ = ["LedgerEntryAdmin"]

SHORT = 80
"""Characters of a result or an error in a list."""
BATCHES, BATCH = 20, 1000
"""What one click prunes at most; the command line prunes on."""
DAY = 86400.0
_GONE = gettext_lazy(
    "{}: nothing was done. It is gone already, forgotten or pruned since the page was shown."
)
OUTCOME = {"result_text": "result", "result_omitted": "result_omitted", "error_text": "error"}
"""Fields of a page, and their columns."""
MOMENTS: Any = tuple(
    moment_of(LedgerEntry._meta.get_field(name), attribute)
    for name, attribute in (
        ("created_at", ""),
        ("started_at", ""),
        ("finished_at", ""),
        ("replay_until", "answers_until"),
        ("retain_until", ""),
    )
)


class LedgerEntryAdmin(LedgerListAdmin):
    list_display: Any = ("key_and_task", "state_badge", "attempts", "token", "started", "short")
    list_filter: ClassVar[Any] = ("state", AttemptsFilter, WhenFilter, TaskFilter)
    windowed_filters: ClassVar[tuple[str, ...]] = ("attempts", "task_name")
    search_fields = ("key", "task_id")
    search_help_text = gettext_lazy("Key, or part of it; task id; digest")
    ordering = ("-started_at",)
    sortable_by = ("started_at",)
    actions: Any = ("forget",)
    change_form_template = "admin/once_fenced/ledgerentry/change_form.html"
    fieldsets: ClassVar[Any] = (
        (None, {"fields": ("key_text", "state_badge", "task_name", "task_id", "attempt", "takeovers")}),
        (gettext_lazy("Outcome"), {"fields": tuple(OUTCOME)}),
        (gettext_lazy("Effects"), {"fields": ("effects_table",)}),
        (gettext_lazy("What happened"), {"fields": ("events_table",)}),
        (gettext_lazy("Fence"), {"fields": ("resource_text", "token", "holder")}),
        (
            gettext_lazy("Times"),
            {"fields": MOMENTS},
        ),
        (
            gettext_lazy("Identity"),
            {"fields": ("key_digest", "fingerprint", "scope", "run_id"), "classes": ("collapse",)},
        ),
    )
    readonly_fields: ClassVar[Any] = (
        "key_text",
        "state_badge",
        "result_text",
        "error_text",
        "resource_text",
        "effects_table",
        "events_table",
        *MOMENTS,
    )

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Of result, error and why there is no result, those that there are."""
        given = list(super().get_fieldsets(request, obj))
        known = [name for name, column in OUTCOME.items() if getattr(obj, column, None) is not None]
        return [
            (
                title,
                {**options, "fields": known or ["result_text"]}
                if "result_text" in options["fields"]
                else options,
            )
            for title, options in given
        ]

    # --- columns ------------------------------------------------------------------------------------------------------

    @admin.display(description=gettext_lazy("key"), ordering="key")
    def key_text(self, entry: LedgerEntry) -> SafeString | str:
        return isolated(entry.key)

    @admin.display(description=gettext_lazy("key and task"))
    def key_and_task(self, entry: LedgerEntry) -> SafeString | str:
        return with_task(entry.key, entry.task_name)

    @admin.display(description=gettext_lazy("attempts"))
    def attempts(self, entry: LedgerEntry) -> SafeString | str:
        if not entry.takeovers:
            return str(entry.attempt)
        return with_note(entry.attempt, _("taken over: %(number)d") % {"number": entry.takeovers})

    @admin.display(description=gettext_lazy("started"), ordering="started_at")
    def started(self, entry: LedgerEntry) -> SafeString | str:
        took = None if entry.finished_at is None else (entry.finished_at - entry.started_at).total_seconds()
        note = "" if took is None else _("took %(time)s") % {"time": lasting(took)}
        return with_note(to_the_second(entry.started_at), note)

    @admin.display(description=gettext_lazy("state"), ordering="state")
    def state_badge(self, entry: LedgerEntry) -> SafeString | str:
        return format_html('<span class="of-badge of-{}">{}</span>', entry.state, State(entry.state).label)

    @admin.display(description=gettext_lazy("resource"))
    def resource_text(self, entry: LedgerEntry) -> SafeString | str:
        return isolated(readable.resource(entry.resource))

    @admin.display(description=gettext_lazy("result"))
    def short(self, entry: LedgerEntry) -> SafeString | str:
        return isolated(Truncator(readable.outcome(entry)).chars(SHORT))

    @admin.display(description=gettext_lazy("result"))
    def result_text(self, entry: LedgerEntry) -> SafeString | str:
        return isolated(readable.value(entry.result))

    @admin.display(description=gettext_lazy("error"))
    def error_text(self, entry: LedgerEntry) -> SafeString | str:
        return isolated(readable.error(entry.error))

    @admin.display(description=gettext_lazy("effects"))
    def effects_table(self, entry: LedgerEntry) -> str:
        effects = Effect.objects.using(conf.alias()).filter(entry=entry.pk).order_by("started_at")
        return render_to_string("admin/once_fenced/ledgerentry/effects.html", {"effects": effects[:PAGE]})

    @admin.display(description=gettext_lazy("events"))
    def events_table(self, entry: LedgerEntry) -> str:
        events = Event.objects.using(conf.alias()).filter(Q(key_digest=entry.pk) | Q(old_key_digest=entry.pk))
        return render_to_string(
            "admin/once_fenced/ledgerentry/events.html", {"events": events.order_by("-id")[:PAGE]}
        )

    # --- searching ----------------------------------------------------------------------------------------------------

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        if not search_term:
            return queryset, False
        if operate.DIGEST.fullmatch(search_term):
            return queryset.filter(pk=search_term), False
        if self.is_exact(search_term):
            return queryset.filter(key=search_term), False
        return queryset.filter(Q(key__contains=search_term) | Q(task_id=search_term)), False

    def is_exact(self, term: str) -> bool:
        entries = LedgerEntry.objects.using(conf.alias())
        return bool(operate.DIGEST.fullmatch(term)) or entries.filter(key=term).exists()

    # --- what a person may do -----------------------------------------------------------------------------------------

    def get_urls(self) -> list[Any]:
        view = self.admin_site.admin_view(self.prune_view)
        name = f"once_fenced_{self.opts.model_name}_prune"
        return [path("prune/", view, name=name), *super().get_urls()]

    def has_forget_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("once_fenced.forget_ledgerentry")

    def has_prune_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("once_fenced.prune_ledgerentry")

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        may_prune = self.has_prune_permission(request) and self.opts.model_name == "ledgerentry"
        return super().changelist_view(request, {"may_prune": may_prune, **(extra_context or {})})

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        entry = self.get_object(request, unquote(object_id))
        shown = {"buttons": self.buttons(request, entry) if entry else [], "entry": entry}
        return super().change_view(request, object_id, form_url, shown | (extra_context or {}))

    def buttons(self, request: HttpRequest, entry: LedgerEntry) -> list[tuple[str, Any]]:
        """What can be done to one record: the name of the action, and what its button says."""
        if entry.state in (State.RUNNING, State.IN_DOUBT) or not self.has_forget_permission(request):
            return []
        return [("forget", _("Forget"))]

    @admin.action(
        permissions=["forget"], description=gettext_lazy("Forget selected keys, so that they may run again")
    )
    def forget(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        """Ask for a reason; then delete the entries."""
        entries = list(queryset[:PAGE])
        form = ReasonForm(request.POST if "forget" in request.POST else None)
        if form.is_valid() or not entries:
            self._forget(request, entries, form)
            return None
        context = self.page_context(
            request,
            title=_("Forget keys"),
            entries=entries,
            form=form,
            action_checkbox_name=ACTION_CHECKBOX_NAME,
        )
        return TemplateResponse(request, "admin/once_fenced/ledgerentry/forget.html", context)

    def _forget(self, request: HttpRequest, entries: list[LedgerEntry], form: ReasonForm) -> None:
        left = set(request.POST.getlist(ACTION_CHECKBOX_NAME))
        seen = request.POST.getlist("seen")
        for entry in entries:
            reason = form.cleaned_data["reason"]
            try:
                done = entry.holder in seen and operate.forget(
                    str(entry.pk), reason=reason, actor=request.user.get_username()
                )
            except OnceError as error:
                self.message_user(request, str(error), messages.ERROR)
                return
            if done:
                left.discard(str(entry.pk))
                log(request, LedgerEntry, str(entry.pk), entry.key, f"forget: {reason}")
                text = _("{}: forgotten, and may run again.")
                self.message_user(request, format_html(text, isolated(entry.key)), messages.SUCCESS)
        self.say_what_was_left(
            request,
            left,
            _("{}: not forgotten. It is running, in doubt, or at another attempt than the page showed."),
        )

    def say_what_was_left(self, request: HttpRequest, left: Iterable[str], text: str) -> None:
        """One message for each record that was chosen and that nothing was done to; ``text`` is for those that are there."""
        digests = [chosen for chosen in left if operate.DIGEST.fullmatch(chosen)]
        found = LedgerEntry.objects.using(conf.alias()).filter(pk__in=digests)
        keys = dict(found.values_list("pk", "key"))
        for chosen in sorted(left, key=lambda pk: keys.get(pk, pk))[:PAGE]:
            said = (text, keys[chosen]) if chosen in keys else (str(_GONE), _gone(chosen))
            self.message_user(request, format_html(said[0], isolated(said[1])), messages.WARNING)

    def prune_view(self, request: HttpRequest) -> HttpResponse:
        """Delete what nobody needs any more: show how much, then do it, a bounded number of rows at a time."""
        if not self.has_prune_permission(request):
            raise PermissionDenied
        form = PruneForm(request.POST if request.method == "POST" else None)
        back = reverse(f"{self.admin_site.name}:once_fenced_ledgerentry_changelist")
        try:
            if form.is_valid():
                self._prune(request, form.cleaned_data["grace"])
                return HttpResponseRedirect(back)
            due = _due(DAY)
        except OnceError as error:
            self.message_user(request, str(error), messages.ERROR)
            return HttpResponseRedirect(back)
        context = self.page_context(
            request, title=_("Prune"), form=form, due=due, most=BATCHES * BATCH, back=back
        )
        return TemplateResponse(request, "admin/once_fenced/ledgerentry/prune.html", context)

    def _prune(self, request: HttpRequest, grace: timedelta) -> None:
        fences = entries = sent = 0
        more = False
        ledger = runtime.current().ledger
        for _batch in range(BATCHES):
            pruned = ledger.prune(grace.total_seconds(), BATCH) if ledger is not None else Pruned(0, 0, 0)
            fences, entries, sent = fences + pruned.fences, entries + pruned.entries, sent + pruned.messages
            more = bool(pruned)
            if not pruned:
                break
        given = {"entries": entries, "fences": fences, "messages": sent}
        text = _("Pruned: %(entries)d dedup records, %(fences)d fences, %(messages)d sent messages.") % given
        if more:
            text += " " + _("There may be more: prune again, or use the command line.")
        actor = request.user.get_username()
        note_pruned(actor, f"entries={entries} fences={fences} messages={sent}")
        log(request, LedgerEntry, "", str(_("Prune")), text)
        self.message_user(request, text, messages.SUCCESS)


def _gone(chosen: str) -> str:
    """What a record that is no longer there was called, as far as somebody wrote it down."""
    if not operate.DIGEST.fullmatch(chosen):
        return chosen
    logged = LogEntry.objects.filter(
        content_type=ContentType.objects.get_for_model(LedgerEntry), object_id=chosen
    ).first()
    if logged is not None:
        return logged.object_repr
    events = Event.objects.using(conf.alias()).filter(key_digest=chosen, kind="ledger.forgotten")
    newest = events.order_by("-id").first()
    return readable.resource(newest.resource) if newest is not None else chosen


class PruneForm(forms.Form):
    """How long what is free stays."""

    grace = forms.TypedChoiceField(
        label=gettext_lazy("Keep what has been free for less than"),
        coerce=lambda days: timedelta(days=int(days)),
        choices=(
            ("1", gettext_lazy("1 day")),
            ("7", gettext_lazy("7 days")),
            ("30", gettext_lazy("30 days")),
        ),
        initial="1",
        help_text=gettext_lazy(
            "For fences and sent messages; a dedup record says itself how long it is kept."
        ),
    )


def _due(grace: float) -> int:
    ledger = runtime.current().ledger
    return ledger.due(grace) if ledger is not None else 0
