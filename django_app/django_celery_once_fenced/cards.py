"""What needs a person, one card each: a number, what it means, and where to look into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from django.urls import reverse
from django.utils.http import urlencode
from django.utils.translation import gettext as _

if TYPE_CHECKING:
    from django_celery_once_fenced.overview import Overview

__all__ = ["Card", "cards_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    title: str
    number: int | None
    """None where the store that counts it does not answer."""
    text: str
    tasks: Sequence[tuple[str, str]] = ()
    """What the number is made of: the last part of a task's name, and its share or its age."""
    url: str = ""
    """Where the rows are that it counts.  Empty where there are none, or the user may not see them."""
    urgent: bool = False
    """A person must decide; else a person should know."""


def cards_of(seen: Overview, user: Any, site: str) -> Sequence[Card]:
    """Most urgent first; also those with the number 0, for that is an answer too."""

    def to(model: str, **query: Any) -> str:
        if not user.has_perm(f"once_fenced.view_{model}"):
            return ""
        return _address(site, model, query)

    overdue, repeated = {row.name: row.oldest_age for row in seen.overdue}, seen.of_day("repeated")
    lost, fenced_off = seen.of_day("lost"), seen.of_day("fenced_off")
    return [
        _card(
            _("In doubt"),
            None if seen.ledger_unknown else seen.in_doubt,
            _("keys with a step that may or may not have been taken: somebody decides"),
            to("indoubt"),
            urgent=True,
        ),
        _card(
            _("Parked"),
            None if seen.ledger_unknown else seen.parked,
            _("keys given up in the last 7 days, after their workers died again and again"),
            to("event", kind="ledger.exhausted", when="seven"),
            urgent=True,
        ),
        Card(
            title=_("Held too long"),
            number=None if seen.leases_unknown else len(overdue),
            text=_("tasks with a hold far older than any run they had"),
            tasks=[(_short(task), age) for task, age in overdue.items()],
            url=to("heldlock", state="overdue"),
            urgent=True,
        ),
        _card(
            _("Suppressed again and again"),
            None if seen.leases_unknown else repeated,
            _("times in 24 hours that calls of one key were refused many times in a row: does it ever run?"),
            to("heldlock", task=list(repeated)),
        ),
        _card(
            _("Leases lost"),
            None if seen.leases_unknown else lost,
            _("runs in 24 hours that outlasted their lease, as when a worker is frozen"),
            _row(lost),
        ),
        _card(
            _("Fenced off"),
            None if seen.leases_unknown else fenced_off,
            _("late runs in 24 hours that PostgreSQL refused: nothing was written twice"),
            _row(fenced_off),
        ),
    ]


def _card(
    title: str, numbers: Mapping[str, int] | None, text: str, url: str, *, urgent: bool = False
) -> Card:
    return Card(
        title=title,
        number=None if numbers is None else sum(numbers.values()),
        text=text,
        tasks=[(_short(task), str(number)) for task, number in (numbers or {}).items()],
        url=url,
        urgent=urgent,
    )


def _short(task: str) -> str:
    return task.rpartition(".")[2]


def _row(numbers: Mapping[str, int]) -> str:
    """What left no row anywhere is only counted: the first of its tasks on this page."""
    return f"#of-task-{quote(next(iter(numbers)))}" if numbers else ""


def _address(site: str, model: str, query: Mapping[str, Any]) -> str:
    address = reverse(f"{site}:once_fenced_{model}_changelist")
    return f"{address}?{urlencode(query, doseq=True)}" if query else address
