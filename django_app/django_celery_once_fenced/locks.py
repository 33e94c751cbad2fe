"""One lock as a person sees it: from either store, with a sentence that explains it.

A running task of the correctness tier has a lease in Redis and a fence in PostgreSQL with one holder; that is one lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote, unquote

from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext_lazy

from celery_once_fenced.stores import Cursor, Hold, Listed
from django_celery_once_fenced import readable, tiers
from django_celery_once_fenced.spans import lasting, moment

if TYPE_CHECKING:
    from celery_once_fenced.policy import Policy
    from django_celery_once_fenced.models import Fence

__all__ = ["Lock", "Seen", "of_fence", "of_hold"]

_SLOTS = {"queued": _("queued"), "running": _("running"), "fence": _("fenced")}
_SENTENCES = {
    "queued": _("Task %(id)s was called, and holds the place of the next run for %(left)s at most."),
    "until_executed": _(
        "Task %(id)s is queued: another call is a duplicate until it has run, or for %(left)s if it is lost."
    ),
    "until_executing": _(
        "Task %(id)s is queued: another call is a duplicate until it begins, or for %(left)s if it is lost."
    ),
    "until_expired": _(
        "Task %(id)s was called: another call is a duplicate for %(left)s more, whether this one has run or not."
    ),
    "replace": _(
        "Task %(id)s is queued: a newer call takes its place, and then it does not run. It is believed for %(left)s."
    ),
    "keep_last": _(
        "Task %(id)s is queued: it runs with the arguments of the newest call. It is believed for %(left)s."
    ),
    "running": _(
        "Task %(id)s runs on %(worker)s. If that worker dies, the next one starts in %(left)s; a live one renews."
    ),
    "fence": _(
        "Task %(id)s may write to %(resource)s with token %(token)d. "
        "Others wait for its end, or for %(left)s if %(worker)s dies."
    ),
    "lapsed": _(
        "The lease of task %(id)s lapsed %(left)s ago: the next claim takes over, and what this one still does is refused."
    ),
}
_WAITING = ngettext_lazy("%(count)d other call waits for it.", "%(count)d other calls wait for it.", "count")


@dataclass(frozen=True, kw_only=True, slots=True)
class Lock:
    key: str
    task: str
    slot: Literal["queued", "running", "fence"]
    holder: str
    task_id: str
    worker: str
    since: datetime | None
    left: float
    """Seconds until it lapses by itself; negative where it lapsed and nobody has taken over yet."""
    at: Cursor
    digest: str = ""
    """Of the key in Redis; of the operation in the ledger where it is a fence; empty outside of tasks."""
    name: str = ""
    """Of a slot that is not the key's own (twin guard)."""
    token: int | None = None
    resource: str = ""
    """What a fence protects."""
    waiting: int | None = 0
    """None where Redis, which knows, does not answer."""

    @property
    def id(self) -> str:
        """What finds it again: ``r:<digest>``, ``q:<digest>`` or ``f:<resource>``."""
        if self.slot == "fence":
            return f"f:{self.resource}"
        return ":".join(filter(None, ["q" if self.slot == "queued" else "r", self.digest, self.name]))

    @property
    def seen(self) -> str:
        """What a page showed of it in one word, for an action to compare with: see ``Seen``."""
        return "|".join(quote(part, safe="") for part in (self.holder, self.id, self.key))

    @property
    def tier(self) -> str:
        return "correctness" if self.slot == "fence" else tiers.tier_of(self.task)

    @property
    def tier_name(self) -> Any:
        return tiers.NAMES.get(self.tier, "-")

    @property
    def slot_name(self) -> Any:
        return _SLOTS[self.slot]

    @property
    def resource_text(self) -> str:
        return readable.resource(self.resource)

    @property
    def lapsed(self) -> bool:
        return self.left < 0

    @property
    def lease_left(self) -> str:
        return lasting(self.left)

    @property
    def age(self) -> float | None:
        return None if self.since is None else (datetime.now(UTC) - self.since).total_seconds()

    @property
    def held_for(self) -> str:
        return "-" if self.age is None else lasting(max(self.age, 0.0))

    @property
    def explanation(self) -> str:
        sentence = _SENTENCES[self._sentence] % {
            "id": self.task_id or "-",
            "worker": self.worker or "-",
            "left": self.lease_left,
            "token": self.token,
            "resource": readable.short(self.resource_text, self.task),
        }
        return f"{sentence} {_WAITING % {'count': self.waiting}}" if self.waiting else str(sentence)

    @property
    def _sentence(self) -> str:
        if self.lapsed:
            return "lapsed"
        policy = tiers.policy_of(self.task) if self.slot == "queued" else None
        return self.slot if policy is None else _promise(policy)

    def __str__(self) -> str:
        return self.key


def _promise(policy: Policy) -> str:
    """What another call gets while one is queued depends on the options of its task."""
    if policy.on_duplicate in ("replace", "keep_last"):
        return policy.on_duplicate
    if policy.span.is_window:
        return "until_expired"
    return "until_executed" if policy.span.refused_by_r else "until_executing"


@dataclass(frozen=True, slots=True)
class Seen:
    """A lock as a page showed it.  Only holder and id decide; the key is for people, and may be anybody's text."""

    holder: str
    id: str
    key: str

    @classmethod
    def parse(cls, text: str) -> Seen:
        holder, _bar, rest = text.partition("|")
        found, _bar, key = rest.partition("|")
        return cls(unquote(holder), unquote(found), unquote(key) or unquote(found))


def of_hold(listed: Listed) -> Lock:
    hold: Hold = listed.hold
    return Lock(
        key=hold.text or hold.digest,
        task=hold.task,
        slot="queued" if hold.slot == "q" else "running",
        holder=hold.holder,
        task_id=hold.task_id,
        worker=hold.worker,
        since=moment(hold.since),
        left=hold.left,
        at=listed.at,
        digest=hold.digest,
        name=hold.name,
        waiting=listed.waiting,
    )


def of_fence(fence: Fence) -> Lock:
    """``fence`` is held or has lapsed."""
    until = fence.expires_at or datetime.now(UTC)
    return Lock(
        key=fence.key or readable.resource(fence.resource),
        task=fence.task_name or "",
        slot="fence",
        holder=fence.holder or "",
        task_id=fence.task_id or "",
        worker=fence.worker or "",
        since=fence.acquired_at,
        left=(until - datetime.now(UTC)).total_seconds(),
        at=Cursor(round(until.timestamp() * 1000), f"f|{fence.resource}"),
        digest=fence.key_digest or "",
        token=fence.token,
        resource=fence.resource,
    )
