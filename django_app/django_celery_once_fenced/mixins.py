"""``HeldLocksMixin``: *locks of this object* on the page of another model's admin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.template.loader import render_to_string
from django.utils.translation import gettext_lazy as _

from celery_once_fenced.errors import OnceError
from django_celery_once_fenced.lock_actions import ACTIONS, offered
from django_celery_once_fenced.lock_list import LockPage, locks_reading
from django_celery_once_fenced.objects import texts_of

if TYPE_CHECKING:
    from django.http import HttpRequest

    _ModelAdmin = admin.ModelAdmin[Any]
else:
    _ModelAdmin = object

__all__ = ["HeldLocksMixin"]

FIELD = "_once_fenced_held_locks"


class HeldLocksMixin(_ModelAdmin):
    """Write it before ``ModelAdmin``.

    Attributes:
        held_lock_keys: What keys and resources of this object read like, with its attributes in braces:
            ``("charge:{pk}", "account:{account_id}")``.  A key may have the scope of its task before that.
    """

    held_lock_keys: Sequence[str] = ()

    class Media:
        css = {"all": ("once_fenced/admin.css",)}  # noqa: RUF012 - Django's own form
        js = ("once_fenced/countdown.js",)

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        given = super().get_readonly_fields(request, obj)
        return (*given, self._field(request)) if self._shows(request, obj) else given

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        given = super().get_fieldsets(request, obj)
        if not self._shows(request, obj):
            return given
        field = self._field(request)
        others = [
            (title, {**options, "fields": [name for name in options["fields"] if id(name) != id(field)]})
            for title, options in given
        ]
        return [*others, (_("Locks of this object"), {"fields": (field,)})]

    def _shows(self, request: HttpRequest, obj: Any) -> bool:
        return (
            obj is not None
            and bool(self.held_lock_keys)
            and request.user.has_perm("once_fenced.view_heldlock")
        )

    def _field(self, request: HttpRequest) -> Callable[[Any], str]:
        """One function for each request: what it shows depends on the user, and Django knows a field again by identity."""
        known: Callable[[Any], str] | None = getattr(request, FIELD, None)
        if known is not None:
            return known

        @admin.display(description=_("held now"))
        def held_locks(found: Any) -> str:
            return self._table(request, found)

        setattr(request, FIELD, held_locks)
        return held_locks

    def _table(self, request: HttpRequest, found: Any) -> str:
        try:
            page = locks_reading(texts_of(self.held_lock_keys, found))
        except OnceError as error:
            page = LockPage(locks=(), problems=[str(error).strip()])
        allowed = [name for name, action in ACTIONS.items() if request.user.has_perm(action.permission)]
        context = {
            "locks": [(lock, offered(lock, allowed)) for lock in page.locks],
            "page": page,
            "may_act": bool(allowed),
            "action_checkbox_name": ACTION_CHECKBOX_NAME,
            "site": self.admin_site.name,
        }
        return render_to_string("admin/once_fenced/heldlock/of_object.html", context, request)
