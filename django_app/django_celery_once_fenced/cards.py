"""What needs a person, one card each: a number, what it means, and where to look into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.urls import reverse
from django.utils.http import urlencode
from django.utils.translation import gettext as _

if TYPE_CHECKING:
    from django_celery_once_fenced.overview import Overview

__all__ = ["Card", "cards_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    title: str
    number: int
    text: str
    url: str = ""
    """Empty where the user may not see that page."""
    urgent: bool = False
    """A person must decide; else a person should know."""


def cards_of(seen: Overview, user: Any, site: str) -> Sequence[Card]:
    """Most urgent first; also those with the number 0, for that is an answer too."""

    def to(model: str, **query: str) -> str:
        if not user.has_perm(f"once_fenced.view_{model}"):
            return ""
        return _address(site, model, query)

    overdue = seen.overdue
    return [
        Card(
            title=_("In doubt"),
            number=seen.in_doubt,
            text=_("keys with a step that may or may not have been taken: somebody decides"),
            url=to("indoubt"),
            urgent=True,
        ),
        Card(
            title=_("Parked"),
            number=seen.parked,
            text=_("keys given up in the last 7 days, after their workers died again and again"),
            url=to("event", kind="ledger.exhausted"),
            urgent=True,
        ),
        Card(
            title=_("Held too long"),
            number=len(overdue),
            text=_("tasks with a hold far older than any run they had"),
            url=to("heldlock", slot="running", **({"task": overdue[0].name} if len(overdue) == 1 else {})),
            urgent=True,
        ),
        Card(
            title=_("Suppressed again and again"),
            number=seen.sum("repeated"),
            text=_(
                "times in 24 hours that calls of one key were refused many times in a row: does it ever run?"
            ),
            url=to("heldlock"),
        ),
        Card(
            title=_("Leases lost"),
            number=seen.sum("lost"),
            text=_("runs in 24 hours that outlasted their lease, as when a worker is frozen"),
            url=to("event", kind="fence.taken_over"),
        ),
        Card(
            title=_("Fenced off"),
            number=seen.sum("fenced_off"),
            text=_("late runs in 24 hours that PostgreSQL refused: nothing was written twice"),
            url=to("event", kind="fence.taken_over"),
        ),
    ]


def _address(site: str, model: str, query: Mapping[str, str]) -> str:
    address = reverse(f"{site}:once_fenced_{model}_changelist")
    return f"{address}?{urlencode(query)}" if query else address
