"""The columns that a resource template of a table names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.db import models

from celery_once_fenced.errors import ConfigError
from celery_once_fenced.templates import Template

__all__ = ["arguments", "named"]

_TYPES = (models.IntegerField, models.CharField, models.TextField, models.UUIDField)


def named(template: Template, fields: Iterable[Any], owner: str) -> dict[str, Any]:
    """The field behind each name of the template: its column, or its name in Python (``account_id``).

    Raises ``ConfigError`` for a name that none of ``fields`` has, a value that may be NULL, and another type than
    integer, text and UUID, which Python and SQL would not write alike.
    """
    known = {name: field for field in fields for name in (field.column, field.attname)}
    return {name: _usable(template, name, known, owner) for name in template.names}


def arguments(template: Template, fields: Iterable[Any], owner: str) -> list[str]:
    """The template as the guard takes it: text, column, text, …, column, text."""
    found = named(template, fields, owner)
    listed = [""]
    for literal, name in template.parts:
        listed[-1] += literal
        listed += [] if name is None else [found[name].column, ""]
    return listed


def _usable(template: Template, name: str, known: dict[str, Any], owner: str) -> Any:
    field = known.get(name)
    if field is None:
        raise ConfigError(
            f"resource={template.text!r}: {owner} has no column {name!r} of its own; it has {', '.join(sorted(known))}"
        )
    if field.null or not isinstance(_target(field), _TYPES):
        raise ConfigError(
            f"resource={template.text!r}: {owner}.{name} cannot be part of a resource; an integer, text or UUID column "
            "that is never NULL can"
        )
    return field


def _target(field: Any) -> Any:
    """The field whose values a foreign key holds, over any number of them."""
    while field.is_relation:
        field = field.target_field
    return field
