"""One posting: what became of it, and the checks that it must pass whoever guards it."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import psutil

from django_celery_once_fenced.models import Fence, LedgerEntry
from example_project.shop.models import Account, Entry
from tests.acceptance.shop_app import AMOUNT, LEASE
from tests.acceptance.workers import eventually

if TYPE_CHECKING:
    from tests.acceptance.correctness_site import ShopSite

BALANCE = 100


class Posting:
    """One call of a task with a key and an account, under checks that do not care who guards it."""

    def __init__(self, site: ShopSite, task: Any, label: str, account: int, acts: tuple[str, ...]) -> None:
        self.site = site
        self.task = task
        self.label = label
        self.account = account
        self.acts = acts
        self.at = 0.0
        self.result: Any = None

    def call(self, **options: Any) -> Any:
        self.at = time.monotonic()
        self.result = self.again(**options)

    def again(self, **options: Any) -> Any:
        """Another call, the same in all."""
        return self.task.apply_async((self.label, self.account, *self.acts), **options)

    def call_with_tail(self, **options: Any) -> None:
        """A call that something else follows on, with what it answers."""
        self.call(link=self.site.app.signature("unguarded.collect", (f"{self.label} tail",)), **options)

    # --- what it left -------------------------------------------------------------------------------------------------

    @property
    def guarded(self) -> bool:
        return hasattr(self.task, "blueprint")

    @property
    def fenced(self) -> bool:
        return self.guarded and self.task.blueprint.policy.correctness

    @property
    def digest(self) -> str:
        return str(self._key.digest)

    @property
    def _key(self) -> Any:
        return self.task.blueprint.recipe.derive_call((self.label, self.account, *self.acts), {}, None).key

    @property
    def entries(self) -> int:
        """How often the posting was made."""
        return Entry.objects.filter(number=int(self.label, 16)).count()

    @property
    def balance(self) -> int:
        return Account.objects.get(pk=self.account).balance

    @property
    def ledger(self) -> LedgerEntry:
        """The entry of the latest call (under ``replay_for=0`` each has its own)."""
        return LedgerEntry.objects.filter(key=self._key.text).latest("created_at")

    @property
    def fence(self) -> Fence:
        return Fence.objects.get(pk=f"account:{self.account}")

    @property
    def runs(self) -> int:
        return self.site.stage.runs(self.label)

    @property
    def tails(self) -> int:
        """How often what follows has run."""
        return self.site.stage.runs(f"{self.label} tail")

    @property
    def running(self) -> bool:
        """Somebody has the key's lease in Redis."""
        return "r" in self.site.holds(self.task, self.label, self.account, *self.acts)

    @property
    def deliveries(self) -> int:
        """How often a worker's child was given a message of this label."""
        return self.site.stage.events(self.label).count("delivered")

    def ended_in(self, pid: int) -> bool:
        """Celery is through with a message of this label in this process."""
        journal = self.site.stage.journal(self.label)
        return any(note.event.startswith("ended") and note.pid == pid for note in journal)

    @property
    def state(self) -> str:
        """What the result backend says now."""
        return str(self.site.app.AsyncResult(self.result.id).state)

    def events(self, name: str) -> list[dict[str, Any]]:
        """The plugin's events of this key with this name, in all processes."""
        return [event for event in self.site.orders.events(self.digest) if event["event"] == name]

    # --- to wait for --------------------------------------------------------------------------------------------------

    def value(self, within: float = 15.0) -> Any:
        """The result of a success, ``within`` seconds of the call."""
        self.ends("SUCCESS", within)
        return self.result.get(timeout=1)

    def ends(self, state: str, within: float = 15.0) -> Any:
        """Wait for a result in this state, ``within`` seconds of the call; answers the result or the error."""
        left = max(self.at + within - time.monotonic(), 0.1)
        eventually(self.result.ready, left, f"a result of {self.task.name}")
        assert self.state == state, f"{self.task.name} ended {self.state}: {self.result.result!r}"
        return self.result.result

    def has_run(self, times: int, within: float = 15.0) -> Self:
        eventually(lambda: self.runs >= times, within, f"run {times} of {self.task.name}")
        return self

    def has_told(self, event: str, within: float = 15.0) -> Self:
        eventually(lambda: bool(self.events(event)), within, f"{event} of {self.task.name}")
        return self

    def release(self, name: str = "") -> Self:
        """Let a body go on that holds."""
        self.site.stage.release(self.label, name)
        return self

    # --- places -------------------------------------------------------------------------------------------------------

    def named(self, point: str) -> str:
        """Orders for places in the body go by label, for those in the plugin by digest."""
        return self.digest if self.guarded and point in ("granted", "completed") else self.label

    def stopped(self, point: str, within: float = 15.0) -> int:
        """Wait until a run has come to the place; answers its process id."""
        eventually(
            lambda: self.site.orders.stopped(self.named(point)) != 0, within, f"{self.task.name} at {point}"
        )
        return self.site.orders.stopped(self.named(point))

    def frozen(self, point: str) -> int:
        """Wait until a run is frozen at the place; answers its process id."""
        pid = self.stopped(point)
        eventually(lambda: is_frozen(pid))
        return pid

    def go_on(self, point: str) -> None:
        self.site.orders.release(self.named(point))


@dataclass(frozen=True)
class Zombie:
    """A posting whose first run is frozen, with the child process it is in."""

    posting: Posting
    pid: int

    @classmethod
    def of(cls, posting: Posting, place: str) -> Zombie:
        return cls(posting, posting.frozen(place))

    def lapses(self) -> Zombie:
        """Wait until its lease in Redis is over, which was taken before the one in PostgreSQL."""
        eventually(lambda: not self.posting.running, LEASE + 2, "the end of the lease")
        return self

    def wakes(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def was_fenced_off(self, then: str) -> None:
        self.posting.has_told("fence.rejected")
        (event,) = self.posting.events("fence.rejected")
        assert (event["pid"], event["then"]) == (self.pid, then)


def is_frozen(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


# --- checks -----------------------------------------------------------------------------------------------------------


def has_run_once(posting: Posting) -> None:
    assert posting.runs == 1, f"it ran {posting.runs} times"


def has_one_effect(posting: Posting) -> None:
    entries, balance = posting.entries, posting.balance
    assert (entries, balance) == (1, BALANCE - AMOUNT), f"posted {entries} times, the balance is {balance}"


def ends_with_one_effect(posting: Posting, within: float = 15.0) -> None:
    """It succeeds, was done once, and nothing is pending."""
    value = posting.value(within)
    eventually(lambda: not posting.site.pending(posting.result.id), within, f"the end of {posting.task.name}")
    has_one_effect(posting)
    assert (value, posting.state) == (BALANCE - AMOUNT, "SUCCESS")
    assert not posting.fenced or posting.ledger.state == "succeeded"
