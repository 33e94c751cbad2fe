# ruff: noqa: ARG002 - the signatures are Django's
"""What all pages share: they are for looking, and what they show can do no harm."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.utils.formats import date_format
from django.utils.html import format_html
from django.utils.timezone import localtime

from django_celery_once_fenced import conf
from django_celery_once_fenced.templatetags.once_fenced import breakable, short

if TYPE_CHECKING:
    from django.db.models import Model, QuerySet
    from django.http import HttpRequest
    from django.utils.safestring import SafeString

    _ModelAdmin = admin.ModelAdmin[Any]
else:
    _ModelAdmin = admin.ModelAdmin

__all__ = [
    "PAGE",
    "ReadOnlyAdmin",
    "identifier",
    "isolated",
    "moment_of",
    "second_of",
    "to_the_second",
    "with_note",
    "with_task",
]

PAGE = 100


def isolated(text: object) -> SafeString | str:
    """Text from a task's arguments: escaped, and kept from turning the direction of what stands beside it."""
    return format_html("<bdi>{}</bdi>", text) if text not in (None, "") else "-"


def with_task(key: str, task: str) -> SafeString:
    """A key without the scope that only repeats its task, and the task below it."""
    return with_note(
        format_html("<bdi>{}</bdi>", breakable(short(key, task))),
        format_html("<bdi>{}</bdi>", breakable(task)),
    )


def with_note(text: object, note: object) -> SafeString:
    """A cell of two lines."""
    return format_html('{}<span class="of-sub">{}</span>', text, note) if note else format_html("{}", text)


def to_the_second(at: datetime | None) -> SafeString | str:
    """In the site's time zone; Django's own formats leave the seconds out, which matter here."""
    if at is None:
        return "-"
    day, second = second_of(at).split()
    return format_html('<span class="of-nowrap">{}</span> <span class="of-nowrap">{}</span>', day, second)


def second_of(at: datetime) -> str:
    """The same where it stands in a sentence."""
    return date_format(localtime(at), "Y-m-d H:i:s")


def moment_of(field: Any, attribute: str = "") -> Any:
    """What shows a column that holds a time, or an attribute in its place, on the page of one row."""

    @admin.display(description=field.verbose_name)
    def shown(row: Any) -> SafeString | str:
        return to_the_second(getattr(row, attribute or field.name))

    shown.__name__ = field.name  # by which Django finds its help text
    return shown


def identifier(text: str | None) -> SafeString | str:
    """A random id in a list: as much of it as tells it apart, all of it under the pointer."""
    return format_html('<bdi class="of-id" title="{}">{}</bdi>', text, text) if text else "-"


class ReadOnlyAdmin(_ModelAdmin):
    """For looking, not for touching; always the configured database, whatever a router says (C12)."""

    actions: Any = None
    list_per_page = PAGE
    show_full_result_count = False

    class Media:
        css = {"all": ("once_fenced/admin.css",)}  # noqa: RUF012 - Django's own form

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).using(conf.alias())

    def page_context(self, request: HttpRequest, **more: Any) -> dict[str, Any]:
        """What a page of one's own needs to look like one of Django's."""
        return self.admin_site.each_context(request) | {"opts": self.opts, "media": self.media} | more
