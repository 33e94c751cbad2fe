"""Format strings of ``Once.key`` and ``Once.resource``: literal text and argument names, nothing else (rule
K3).
"""

from __future__ import annotations

from dataclasses import dataclass
from string import Formatter
from typing import TYPE_CHECKING
from uuid import UUID

from celery_once_fenced.errors import ConfigError, KeyDerivationError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MAX_RESOURCE", "Template", "check_resource", "render_resource"]

MAX_RESOURCE = 255
"""Characters of a resource, after escaping."""


@dataclass(frozen=True, slots=True)
class Template:
    """A parsed format string: ``parts`` are pairs of literal text and the name that follows it, or None."""

    text: str
    parts: tuple[tuple[str, str | None], ...]

    @classmethod
    def parse(cls, text: str, *, option: str) -> Template:
        """Raises ``ConfigError`` for anything but plain argument names in braces."""
        try:
            found = list(Formatter().parse(text))
        except ValueError as error:
            raise ConfigError(f"{option}={text!r} is no format string: {error}") from None
        for _, name, spec, conversion in found:
            if name is not None and (not name.isidentifier() or spec or conversion):
                raise ConfigError(
                    f"{option}={text!r} may name arguments only, as in 'order:{{order_id}}': no positions, "
                    "attributes, indexes, conversions or formats; a function of the arguments can compute "
                    "anything else"
                )
        return cls(text, tuple((literal, name) for literal, name, _, _ in found))

    @property
    def names(self) -> tuple[str, ...]:
        """Argument names, each once, sorted."""
        return tuple(sorted({name for _, name in self.parts if name is not None}))

    def fill(self, values: Mapping[str, str]) -> str:
        """The text with ``values`` put in."""
        return "".join(literal + ("" if name is None else values[name]) for literal, name in self.parts)


def render_resource(template: str | Template, arguments: Mapping[str, object], *, task: str = "") -> str:
    """The resource of one call, rendered as the database's trigger renders it from the columns of a row.

    Values are ``int``, ``str`` or ``UUID``; in text, ``%`` is written ``%25`` and ``:`` ``%3A``, so that the
    parts of a template such as ``"{region}:{number}"`` cannot run into each other.  In SQL that is
    ``replace(replace(value, '%', '%25'), ':', '%3A')``.

    Raises:
        KeyDerivationError: a value of another type, or more than 255 characters.
    """
    if isinstance(template, str):
        template = Template.parse(template, option="resource")
    values = {name: _resource_value(name, arguments[name], task) for name in template.names}
    return check_resource(template.fill(values), task=task)


def _resource_value(name: str, value: object, task: str) -> str:
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, str):
        return str.__str__(value).replace("%", "%25").replace(":", "%3A")
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() <= MAX_RESOURCE * 4:
        return int.__repr__(value)
    raise KeyDerivationError(
        task,
        f"argument {name} of the resource is a {type(value).__name__}; only int, str and UUID can be in one",
    )


def check_resource(resource: object, *, task: str = "") -> str:
    """Return ``resource`` if it is text that the database can hold: 1 to 255 characters, no NUL, valid
    Unicode.
    """
    if not isinstance(resource, str):
        raise KeyDerivationError(task, f"the resource must be text, not {type(resource).__name__}")
    if not 1 <= len(resource) <= MAX_RESOURCE:
        raise KeyDerivationError(
            task,
            f"the resource has {len(resource)} characters after escaping; 1 to {MAX_RESOURCE} are allowed",
        )
    if "\0" in resource or any("\ud800" <= character <= "\udfff" for character in resource):
        raise KeyDerivationError(
            task, "the resource holds NUL or half a character, which Postgres cannot store"
        )
    return resource
