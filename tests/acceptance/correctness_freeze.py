"""A worker is frozen in the middle of its work, another one does the work, the first wakes up too late."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from tests.acceptance.correctness_posting import Posting, has_one_effect, is_frozen
from tests.acceptance.correctness_site import ShopSite
from tests.acceptance.shop_app import LEASE
from tests.acceptance.workers import HASTY, Worker, eventually

PLACES = ("granted", "begun", "written", "completed")
"""After the claim, before the first write, after a write, between complete and COMMIT."""
GRACE = 5.0
"""Seconds beyond a lease, from the redelivery, within which the successor must have finished."""


@dataclass(frozen=True)
class Frozen:
    """A posting whose first run is frozen at a place, with the whole worker."""

    posting: Posting
    place: str
    pid: int

    @property
    def limit(self) -> float:
        """Seconds from the redelivery within which the successor must have finished."""
        guarded = self.posting.guarded
        return GRACE + (self.posting.task.blueprint.policy.lease if guarded else LEASE)

    @property
    def redelivered(self) -> float:
        """When its message reached another process; 0.0 while it has not."""
        return self._at("delivered")

    @property
    def finished(self) -> float:
        """When another process had stored a success; 0.0 while none has."""
        return self._at("ended SUCCESS")

    def _at(self, event: str) -> float:
        journal = self.posting.site.stage.journal(self.posting.label)
        return next((note.at for note in journal if note.event == event and note.pid != self.pid), 0.0)

    @property
    def refused(self) -> bool:
        """The first run was told that it is fenced off."""
        return any(event["pid"] == self.pid for event in self.posting.events("fence.rejected"))


def freezes(site: ShopSite, name: str = "post", *, variant: str = "good", place: str) -> Posting:
    return site.posting(name, variant=variant, at={place: "freeze"})


@contextlib.contextmanager
def frozen(
    site: ShopSite, worker: Worker, postings: dict[str, tuple[Posting, str]]
) -> Iterator[dict[str, Frozen]]:
    """Wait until each of the postings is frozen at its place, freeze the rest of the worker, start another one."""
    found = {
        name: Frozen(posting, place, posting.frozen(place)) for name, (posting, place) in postings.items()
    }
    worker.sigstop()
    with site.worker(concurrency=len(found)):
        yield found


def site_for_freezes(redis_url: str, postgres_url: str) -> ShopSite:
    return ShopSite.on(redis_url, postgres_url, visibility_timeout=HASTY)


# --- the checks -------------------------------------------------------------------------------------------------------


def successor_finishes_while_the_first_is_frozen(one: Frozen) -> float:
    """Answers the seconds it took from the redelivery."""
    eventually(lambda: one.redelivered > 0, HASTY + 10, "a redelivery")
    eventually(lambda: one.finished > 0, one.limit, "the end of the successor")
    assert is_frozen(one.pid)
    assert one.posting.value() == one.posting.balance
    has_one_effect(one.posting)
    took = one.finished - one.redelivered
    assert took < one.limit
    return took


def first_is_refused_when_it_wakes(one: Frozen) -> None:
    eventually(lambda: one.posting.ended_in(one.pid), 10, "the end of the first")
    has_one_effect(one.posting)
    assert one.refused or not one.posting.guarded
    assert (one.posting.state, one.posting.site.app.AsyncResult(one.posting.result.id).result) == (
        "SUCCESS",
        one.posting.balance,
    )
