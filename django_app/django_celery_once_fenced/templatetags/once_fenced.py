"""For the admin's templates: ``{% load once_fenced %}``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from django import template
from django.contrib.admin.utils import quote
from django.urls import NoReverseMatch, reverse
from django.utils.html import conditional_escape
from django.utils.http import urlencode
from django.utils.safestring import SafeString, mark_safe

from django_celery_once_fenced import readable, spans

if TYPE_CHECKING:
    from django_celery_once_fenced.locks import Lock

register = template.Library()
_BREAKS = re.compile(r"([._:])(?=\w)")


@register.simple_tag(takes_context=True)
def page_url(context: Any, model: str, page: str = "changelist", *args: Any) -> str:
    """The address of a page of this app in the admin site that shows this one; empty where it is not registered there."""
    site = getattr(context.get("request"), "current_app", None) or context.get("site_name") or "admin"
    try:
        return reverse(
            f"admin:once_fenced_{model}_{page}", args=[quote(arg) for arg in args], current_app=site
        )
    except NoReverseMatch:
        return ""


@register.simple_tag(takes_context=True)
def lock_url(context: Any, lock: Lock) -> str:
    """The address of the page of one lock."""
    found: str = page_url(context, "heldlock", "change", lock.id)
    return found


@register.simple_tag(takes_context=True)
def rows_url(context: Any, model: str, **query: str) -> str:
    """The address of a list, filtered; empty where the user may not see it."""
    address = (
        page_url(context, model) if context["request"].user.has_perm(f"once_fenced.view_{model}") else ""
    )
    return f"{address}?{urlencode(query)}" if address else ""


@register.filter
def breakable(text: Any) -> SafeString:
    """A dotted or divided name that may be broken after a dot, a colon or an underscore, and nowhere else if it can help it."""
    return mark_safe(_BREAKS.sub(r"\1<wbr>", conditional_escape(text)))  # noqa: S308 - escaped before


@register.filter
def short(key: str, task: str | None) -> str:
    """A key without the scope that only repeats its task."""
    return readable.short(key, task)


@register.filter
def lasting(seconds: float) -> str:
    """Seconds as a person reads them."""
    return spans.lasting(seconds)


@register.filter
def detail(text: str | None) -> str:
    """Of an event."""
    return readable.detail(text)


@register.filter
def outcome(recorded: Any) -> str:
    """Of a dedup record or an effect."""
    return readable.outcome(recorded)


@register.filter
def counter(counters: Any, name: str) -> int:
    """A counter by name; 0 where nothing was counted."""
    return int(counters.get(name, 0))
