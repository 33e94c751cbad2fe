"""From a lock to the object it is about, and back, by what a model's admin says its locks read like.

class OrderAdmin(HeldLocksMixin, admin.ModelAdmin):
held_lock_keys = ("charge:{pk}",)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.core.exceptions import ValidationError
from django.urls import NoReverseMatch, reverse

from celery_once_fenced.templates import Template

if TYPE_CHECKING:
    from django.http import HttpRequest

    from django_celery_once_fenced.locks import Lock

__all__ = ["BusinessObject", "object_of", "texts_of"]


@dataclass(frozen=True, slots=True)
class BusinessObject:
    kind: str
    text: str
    url: str


def texts_of(keys: Sequence[str], found: Any) -> list[str]:
    """What the locks of an object read like.  Raises ``ConfigError`` for a template that is none."""
    return [
        template.fill({name: str(getattr(found, name)) for name in template.names})
        for template in (Template.parse(key, option="held_lock_keys") for key in keys)
    ]


def object_of(lock: Lock, request: HttpRequest, site: Any) -> BusinessObject | None:
    """The object of the first model admin that has one for this lock and lets this user see it."""
    for model_admin in site._registry.values():
        for key in getattr(model_admin, "held_lock_keys", ()):
            for text in (lock.resource, lock.key):
                found = _object(model_admin, key, text)
                if found is not None and model_admin.has_view_permission(request, found):
                    return _shown(model_admin, found)
    return None


def _object(model_admin: Any, key: str, text: str) -> Any:
    for values in _values(Template.parse(key, option="held_lock_keys"), text):
        try:
            return model_admin.model._default_manager.filter(**values).first()
        except (
            ValueError,
            ValidationError,
            OverflowError,
        ):  # what stands in the key is no value of that column
            continue
    return None


def _values(template: Template, text: str) -> Iterator[dict[str, str]]:
    """What stands in the text where the template has names; the text may have the scope of its task before it."""
    parts = "".join(
        re.escape(literal) + (f"(?P<{name}>.+?)" if name else "") for literal, name in template.parts
    )
    matched = re.fullmatch(f"(?:.*:)?{parts}", text, re.DOTALL) if template.names and text else None
    if matched is not None:
        yield matched.groupdict()


def _shown(model_admin: Any, found: Any) -> BusinessObject | None:
    meta = model_admin.model._meta
    try:
        url = reverse(
            f"{model_admin.admin_site.name}:{meta.app_label}_{meta.model_name}_change", args=[found.pk]
        )
    except NoReverseMatch:
        return None
    return BusinessObject(str(meta.verbose_name), str(found), url)
