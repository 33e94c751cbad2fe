"""Keepers without a thread: time passes by the clock of the test alone, so nothing beats of itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from celery_once_fenced.keepers import FenceKeeper, KeptFence, KeptLease, LeaseKeeper

__all__ = ["StillFenceKeeper", "StillLeaseKeeper"]


class StillLeaseKeeper(LeaseKeeper):
    """Renews no lease; tells at the end of a block that one was lost (E7)."""

    @contextmanager
    def keeping(self, kept: KeptLease) -> Iterator[KeptLease]:
        try:
            yield kept
        finally:
            if kept.over(self.clock()):
                kept.gone()


class StillFenceKeeper(FenceKeeper):
    """Renews no fence; a lapsed one that nobody took over completes all the same."""

    @contextmanager
    def keeping(self, kept: KeptFence) -> Iterator[KeptFence]:
        yield kept
