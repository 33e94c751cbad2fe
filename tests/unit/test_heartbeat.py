"""The renewing thread, and what holders come to believe through it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from celery_once_fenced import heartbeat
from celery_once_fenced.errors import StoreUnavailableError
from celery_once_fenced.events import Event, observing
from celery_once_fenced.heartbeat import Heartbeat
from celery_once_fenced.keepers import FenceKeeper, KeptFence, KeptLease, LeaseKeeper
from celery_once_fenced.keys import new_id
from celery_once_fenced.lease import boot_clock, trust_window
from celery_once_fenced.stores import Held, Operation, Renewal
from tests.fixtures.deliveries import ManualClock
from tests.fixtures.ledger import eventually

SOON = 0.01


@dataclass(eq=False)
class Lease:
    """Due at once, and again soon after every renewal."""

    due: float = field(default_factory=boot_clock)
    ended: bool = False
    on_gone: Callable[[], object] = lambda: None
    told: list[str] = field(default_factory=list)

    def over(self, now: float) -> bool:
        return self.ended

    def gone(self) -> None:
        self.told.append("gone")
        self.on_gone()


class Beat(Heartbeat[Lease]):
    """Notes every batch it renews."""

    def __init__(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.batches: list[list[Lease]] = []
        self.meanwhile = meanwhile
        self.thread = f"test-{id(self)}"
        super().__init__(self.thread, self.renew)

    def renew(self, batch: Sequence[Lease]) -> None:
        self.batches.append(list(batch))
        self.meanwhile()
        for lease in batch:
            lease.due = boot_clock() + SOON

    def renewals(self, lease: Lease) -> int:
        return sum(lease in batch for batch in self.batches)


@pytest.fixture
def beat(monkeypatch: pytest.MonkeyPatch) -> Beat:
    monkeypatch.setattr(heartbeat, "LINGER", 2 * SOON)
    return Beat()


def threads(beat: Beat) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == f"once-fenced-{beat.thread}"]


def test_kept_lease_is_renewed_again_and_again(beat: Beat) -> None:
    with beat.keeping(Lease()) as lease:
        eventually(lambda: beat.renewals(lease) >= 3)


def test_lease_let_go_is_renewed_no_more(beat: Beat) -> None:
    with beat.keeping(Lease()) as gone, beat.keeping(Lease()) as kept:
        eventually(lambda: beat.renewals(gone))
    with beat.keeping(kept):
        seen, so_far = beat.renewals(gone), beat.renewals(kept)
        eventually(lambda: beat.renewals(kept) >= so_far + 3)
    assert beat.renewals(gone) <= seen + 1  # a batch may have been on its way


def test_one_due_lease_renews_all_in_one_round_trip(beat: Beat) -> None:
    with beat.keeping(Lease(due=boot_clock() + 3600)) as patient, beat.keeping(Lease()) as due:
        eventually(lambda: beat.batches)
    assert set(beat.batches[0]) == {patient, due}


def test_many_leases_share_one_thread_that_ends_with_them(beat: Beat) -> None:
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(beat.keeping(Lease()))
        assert len(threads(beat)) == 1
    eventually(lambda: not threads(beat))


def test_thread_that_ended_starts_again(beat: Beat) -> None:
    for _ in range(2):
        with beat.keeping(Lease()) as lease:
            eventually(lambda: beat.renewals(lease))
        eventually(lambda: not threads(beat))


def test_no_thread_before_the_first_lease() -> None:
    assert threads(Beat()) == []


def test_lease_that_is_over_is_told_once_and_dropped(beat: Beat) -> None:
    with beat.keeping(Lease()) as other, beat.keeping(Lease(ended=True)) as over:
        eventually(lambda: over.told)
        so_far = beat.renewals(other)
        eventually(lambda: beat.renewals(other) >= so_far + 2)
    assert (over.told, beat.renewals(over)) == (["gone"], 0)


def test_end_that_no_beat_noticed_is_told_when_the_lease_is_let_go(beat: Beat) -> None:
    lease = Lease(due=boot_clock() + 60)
    with beat.keeping(lease):
        lease.ended = True
    assert lease.told == ["gone"]


def test_renewal_that_hangs_holds_up_nobody_who_starts_or_ends(beat: Beat) -> None:
    hung, go_on = threading.Event(), threading.Event()
    beat.meanwhile = lambda: (hung.set(), go_on.wait(5))
    with beat.keeping(Lease()):
        assert hung.wait(5)
        with beat.keeping(Lease()):
            pass
    go_on.set()


def test_whoever_is_told_may_take_their_time(beat: Beat) -> None:
    """An observer is anybody's code: others start and end their leases meanwhile."""
    told, go_on = threading.Event(), threading.Event()
    slow = Lease(ended=True, on_gone=lambda: (told.set(), go_on.wait(5)))
    entered = threading.Event()

    def enter() -> None:
        with beat.keeping(Lease()):
            entered.set()

    with beat.keeping(slow):
        assert told.wait(5)
        threading.Thread(target=enter, daemon=True).start()
        assert entered.wait(2)
        go_on.set()


