"""Leases and fences on the heartbeat: what their holder believes, and how a batch of them is renewed.

A Redis lease is believed by the clock and lost when its window ends (``lease``).  A fence is believed until Postgres
says that it was superseded: a lapsed fence nobody took over may be renewed, and may complete (the two
leases: docs/explanation/protocol).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

from celery_once_fenced.errors import StoreUnavailableError
from celery_once_fenced.events import emit
from celery_once_fenced.heartbeat import Heartbeat
from celery_once_fenced.lease import Clock, Lease, boot_clock
from celery_once_fenced.stores import FenceRenewal, Held, LeaseStore, LedgerStore, Renewal

__all__ = ["FenceKeeper", "KeptFence", "KeptLease", "LeaseKeeper"]

CLAIM_PAUSES = (0.02, 0.05, 0.1, 0.2, 0.4)
"""Seconds between questions about a fence that a claim has locked: it may be ending our own session just now (C9)."""


class KeptLease:
    """A Redis lease on the heartbeat's list, and what its holder believes of it."""

    def __init__(self, lease: Lease, renewal: Renewal, clock: Clock) -> None:
        self.lease = lease
        self.renewal = renewal
        self.queued_since = 0
        """Since when its call was queued before it was granted, in unix microseconds by the store's clock; 0: unknown."""
        self.freed = False
        """Whether a person released it."""
        self._clock = clock
        self._told = False

    @property
    def due(self) -> float:
        return self.lease.due

    @property
    def lost(self) -> bool:
        return self.lease.lost(self._clock())

    @property
    def remaining(self) -> float:
        return self.lease.remaining(self._clock())

    def over(self, now: float) -> bool:
        return self.lease.over(now)

    def gone(self) -> None:
        if self.lost:
            self.tell_lost()
        else:
            emit(
                "lease.held_too_long",
                key=self.renewal.digest,
                task=self.renewal.task,
                holder=self.renewal.holder,
            )

    def tell_lost(self) -> None:
        """Announce the loss, once: the heartbeat or the end of the body may see it first (E7)."""
        if not self._told:
            self._told = True
            name = "lease.freed_by_hand" if self.freed else "lease.lost"
            emit(name, key=self.renewal.digest, task=self.renewal.task, holder=self.renewal.holder)


class LeaseKeeper:
    """Keeps the Redis leases of a process."""

    def __init__(self, leases: LeaseStore, *, clock: Clock = boot_clock) -> None:
        self._leases = leases
        self.clock = clock
        self._beat: Heartbeat[KeptLease] = Heartbeat("leases", self._renew, clock=clock)

    def granted(self, renewal: Renewal, *, sent: float, max_hold: float | None) -> KeptLease:
        """A lease that was granted to a question sent at ``sent``; not on the heartbeat yet."""
        return KeptLease(Lease.granted(renewal.lease, sent=sent, max_hold=max_hold), renewal, self.clock)

    def keeping(self, kept: KeptLease) -> AbstractContextManager[KeptLease]:
        """Renew ``kept`` for the length of the block."""
        return self._beat.keeping(kept)

    def _renew(self, batch: Sequence[KeptLease]) -> None:
        sent = self.clock()
        try:
            answers = self._leases.renew([kept.renewal for kept in batch])
        except Exception as error:  # noqa: BLE001  # whatever it is, the thread goes on for all others
            _tell_unexpected(error)
            for kept in batch:
                kept.lease.failed(self.clock())
            return
        for kept, still_ours in zip(batch, answers, strict=True):
            if still_ours:
                kept.lease.renewed(sent=sent, now=self.clock())
            else:
                self.refused(kept)

    def refused(self, kept: KeptLease) -> None:
        """The store says that it is not its holder's any more; find out whether a person decided so (E7)."""
        kept.freed = kept.freed or self._was_freed(kept.renewal)
        kept.lease.refused()

    def _was_freed(self, renewal: Renewal) -> bool:
        try:
            return self._leases.was_freed(renewal.digest, renewal.holder)
        except Exception as error:  # noqa: BLE001  # as above; then it counts as lost
            _tell_unexpected(error)
            return False


class KeptFence:
    """A fence on the heartbeat's list.  Lost means superseded: a lapsed fence nobody took over may be renewed."""

    def __init__(
        self, held: Held, lease: float, *, sent: float, max_hold: float | None, clock: Clock
    ) -> None:
        self.renewal = FenceRenewal(held.operation.resource, held.token, held.holder, lease)
        self.due = sent + lease / 3
        self._digest = held.operation.digest.hex()
        self.lost = False
        self._given_back = False
        self._lease = lease
        self._until = sent + lease
        self._renew_until = float("inf") if max_hold is None else sent + max_hold
        self._clock = clock

    @property
    def remaining(self) -> float:
        return 0.0 if self.lost else max(self._until - self._clock(), 0.0)

    def over(self, now: float) -> bool:
        return self.lost or self._given_back or now >= self._renew_until

    def given_back(self) -> None:
        """It was freed by the commit: there is nothing to renew, and nothing to lose."""
        self._given_back = True

    def gone(self) -> None:
        if self._given_back:
            return
        name = "fence.lost" if self.lost else "fence.held_too_long"
        emit(name, key=self._digest, token=self.renewal.token, holder=self.renewal.holder)

    def answered(self, answer: str, sent: float) -> None:
        if answer == "lost":
            self.lost = not self._given_back
        elif answer == "renewed":
            self._until = sent + self._lease
            self.due = sent + self._lease / 3
        else:  # a claim or complete is in flight on the row: ask again soon (C8)
            self.failed(sent)

    def failed(self, now: float) -> None:
        self.due = now + min(self._lease / 10, 1.0)


class FenceKeeper:
    """Keeps the fences of a process."""

    def __init__(self, ledger: LedgerStore, *, clock: Clock = boot_clock) -> None:
        self._ledger = ledger
        self.clock = clock
        self._beat: Heartbeat[KeptFence] = Heartbeat("fences", self._renew, clock=clock)

    def granted(self, held: Held, lease: float, *, sent: float, max_hold: float | None) -> KeptFence:
        """A fence that was granted to a claim sent at ``sent``; not on the heartbeat yet."""
        return KeptFence(held, lease, sent=sent, max_hold=max_hold, clock=self.clock)

    def keeping(self, kept: KeptFence) -> AbstractContextManager[KeptFence]:
        """Renew ``kept`` for the length of the block."""
        return self._beat.keeping(kept)

    def ask(self, kept: KeptFence) -> None:
        """Find out whether ``kept`` is still ours, by renewing it now; a claim in flight on it is waited for."""
        for pause in (*CLAIM_PAUSES, 0.0):
            sent = self.clock()
            try:
                (answer,) = self._ledger.renew([kept.renewal])
            except StoreUnavailableError:  # then it is not known
                return
            kept.answered(answer, sent)
            if answer != "locked":
                return
            time.sleep(pause)

    def _renew(self, batch: Sequence[KeptFence]) -> None:
        sent = self.clock()
        try:
            answers = self._ledger.renew([kept.renewal for kept in batch])
        except Exception as error:  # noqa: BLE001  # as above
            _tell_unexpected(error)
            for kept in batch:
                kept.failed(self.clock())
            return
        for kept, answer in zip(batch, answers, strict=True):
            kept.answered(answer, sent)


def _tell_unexpected(error: Exception) -> None:
    """An outage is not told at every beat: what becomes of it is, as a lease that was lost."""
    if not isinstance(error, StoreUnavailableError):
        emit("store.failed", operation="renew", why=repr(error))
