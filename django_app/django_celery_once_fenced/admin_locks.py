# ruff: noqa: ARG002 - the signatures are Django's
"""The page *Held locks*: the list, one lock, and what a person does to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.db.models import Q
from django.http import Http404, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext
from django.views.decorators.http import require_POST

from celery_once_fenced import operate
from celery_once_fenced.errors import OnceError
from celery_once_fenced.stores import Cursor
from django_celery_once_fenced import conf, readable, tiers
from django_celery_once_fenced.admin_reading import PAGE, ReadOnlyAdmin, isolated
from django_celery_once_fenced.estimates import EXACT
from django_celery_once_fenced.explained import explained
from django_celery_once_fenced.lock_actions import ACTIONS, Name, Plan, no_fence, offered, plan, release
from django_celery_once_fenced.lock_filters import filters_of, query_of
from django_celery_once_fenced.lock_list import LockPage, find_lock, lock_page
from django_celery_once_fenced.locks import Lock
from django_celery_once_fenced.models import Event, HeldLock, LedgerEntry
from django_celery_once_fenced.objects import object_of
from django_celery_once_fenced.overview import takeovers
from django_celery_once_fenced.records import log
from django_celery_once_fenced.steps import under_way

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponse

__all__ = ["HeldLockAdmin", "ReasonForm"]

LONGEST_REASON = 1000
CHANGELIST = "once_fenced_heldlock_changelist"


class ReasonForm(forms.Form):
    """Why: what the next person at two in the morning will want to know."""

    reason = forms.CharField(
        label=gettext_lazy("Reason"),
        max_length=LONGEST_REASON,
        widget=forms.Textarea(attrs={"rows": 3, "class": "vLargeTextField"}),
        help_text=gettext_lazy("It is kept with your name."),
    )


class HeldLockAdmin(ReadOnlyAdmin):
    """Not a list of rows but of what both stores say at this moment."""

    class Media:
        js = ("once_fenced/countdown.js",)

    def get_urls(self) -> list[Any]:
        ask = self.admin_site.admin_view(require_POST(self.ask_view))
        return [path("ask/<slug:name>/", ask, name="once_fenced_heldlock_ask"), *super().get_urls()]

    def allowed(self, request: HttpRequest) -> list[Name]:
        """The actions that this user may take."""
        return [name for name, action in ACTIONS.items() if request.user.has_perm(action.permission)]

    # --- the list -----------------------------------------------------------------------------------------------------

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        if request.method == "POST":
            return self.ask_view(request, request.POST.get("action", ""))
        context = self.page_context(request, **self._list(request)) | (extra_context or {})
        return TemplateResponse(request, "admin/once_fenced/heldlock/change_list.html", context)

    def _list(self, request: HttpRequest) -> dict[str, Any]:
        query = query_of(request.GET)
        after, before = (Cursor.parse(request.GET.get(name, "")) for name in ("after", "before"))
        page = lock_page(query, after or before, back=before is not None and after is None)
        tasks = {*tiers.policies(), *(lock.task for lock in page.locks)}
        return {
            "title": _("Held locks"),
            "page": page,
            "query": query,
            "filters": filters_of(request.GET, query, tasks, {lock.worker for lock in page.locks}),
            "kept": [
                (name, value)
                for name, values in request.GET.lists()
                for value in values
                if name not in ("q", "after", "before")
            ],
            "counted": _counted(page, filtered=bool(query), whole=not (after or before)),
            "actions": [(name, ACTIONS[name].title) for name in self.allowed(request)],
            "action_checkbox_name": ACTION_CHECKBOX_NAME,
            "takeovers": [] if page.locks or query or page.problems else takeovers(),
        }

    # --- one lock -----------------------------------------------------------------------------------------------------

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Shown also where nobody has it any more: a page that was open is to say so, and not to be missing."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        if request.method == "POST":
            raise PermissionDenied
        wanted = unquote(object_id)
        if wanted[:2] not in ("q:", "r:", "f:"):
            raise Http404
        lock, problem = _found(wanted)
        context = self.page_context(request, title=_("Held lock"), lock=lock, problem=problem)
        context |= {"wanted": wanted, "known": "" if lock else _known(wanted)}
        if lock is not None:
            context |= self._detail(request, lock)
        context |= extra_context or {}
        return TemplateResponse(request, "admin/once_fenced/heldlock/change_form.html", context)

    def _detail(self, request: HttpRequest, lock: Lock) -> dict[str, Any]:
        entry = _entry(lock)
        may_see_entry = entry is not None and request.user.has_perm("once_fenced.view_ledgerentry")
        return {
            "policy": tiers.policy_of(lock.task),
            "entry": entry if may_see_entry else None,
            "events": _events(lock, entry),
            "explained": explained(lock),
            "under_way": under_way(lock),
            "business": object_of(lock, request, self.admin_site),
            "actions": offered(lock, self.allowed(request)),
            "no_fence": no_fence(lock) if "bump" in self.allowed(request) else "",
        }

    # --- actions ------------------------------------------------------------------------------------------------------

    def ask_view(self, request: HttpRequest, name: str) -> HttpResponse:
        """Show what will happen; do it where the reason is given."""
        if name not in ACTIONS:
            self.message_user(request, _("No action selected."), messages.WARNING)
            return self._back(request)
        if not self.has_view_permission(request) or name not in self.allowed(request):
            raise PermissionDenied
        seen = request.POST.getlist(ACTION_CHECKBOX_NAME)[:PAGE]
        if not seen:
            self.message_user(request, _("No locks were selected."), messages.WARNING)
            return self._back(request)
        form = ReasonForm(request.POST if "confirmed" in request.POST else None)
        if form.is_valid():
            self._release(request, name, seen, form.cleaned_data["reason"])
            return self._back(request)
        return self._ask(request, name, seen, form)

    def _ask(self, request: HttpRequest, name: Name, seen: Sequence[str], form: ReasonForm) -> HttpResponse:
        try:
            planned = plan(name, seen)
        except OnceError as error:
            self.message_user(request, str(error), messages.ERROR)
            planned = Plan(())
        context = self.page_context(
            request,
            title=ACTIONS[name].title,
            name=name,
            action=ACTIONS[name],
            plan=planned,
            form=form,
            action_checkbox_name=ACTION_CHECKBOX_NAME,
        )
        return TemplateResponse(request, "admin/once_fenced/heldlock/confirm.html", context)

    def _release(self, request: HttpRequest, name: Name, seen: Sequence[str], reason: str) -> None:
        for one in seen:
            try:
                done = release(name, one, actor=request.user.get_username(), reason=reason)
            except OnceError as error:
                self.message_user(request, str(error), messages.ERROR)
                return
            if done.lock is None:
                said = format_html(_("{}: not released. {}"), isolated(done.key), done.why)
                self.message_user(request, said, messages.WARNING)
            else:
                log(request, HeldLock, done.lock.id, done.key, f"{name}: {reason}")
                text = _("{}: released.") if name == "release" else _("{}: released, and its fence bumped.")
                self.message_user(request, format_html(text, isolated(done.key)), messages.SUCCESS)

    def _back(self, request: HttpRequest) -> HttpResponse:
        return HttpResponseRedirect(reverse(f"{self.admin_site.name}:{CHANGELIST}"))


def _counted(page: LockPage, *, filtered: bool, whole: bool) -> str:
    """How many there are, as exactly as it is known."""
    if whole and page.after is None:
        number = len(page.locks)
        return ngettext("%(number)d held lock", "%(number)d held locks", number) % {"number": number}
    if filtered:
        return _("%(number)d on this page, of %(total)d held locks in all") % {
            "number": len(page.locks),
            "total": page.total,
        }
    text = _("about %(total)d held locks") if page.total > EXACT else _("%(total)d held locks")
    return text % {"total": page.total}


def _found(wanted: str) -> tuple[Lock | None, str]:
    try:
        return find_lock(wanted), ""
    except OnceError as error:
        return None, str(error).strip()


def _known(wanted: str) -> str:
    """What a lock that nobody has any more reads like, as far as that is known."""
    kind, _colon, rest = wanted.partition(":")
    if kind == "f":
        return readable.resource(rest)
    digest = rest.partition(":")[0]
    if not operate.DIGEST.fullmatch(digest) or not conf.has_fences():
        return ""
    entry = LedgerEntry.objects.using(conf.alias()).filter(pk=digest).first()
    return entry.key if entry else ""


def _entry(lock: Lock) -> LedgerEntry | None:
    if not lock.digest or not conf.has_fences():
        return None
    return LedgerEntry.objects.using(conf.alias()).filter(pk=lock.digest).first()


def _events(lock: Lock, entry: LedgerEntry | None) -> Sequence[Event]:
    if not lock.digest or not conf.has_fences():
        return []
    digests = {lock.digest, *([entry.pk] if entry else [])}
    of_it = Q(key_digest__in=digests) | Q(old_key_digest__in=digests)
    return list(Event.objects.using(conf.alias()).filter(of_it).order_by("-id")[:PAGE])


def lock_url(lock: Lock, site: str) -> str:
    return reverse(f"{site}:once_fenced_heldlock_change", args=[quote(lock.id)])