FORK = """
import os, sys, time
from celery_once_fenced.heartbeat import Heartbeat
from celery_once_fenced.lease import boot_clock

class Lease:
    def __init__(self): self.due, self.renewed = boot_clock(), 0
    def over(self, now): return False
    def gone(self): pass

def renew(batch):
    for lease in batch:
        lease.renewed += 1
        lease.due = boot_clock() + 0.01

def renewed(lease):
    until = time.monotonic() + 5
    while not lease.renewed and time.monotonic() < until:
        time.sleep(0.005)
    return lease.renewed

beat = Heartbeat("fork", renew)
with beat.keeping(Lease()) as parents:
    assert renewed(parents)
    child = os.fork()
    if child == 0:
        before = parents.renewed
        with beat.keeping(Lease()) as own:
            assert renewed(own)
        os._exit(0 if parents.renewed == before else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    parents.renewed = 0
    assert renewed(parents)
"""


def test_forked_child_renews_its_own_leases_and_never_its_parents() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FORK)], capture_output=True, timeout=20, check=False
    )
    assert done.returncode == 0, done.stderr


# --- what holders believe ---------------------------------------------------------------------------------------------


@dataclass
class Store:
    """Answers renewals, of both kinds, with what a test says."""

    answers: Any = None
    asked: int = 0
    freed: Any = False

    def renew(self, asks: Sequence[Any]) -> list[Any]:
        self.asked += 1
        if isinstance(self.answers, Exception):
            raise self.answers
        return [self.answers for _ in asks]

    def was_freed(self, digest: str, holder: str) -> bool:
        if isinstance(self.freed, Exception):
            raise self.freed
        return bool(self.freed)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def events() -> Iterator[list[Event]]:
    seen: list[Event] = []
    with observing(seen.append):
        yield seen


OUTAGES = [StoreUnavailableError("redis", "away"), RuntimeError("nobody expected this")]


@pytest.fixture
def lease(store: Store, clock: ManualClock) -> KeptLease:
    keeper = LeaseKeeper(store, clock=clock)
    return keeper.granted(Renewal("d", "d", new_id(), "t", 60.0), sent=clock(), max_hold=90.0)


def renew_lease(lease: KeptLease, store: Store, clock: ManualClock) -> None:
    LeaseKeeper(store, clock=clock)._renew([lease])


def test_renewed_lease_is_believed_for_another_window(
    lease: KeptLease, store: Store, clock: ManualClock
) -> None:
    clock.pass_(20)
    store.answers = True
    renew_lease(lease, store, clock)
    assert (lease.remaining, lease.due) == (pytest.approx(trust_window(60.0)), clock() + 20)


def test_lease_of_another_is_lost_at_once(lease: KeptLease, store: Store, clock: ManualClock) -> None:
    store.answers = False
    renew_lease(lease, store, clock)
    assert (lease.lost, lease.remaining) == (True, 0.0)


@pytest.mark.parametrize("outage", OUTAGES, ids=str)
def test_renewal_without_answer_is_tried_again_until_the_window_ends(
    lease: KeptLease, store: Store, clock: ManualClock, outage: Exception
) -> None:
    store.answers = outage
    clock.pass_(20)
    renew_lease(lease, store, clock)
    assert (lease.lost, lease.due) == (False, clock() + 0.5)
    clock.pass_(40)
    renew_lease(lease, store, clock)
    store.answers = True
    renew_lease(lease, store, clock)
    assert lease.lost


