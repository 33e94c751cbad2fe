"""What a person does to a lock: release it, or release it and bump its fence.  Compared with what the page showed.

release             frees the lease in Redis.  The task goes on, and frees nothing of its successor's.  A fence stays:
                    its task may still commit, and the next run waits for it.
release and bump    also raises the token of the fence, so that the task can commit nothing more: the next run gets a
                    higher one, at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from celery_once_fenced import runtime
from celery_once_fenced.errors import OnceError
from celery_once_fenced.events import emit
from django_celery_once_fenced import readable
from django_celery_once_fenced.lock_list import find_lock, leases_of
from django_celery_once_fenced.locks import Lock, Seen
from django_celery_once_fenced.records import note_released
from django_celery_once_fenced.steps import under_way

__all__ = ["ACTIONS", "Action", "Done", "Name", "Plan", "Planned", "no_fence", "offered", "plan", "release"]

Name = Literal["release", "bump"]


@dataclass(frozen=True, slots=True)
class Action:
    title: Any
    button: Any
    permission: str


ACTIONS: dict[Name, Action] = {
    "release": Action(
        gettext_lazy("Release selected locks"), gettext_lazy("Release"), "once_fenced.release_heldlock"
    ),
    "bump": Action(
        gettext_lazy("Release selected locks and bump the fence"),
        gettext_lazy("Release and bump the fence"),
        "once_fenced.bump_heldlock",
    ),
}


def offered(lock: Lock, allowed: Iterable[Name]) -> list[tuple[Name, Any]]:
    """The actions that can be done to a lock, of those that somebody may take: name and what its button says."""
    return [(name, ACTIONS[name].button) for name in allowed if name != "bump" or not no_fence(lock)]


def no_fence(lock: Lock) -> str:
    """Why a lock has no fence to bump; empty where it has one."""
    if lock.slot == "fence":
        return ""
    if lock.slot == "queued":
        return _("It has no fence to bump: a fence is taken when a run begins.")
    if lock.tier == "correctness":
        return _("It has no fence to bump at this moment; without one it can commit nothing.")
    return _(
        "It has no fence to bump: in the efficiency tier nothing checks who writes, so after a release two runs "
        "may overlap."
    )


@dataclass(frozen=True, slots=True)
class Planned:
    """One lock, and in words what will happen to it; ``lock`` is None where it is not the page's holder's any more."""

    seen: str
    lock: Lock | None
    shown: str
    """The key, or where nobody has it what is known of it."""
    effect: str
    task: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    items: Sequence[Planned]

    @property
    def possible(self) -> bool:
        return any(item.lock is not None for item in self.items)


def plan(name: Name, seen: Iterable[str]) -> Plan:
    """What the action would do now.  Raises ``OnceError`` where a store is down."""
    return Plan([_planned(name, one) for one in dict.fromkeys(seen)])


def _planned(name: Name, seen: str) -> Planned:
    shown = Seen.parse(seen)
    lock = find_lock(shown.id)
    if lock is None:
        return Planned(seen, None, shown.key, _("Nothing: nobody holds it any more."))
    if lock.holder != shown.holder:
        other = _("Nothing: another holds it by now than the page showed.")
        return Planned(seen, None, lock.key, other, lock.task)
    if name == "bump" and (why := no_fence(lock)):
        return Planned(seen, None, lock.key, _("Nothing. %(why)s") % {"why": why}, lock.task)
    said = " ".join(filter(None, [_effect(name, lock), under_way(lock)]))
    return Planned(seen, lock, lock.key, said, lock.task)


def _effect(name: Name, lock: Lock) -> str:
    given = {
        "id": lock.task_id or "-",
        "token": lock.token,
        "resource": readable.short(lock.resource_text, lock.task),
    }
    if lock.slot == "queued":
        return (
            _(
                "The next call of this key is published. Task %(id)s stays in its queue, and runs too if it comes."
            )
            % given
        )
    if lock.slot == "running":
        return (
            _(
                "Another task with this key may start at once. Task %(id)s goes on running, "
                "and frees nothing of the next one's when it ends."
            )
            % given
        )
    if name == "bump":
        return (
            _(
                "Token %(token)d of %(resource)s is overtaken at once: what task %(id)s writes is refused, its open "
                "transaction is ended and rolled back. The next run gets a higher token."
            )
            % given
        )
    return (
        _(
            "The lease in Redis is freed, the fence is not: task %(id)s may still commit with token %(token)d, and the next "
            "run waits until it ends or its lease lapses. To stop its writes, bump the fence."
        )
        % given
    )


@dataclass(frozen=True, slots=True)
class Done:
    lock: Lock | None
    """None where nothing was done."""
    key: str
    why: str = ""
    """Nothing was done, in words."""


def release(name: Name, seen: str, *, actor: str, reason: str) -> Done:
    """Do it, where the holder is still the one that was seen.  Raises ``OnceError`` where a store is down."""
    shown = Seen.parse(seen)
    lock = find_lock(shown.id)
    if lock is None or lock.holder != shown.holder:
        return Done(None, shown.key, _("Its holder is no longer the one that the page showed."))
    if name == "bump" and (why := no_fence(lock)):
        return Done(None, lock.key, why)
    if _fence(name, lock, actor, reason) if lock.slot == "fence" else _lease(lock, actor, reason):
        return Done(lock, lock.key)
    return Done(None, lock.key, _("Its holder is no longer the one that the page showed."))


def _lease(lock: Lock, actor: str, reason: str) -> bool:
    slot: Literal["q", "r"] = "q" if lock.slot == "queued" else "r"
    freed = runtime.current().leases.release(lock.digest, slot, lock.holder, lock.name, by_hand=True)
    emit("lease.released_by_hand", key=lock.digest, holder=lock.holder, freed=freed, actor=actor, why=reason)
    if freed:
        note_released(lock, actor, reason)
    return freed


def _fence(name: Name, lock: Lock, actor: str, reason: str) -> bool:
    # The fence first: with the lease free and the fence not, a next run would start only to be told to wait.
    bumped = name == "bump" and _bump(lock, actor, reason)
    if name == "bump" and not bumped:
        return False
    freed = [_lease(lease, actor, reason) for lease in _leases(lock, may_be_down=bumped)]
    return bumped or any(freed)


def _bump(lock: Lock, actor: str, reason: str) -> bool:
    ledger = runtime.current().ledger
    return ledger is not None and ledger.force_release(lock.resource, lock.holder, reason, actor) is not None


def _leases(lock: Lock, *, may_be_down: bool) -> Sequence[Lock]:
    try:
        return leases_of(lock)
    except OnceError:
        if not may_be_down:
            raise
        return []  # the fence decides; what is left in Redis lapses by itself
