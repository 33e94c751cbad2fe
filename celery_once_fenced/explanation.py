"""What ``explain(key)`` answers: who holds a key, why and until when, in data and as a sentence for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from celery_once_fenced.outcome import moment_of
from celery_once_fenced.stores import HeldFence, Hold, Surroundings

__all__ = ["Explanation"]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Who holds a key, why and until when: in data, and as a sentence (``str(explanation)``)."""

    key: str
    digest: str
    holds: tuple[Hold, ...]
    """Slots in Redis: queued (q) and running (r)."""
    around: Surroundings
    """What else Redis knows of the key: the line, refusals in a row, the kept and the newest call."""
    fences: tuple[HeldFence, ...] = ()
    """Fences in Postgres that are held for this key, or have lapsed."""
    entry: Mapping[str, Any] | None = None
    """The ledger entry by column, where the correctness tier knows the key."""
    unknown: str = ""
    """Why fence and ledger could not be asked; empty where they were."""

    def __str__(self) -> str:
        parts = [_hold_sentence(hold) for hold in self.holds]
        parts += [_fence_sentence(fence) for fence in self.fences]
        parts += [_entry_sentence(self.entry)] if self.entry is not None else []
        parts += [f"fence and ledger are not known, {self.unknown}"] if self.unknown else []
        parts = parts or ["held by nobody, a call runs at once"]
        return f"{self.key}: {'; '.join([*parts, *_around(self.holds, self.around)])}."


def _at(since: float) -> str:
    moment = moment_of(since)
    return "an unknown time" if moment is None else moment.strftime("%Y-%m-%d %H:%M:%S UTC")


def _hold_sentence(hold: Hold) -> str:
    if hold.slot == "q":
        return f"queued by task {hold.task_id} since {_at(hold.since)}, for {hold.left:.0f} s more unless it runs"
    where = f" on {hold.worker}" if hold.worker else ""
    return f"running in task {hold.task_id}{where} since {_at(hold.since)}, lease left {hold.left:.1f} s"


def _fence_sentence(fence: HeldFence) -> str:
    until = (
        f"for {fence.left:.1f} s more"
        if fence.left > 0
        else f"lapsed {-fence.left:.1f} s ago, free to be taken over"
    )
    return f"fence {fence.resource} held with token {fence.token} by task {fence.task_id} on {fence.worker}, {until}"


def _entry_sentence(entry: Mapping[str, Any]) -> str:
    return f"recorded as {entry['state']} by task {entry['task_id']}, attempt {entry['attempt']}, token {entry['token']}"


# --- what surrounds the holds -----------------------------------------------------------------------------------------


def _around(holds: tuple[Hold, ...], around: Surroundings) -> Iterator[str]:
    queued = next((hold for hold in holds if hold.slot == "q"), None)
    if queued is not None and queued.delivery == around.unconfirmed:
        yield _unconfirmed_sentence(around)
    if around.kept_at is not None:
        yield _kept_sentence(around, around.kept_at, is_queued=queued is not None)
    if around.newest_at is not None:
        yield (
            f"the newest call that was started is that of {_at(around.newest_at)}, by task {around.newest_task}: "
            "the message of an older one does not run"
        )
    if around.waiting:
        yield _line_sentence(around)
    if around.refused:
        yield f"{_counted(around.refused, 'call')} refused in a row since it last ran"


def _unconfirmed_sentence(around: Surroundings) -> str:
    """E13a."""
    sentence = "it is not confirmed yet that this call was published"
    if not around.displaced_task:
        return sentence
    return f"{sentence}, so the one it displaced, of task {around.displaced_task}, may still run"


def _kept_sentence(around: Surroundings, kept_at: float, *, is_queued: bool) -> str:
    """E13b."""
    call = f"a newer call, of {_at(kept_at)}, is kept"
    if kept_at == around.newest_at:
        return f"{call} until the run with its arguments has ended"
    return f"{call}: the queued one runs with its arguments" if is_queued else f"{call} for the next one"


def _line_sentence(around: Surroundings) -> str:
    """D3."""
    since = "" if around.waiting_since is None else f", the first since {_at(around.waiting_since)}"
    wait = "waits for its" if around.waiting == 1 else "wait for their"
    return f"{_counted(around.waiting, 'message')} {wait} turn{since}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
