"""The filters beside the list of held locks, in the shape of Django's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from django.http import QueryDict
from django.utils.translation import gettext_lazy as _

from django_celery_once_fenced import tiers
from django_celery_once_fenced.lock_list import LockQuery

__all__ = ["Choice", "Filter", "filters_of", "query_of"]

SLOTS = {"queued": _("queued"), "running": _("running"), "fence": _("fenced")}
STATES = {
    "held": _("held"),
    "lapsed": _("lapsed"),
    "waiting": _("others wait"),
    "overdue": _("held too long"),
}
PLACES = ("after", "before")
"""Parameters that stand for a place in the list, and not for a choice."""


@dataclass(frozen=True, slots=True)
class Choice:
    display: Any
    query_string: str
    selected: bool


@dataclass(frozen=True, slots=True)
class Filter:
    title: Any
    choices: Sequence[Choice]


def query_of(given: QueryDict) -> LockQuery:
    """What an address asks for; what it has no word for is left out."""
    tier, slot, state = given.get("tier", ""), given.get("slot", ""), given.get("state", "")
    return LockQuery(
        text=given.get("q", "").strip(),
        tasks=frozenset(filter(None, given.getlist("task"))),
        tier=tier if tier in tiers.NAMES else "",
        slot=slot if slot in SLOTS else "",
        state=state if state in STATES else "",
        worker=given.get("worker", ""),
    )


def filters_of(
    given: QueryDict, query: LockQuery, tasks: Iterable[str], workers: Iterable[str]
) -> Sequence[Filter]:
    return [
        Filter(_("state"), [*_choices(given, "state", {query.state}, STATES)]),
        Filter(_("slot"), [*_choices(given, "slot", {query.slot}, SLOTS)]),
        Filter(_("tier"), [*_choices(given, "tier", {query.tier}, tiers.NAMES)]),
        Filter(_("task"), [*_choices(given, "task", query.tasks, _named(tasks, query.tasks))]),
        Filter(_("worker"), [*_choices(given, "worker", {query.worker}, _named(workers, {query.worker}))]),
    ]


def _named(names: Iterable[str], chosen: Set[str]) -> dict[str, str]:
    return {name: name for name in sorted({*names, *chosen} - {""})}


def _choices(given: QueryDict, parameter: str, chosen: Set[str], values: dict[str, Any]) -> Iterator[Choice]:
    yield Choice(_("All"), _with(given, parameter, ""), not chosen - {""})
    for value, display in values.items():
        yield Choice(display, _with(given, parameter, value), value in chosen)


def _with(given: QueryDict, parameter: str, value: str) -> str:
    changed = given.copy()
    for name in (parameter, *PLACES):
        changed.pop(name, None)
    if value:
        changed[parameter] = value
    return f"?{changed.urlencode()}"
