"""What the core explains of a key, for the page of one lock.  Its words are those of ``explain()`` and the command line."""

from __future__ import annotations

from dataclasses import dataclass, replace

from django.utils.translation import gettext as _

from celery_once_fenced import operate, runtime
from celery_once_fenced.errors import OnceError
from celery_once_fenced.lookup import Found
from django_celery_once_fenced import readable
from django_celery_once_fenced.locks import Lock

__all__ = ["Explained", "explained"]


@dataclass(frozen=True, slots=True)
class Explained:
    """A lock's key as ``explain()`` sees it; false where that could not be asked."""

    explanation: operate.Explanation | None = None
    problem: str = ""
    """Why it could not be asked."""

    def __bool__(self) -> bool:
        return self.explanation is not None

    @property
    def blocked_by(self) -> str:
        """``Lock.id`` of the fence that its messages wait for; empty where there is none, or nobody has it."""
        seen = self.explanation
        return f"f:{seen.blocker.resource}" if seen is not None and seen.blocker is not None else ""

    @property
    def resource(self) -> str:
        """What its messages wait for where it is not the key (C10)."""
        return readable.resource(self.explanation.around.resource) if self.explanation is not None else ""

    @property
    def why_it_waits(self) -> str:
        """In the reader's language; empty where it does not wait, or the fence is not known."""
        seen = self.explanation
        if seen is None or not self.resource or seen.unknown:
            return ""
        if seen.blocker is None:
            free = _("It waited for %(resource)s, which nobody holds now: the next to try takes it.")
            return free % {"resource": self.resource}
        held = _("It waits for %(resource)s, which %(holder)s holds on %(worker)s with token %(token)d.")
        return held % {
            "resource": self.resource,
            "holder": seen.blocker.key or seen.blocker.task,
            "worker": seen.blocker.worker or "-",
            "token": seen.blocker.token,
        }

    def __str__(self) -> str:
        return str(self.explanation or "")


def explained(lock: Lock) -> Explained:
    """Never raises for a store that is down: the lock is known already, and shown."""
    try:
        return Explained(_explain(lock))
    except OnceError as error:
        return Explained(problem=str(error).strip())


def _explain(lock: Lock) -> operate.Explanation:
    """With no search among all holds, but where the lock is a twin guard, which is found by nothing else."""
    if lock.name:
        return replace(operate.explain(lock.digest), key=lock.key)
    here = runtime.current()
    found = Found(lock.digest, lock.key, "" if lock.digest else lock.resource)
    holds = here.readings.look(lock.digest) if lock.digest else []
    return operate.explain_found(here, found, tuple(holds))
