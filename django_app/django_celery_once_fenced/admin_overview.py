"""The page *Overview*."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.core.exceptions import PermissionDenied
from django.template.response import TemplateResponse
from django.utils.translation import gettext as _

from django_celery_once_fenced.admin_reading import ReadOnlyAdmin
from django_celery_once_fenced.cards import cards_of
from django_celery_once_fenced.overview import EVENTS, overview

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponse

__all__ = ["OverviewAdmin"]


class OverviewAdmin(ReadOnlyAdmin):
    """No list of rows, but every guarded task as both stores know it at this moment."""

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        seen = overview()
        context = self.page_context(
            request,
            title=_("Overview"),
            overview=seen,
            cards=cards_of(seen, request.user, self.admin_site.name),
            events=EVENTS,
            **(extra_context or {}),
        )
        return TemplateResponse(request, "admin/once_fenced/overview/change_list.html", context)