def test_loss_is_told(lease: KeptLease, clock: ManualClock, events: list[Event]) -> None:
    clock.pass_(61)
    assert lease.over(clock())
    lease.gone()
    assert [event.name for event in events] == ["lease.lost"]


@pytest.mark.parametrize(
    ("freed", "told"),
    [
        (True, "lease.freed_by_hand"),
        (False, "lease.lost"),
        (OUTAGES[0], "lease.lost"),
    ],
)
def test_lease_that_a_person_released_is_over_and_not_called_lost(
    lease: KeptLease, store: Store, clock: ManualClock, events: list[Event], freed: Any, told: str
) -> None:
    store.answers, store.freed = False, freed
    renew_lease(lease, store, clock)
    assert lease.lost, "its holder must not believe it"
    lease.gone()
    assert [event.name for event in events] == [told]


def test_thread_survives_whatever_the_question_who_released_it_raises(
    lease: KeptLease, store: Store, clock: ManualClock, events: list[Event]
) -> None:
    store.answers, store.freed = False, OUTAGES[1]
    renew_lease(lease, store, clock)
    assert lease.lost
    assert [event.fields["operation"] for event in events] == ["renew"]


def test_lease_held_as_long_as_it_may_be_is_not_called_lost(
    lease: KeptLease, store: Store, clock: ManualClock, events: list[Event]
) -> None:
    store.answers = True
    clock.pass_(50)
    renew_lease(lease, store, clock)
    clock.pass_(41)
    assert lease.over(clock())
    lease.gone()
    assert [event.name for event in events] == ["lease.held_too_long"]


@pytest.fixture
def fence(store: Store, clock: ManualClock) -> KeptFence:
    operation = Operation(b"d" * 32, "k", "s", "t", "t1", None, "account:1")
    keeper = FenceKeeper(store, clock=clock)
    return keeper.granted(Held(operation, "h", 7, 1), 60.0, sent=clock(), max_hold=None)


def renew_fence(fence: KeptFence, store: Store, clock: ManualClock) -> None:
    FenceKeeper(store, clock=clock)._renew([fence])


def test_lapsed_fence_that_nobody_took_is_not_lost(
    fence: KeptFence, store: Store, clock: ManualClock
) -> None:
    clock.pass_(600)
    assert (fence.lost, fence.remaining) == (False, 0.0)
    store.answers = "renewed"
    renew_fence(fence, store, clock)
    assert (fence.lost, fence.remaining) == (False, 60.0)


def test_superseded_fence_is_lost_for_good(
    fence: KeptFence, store: Store, clock: ManualClock, events: list[Event]
) -> None:
    store.answers = "lost"
    renew_fence(fence, store, clock)
    store.answers = "renewed"
    renew_fence(fence, store, clock)
    assert (fence.lost, fence.over(clock())) == (True, True)
    fence.gone()
    assert [event.name for event in events] == ["fence.lost"]


def test_locked_fence_is_asked_for_again_soon(fence: KeptFence, store: Store, clock: ManualClock) -> None:
    store.answers = "locked"
    clock.pass_(20)
    renew_fence(fence, store, clock)
    assert (fence.lost, fence.due, fence.remaining) == (False, clock() + 1.0, 40.0)


@pytest.mark.parametrize("outage", OUTAGES, ids=str)
def test_fence_is_not_lost_to_an_outage(
    fence: KeptFence, store: Store, clock: ManualClock, outage: Exception
) -> None:
    store.answers = outage
    clock.pass_(20)
    renew_fence(fence, store, clock)
    assert (fence.lost, fence.due) == (False, clock() + 1.0)


def test_keeper_renews_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "LINGER", SOON)
    store = Store(answers=True)
    keeper = LeaseKeeper(store)
    kept = keeper.granted(Renewal("d", "d", "h", "t", 0.1), sent=boot_clock(), max_hold=None)
    with keeper.keeping(kept):
        eventually(lambda: store.asked >= 4)  # longer than the lease would have lived
        assert not kept.lost
