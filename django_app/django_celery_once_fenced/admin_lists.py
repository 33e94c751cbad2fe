# ruff: noqa: ARG002 - the signatures are Django's
"""A list of many rows: fast with millions of them, and plain about what it leaves out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.utils.text import capfirst
from django.utils.translation import gettext as _

from django_celery_once_fenced.admin_reading import (
    PAGE,
    ReadOnlyAdmin,
)
from django_celery_once_fenced.estimates import PAGES, EstimatingPaginator
from django_celery_once_fenced.ledger_filters import (
    WINDOW,
    cut,
    of_when,
)

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.http import HttpRequest, HttpResponse


__all__ = ["LedgerChangeList", "LedgerListAdmin"]


class LedgerChangeList(ChangeList):
    """Says how many rows there are, about, and among how many it looked."""

    window = False

    @property
    def _admin(self) -> LedgerListAdmin:
        return cast(LedgerListAdmin, self.model_admin)

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> QuerySet[Any]:
        queryset: QuerySet[Any] = super().get_queryset(request, exclude_parameters)
        if not self._searches():
            return queryset
        column = self._admin.window_column
        # Where an index leads to a range of time, the window lies in that.
        when = "" if "when" in self._admin.windowed_filters else self.params.get("when", "")
        oldest = cut(of_when(self.root_queryset, when), column, self._admin.window)
        if oldest is None:
            return queryset
        self.window = True
        return queryset.filter(**{f"{column}__gt": oldest})

    def _searches(self) -> bool:
        """By anything that no index leads to."""
        exact = bool(self.query) and self._admin.is_exact(self.query)
        chosen = set(self.params) | set(self.get_filters_params())
        return (bool(self.query) and not exact) or any(
            name in self._admin.windowed_filters for name in chosen
        )

    @property
    def page_numbers(self) -> list[Any]:
        """The pages that are linked to, with gaps; none where there is but one."""
        return list(self.paginator.get_elided_page_range(self.page_num)) if self.multi_page else []

    @property
    def count_text(self) -> str:
        """How many there are, for people."""
        names = {
            "number": self.result_count,
            "name": self.opts.verbose_name if self.result_count == 1 else self.opts.verbose_name_plural,
        }
        about = getattr(self.paginator, "about", False)
        return (_("about %(number)d %(name)s") if about else _("%(number)d %(name)s")) % names

    @property
    def window_text(self) -> str:
        """What the list leaves out; empty where it leaves out nothing."""
        if self.window:
            return _(
                "Looked among the newest %(window)d. Further back: give a whole key, digest or task id, or a date."
            ) % {"window": self._admin.window}
        if getattr(self.paginator, "about", False):
            return _("The newest %(rows)d can be turned here. Further back leads a filter or a search.") % {
                "rows": PAGES * PAGE
            }
        return ""


class LedgerListAdmin(ReadOnlyAdmin):
    """A list of rows by an indexed column, newest first."""

    paginator = EstimatingPaginator
    window_column: ClassVar[str] = "started_at"
    window: ClassVar[int] = WINDOW
    windowed_filters: ClassVar[tuple[str, ...]] = ()
    change_list_template = "admin/once_fenced/ledger_list.html"
    show_facets = admin.ShowFacets.NEVER  # each would count the table

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return LedgerChangeList

    def is_exact(self, term: str) -> bool:
        """Whether an index finds what this search asks for."""
        return False

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        title = capfirst(str(self.opts.verbose_name_plural))
        return super().changelist_view(request, {"title": title, **(extra_context or {})})
