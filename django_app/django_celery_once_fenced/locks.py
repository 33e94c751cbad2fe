"""*Held locks*: who holds what at this moment, from both stores, and a sentence for each that explains it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from celery_once_fenced import runtime
from celery_once_fenced.errors import OnceError
from celery_once_fenced.tasks import SingletonTask
from django_celery_once_fenced import conf

if TYPE_CHECKING:
    from celery_once_fenced.stores import HeldFence, Hold

__all__ = ["LIMIT", "Lock", "held_locks"]

LIMIT = 2000
"""Rows read from each store; a page that needs more is better searched on the command line."""

_TIERS = {"efficiency": gettext_lazy("efficiency"), "correctness": gettext_lazy("correctness")}

_UNITS = ((3600, gettext_lazy("%.1f h")), (60, gettext_lazy("%.1f min")), (1, gettext_lazy("%.1f s")))
_SLOTS = {
    "queued": gettext_lazy("queued"),
    "running": gettext_lazy("running"),
    "fence": gettext_lazy("fence"),
}
_SENTENCES = {
    "queued": gettext_lazy(
        "Task %(id)s is queued: another call is a duplicate until it has run, or for %(left)s if it is lost."
    ),
    "running": gettext_lazy(
        "Task %(id)s runs on %(worker)s. If that worker dies, the next one starts in %(left)s; a live one renews."
    ),
    "fence": gettext_lazy(
        "Task %(id)s may write to %(resource)s with token %(token)d. "
        "Others wait for its end, or for %(left)s if %(worker)s dies."
    ),
    "lapsed": gettext_lazy(
        "The lease of task %(id)s lapsed %(left)s ago: the next claim takes over, and what this one still does is refused."
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Lock:
    key: str
    task: str
    tier: Any
    slot: Literal["queued", "running", "fence"]
    task_id: str
    worker: str
    token: int | None
    resource: str = ""
    """What a fence protects."""
    since: datetime | None
    left: float
    """Seconds until it lapses by itself; negative where it lapsed and nobody has taken over yet."""

    def explanation(self) -> str:
        sentence = _SENTENCES["lapsed" if self.left < 0 else self.slot]
        return sentence % {
            "id": self.task_id,
            "worker": self.worker,
            "left": self.lease_left(),
            "token": self.token,
            "resource": self.resource,
        }

    def lease_left(self) -> str:
        """``left`` for people, in the largest unit that fits."""
        size, unit = next((unit for unit in _UNITS if abs(self.left) >= unit[0]), _UNITS[-1])
        return str(unit) % (abs(self.left) / size)

    def slot_name(self) -> Any:
        return _SLOTS[self.slot]

    def matches(self, text: str) -> bool:
        return any(
            text.lower() in value.lower()
            for value in (self.key, self.task, self.task_id, self.worker, self.resource)
        )


def held_locks() -> tuple[list[Lock], list[str]]:
    """All locks held now, soonest to lapse first, and in words which store could not be asked.  Never raises for a
    store that is down: the page is wanted most just then.
    """
    problems: list[str] = []
    locks = [*_asked(_leases, problems), *_asked(_fences, problems)]
    return sorted(locks, key=lambda lock: lock.left), problems


def _asked(source: Callable[[], Iterator[Lock]], problems: list[str]) -> list[Lock]:
    try:
        found = list(itertools.islice(source(), LIMIT))
    except OnceError as error:
        problems.append(str(error).strip())
        return []
    if len(found) == LIMIT:
        problems.append(
            _("There are more; only the first %(limit)d of a store are shown.") % {"limit": LIMIT}
        )
    return found


def _leases() -> Iterator[Lock]:
    return map(_of_hold, runtime.current().leases.holds())


def _of_hold(hold: Hold) -> Lock:
    return Lock(
        key=hold.text or hold.digest,
        task=hold.task,
        tier=_tier(hold.task),
        slot="queued" if hold.slot == "q" else "running",
        task_id=hold.task_id,
        worker=hold.worker,
        token=None,
        since=_moment(hold.since),
        left=hold.left,
    )


def _fences() -> Iterator[Lock]:
    ledger = runtime.current().ledger if conf.has_fences() else None
    return iter(()) if ledger is None else map(_of_fence, ledger.fences())


def _of_fence(fence: HeldFence) -> Lock:
    return Lock(
        key=fence.key or fence.resource,
        task=fence.task or "",
        tier=_TIERS["correctness"],
        slot="fence",
        task_id=fence.task_id or "",
        worker=fence.worker or "",
        token=fence.token,
        resource=fence.resource,
        since=_moment(fence.since),
        left=fence.left,
    )


def _tier(name: str) -> Any:
    """The tier of a task that this process knows; a web server may not have imported it."""
    task = runtime.current().app.tasks.get(name)
    return _TIERS[task.blueprint.policy.tier] if isinstance(task, SingletonTask) else None


def _moment(seconds: float) -> datetime | None:
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):  # What stands in Redis may be anybody's.
        return None
