"""What ``explain(key)`` answers: who holds a key, why and until when, in data and as a sentence for people."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from celery_once_fenced.ledger import recorded_error
from celery_once_fenced.outcome import moment_of
from celery_once_fenced.stores import Decision, HeldFence, Hold, RecordedEffect, Surroundings, Waiters
from celery_once_fenced.wording import counted, safe, shorten

__all__ = ["Explanation"]

LONGEST_ERROR = 200
"""Characters of a recorded error."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Who holds a key, why and until when: in data, and as a sentence (``str(explanation)``)."""

    key: str
    digest: str
    holds: tuple[Hold, ...]
    """Slots in Redis: queued (q), running (r), and the slots in which a span without r sees its twin (``Hold.name``)."""
    around: Surroundings
    """What else Redis knows of the key: the line, refusals in a row, the kept and the newest call."""
    waiters: Mapping[str, Waiters] = field(default_factory=dict)
    """By resource of its fences: the messages of all keys that wait for it."""
    fences: tuple[HeldFence, ...] = ()
    """Fences in Postgres that are held for this key, or have lapsed."""
    blocker: HeldFence | None = None
    """Who has the fence of the resource that messages of this key wait for: another key, as a rule."""
    entry: Mapping[str, Any] | None = None
    """The ledger entry by column, where the correctness tier knows the key."""
    effects: tuple[RecordedEffect, ...] = ()
    """The external steps of that entry, the oldest first."""
    decisions: tuple[Decision, ...] = ()
    """What people decided of it since it last started, oldest first; where no ledger knows of starts, for a day."""
    unknown: str = ""
    """Why fence and ledger could not be asked; empty where they were."""
    windows: Mapping[str, float] = field(default_factory=dict)
    """By holder: the end, in unix time, of those queued holds that are windows, of tasks under ``until_expired``."""
    hint: str = ""
    """What may be wrong with a text that nobody knows."""

    @property
    def known(self) -> bool:
        """Whether anything that is held or recorded reads like this; not, where ``unknown`` says so."""
        return bool(self.digest or self.holds or self.fences)

    @property
    def warning(self) -> str:
        """What whoever releases the key should know before, as a sentence; empty where there is nothing."""
        if self.entry is None or self.entry["state"] != "running" or not (steps := _started(self.effects)):
            return ""
        told = ", and ".join(_step_sentence(step, self.entry) for step in steps)
        return f"{told}: once freed, what becomes of it may stay unknown, and the key may end in doubt, for a person to decide."

    def __str__(self) -> str:
        parts = [self._hold(hold) for hold in self.holds]
        parts += [_fence_sentence(fence) for fence in self.fences]
        parts += _recorded(self.key, self.entry, self.effects) if self.entry is not None else []
        parts += [f"fence and ledger are not known, {self.unknown}"] if self.unknown else []
        parts = parts or [self._free]
        parts += _around(self.holds, self.around)
        parts += self._resources()
        parts += map(_decision_sentence, self.decisions)
        return f"{self.key}: {'; '.join(parts)}."

    def _hold(self, hold: Hold) -> str:
        until = self.windows.get(hold.holder)
        return _hold_sentence(hold) if until is None else _window_sentence(hold, until)

    @property
    def _free(self) -> str:
        """Messages that wait in the broker are seen by no store, so nobody knows whose turn is next."""
        if not self.known:
            nobody = "no key or fence of this text is held or recorded (the efficiency tier keeps nothing of a free one)"
            return nobody + (f"; {self.hint}" if self.hint else "")
        return "held by nobody" + ("" if self.blocker else ", the next message to reach a worker runs")

    def _resources(self) -> Iterator[str]:
        """Who is in whose way by a resource that several keys share (C10)."""
        if self.around.resource and not self.unknown:
            yield _blocker_sentence(self.around.resource, self.blocker)
        for resource, waiters in self.waiters.items():
            if waiters.number:
                yield _resource_line_sentence(resource, waiters)


def _at(since: float) -> str:
    moment = moment_of(since)
    return "an unknown time" if moment is None else moment.strftime("%Y-%m-%d %H:%M:%S UTC")


def _hold_sentence(hold: Hold) -> str:
    if hold.slot == "q":
        return f"queued by task {hold.task_id} since {_at(hold.since)}, for {hold.left:.0f} s more unless it runs"
    where = f" on {hold.worker}" if hold.worker else ""
    if hold.name:
        where += ", in the way of its own redelivery alone,"
    return f"running in task {hold.task_id}{where} since {_at(hold.since)}, lease left {hold.left:.1f} s"


def _window_sentence(hold: Hold, until: float) -> str:
    """Nothing of it says whether the call has run: its start asks for nothing."""
    return f"called at {_at(hold.since)} by task {hold.task_id}, further calls are duplicates until {_at(until)} (window)"


def _fence_sentence(fence: HeldFence) -> str:
    by = f"task {fence.task_id}" if fence.task_id else f"{fence.task} outside of tasks"
    return f"fence {fence.resource} held with token {fence.token} by {by} on {fence.worker}, {_until(fence)}"


def _blocker_sentence(resource: str, blocker: HeldFence | None) -> str:
    if blocker is None:
        return f"{resource}, which it waited for, is held by nobody now: the next to try takes it"
    by = (
        f"key {blocker.key}, task {blocker.task} {blocker.task_id}"
        if blocker.key
        else f"{blocker.task}, outside of tasks"
    )
    return (
        f"it waits for {resource}, which is held by {by} on {blocker.worker} since {_at(blocker.since)} with token "
        f"{blocker.token}, {_until(blocker)}"
    )


def _until(fence: HeldFence) -> str:
    if fence.left > 0:
        return f"for {fence.left:.1f} s more"
    return f"lapsed {-fence.left:.1f} s ago, free to be taken over"


# --- what is recorded -------------------------------------------------------------------------------------------------


def _recorded(key: str, entry: Mapping[str, Any], effects: Sequence[RecordedEffect]) -> Iterator[str]:
    recorded = f"recorded as {entry['state']} by task {entry['task_id']}, attempt {entry['attempt']}, token {entry['token']}"
    yield recorded + (
        f": {_error(entry)}" if entry["error"] and entry["state"] in ("failed", "retryable") else ""
    )
    yield from (
        _step_sentence(one, entry)
        for one in _started(effects)
        if entry["state"] not in ("succeeded", "failed")
    )
    if entry["state"] == "in_doubt":
        yield (
            f"a person must decide: once resolve {shlex.quote(key)} succeeded --reason …, or failed, or again; or in the admin, "
            "Keys in doubt"
        )


def _error(entry: Mapping[str, Any]) -> str:
    """As the ledger has it: no argument values, unless the message holds them."""
    name, message = recorded_error(entry["error"])
    deaths = f" ({counted(entry['takeovers'], 'takeover')})" if name.endswith(".ExhaustedError") else ""
    return f"{name.rpartition('.')[2]}: {shorten(safe(message), LONGEST_ERROR)}{deaths}"


def _started(effects: Sequence[RecordedEffect]) -> list[RecordedEffect]:
    return [one for one in effects if one.state == "started"]


def _step_sentence(effect: RecordedEffect, entry: Mapping[str, Any]) -> str:
    """L4: under way is what the present holder has started; what another has started may have happened."""
    if entry["state"] == "running" and effect.holder == entry["holder"]:
        return f"step {effect.name!r} is under way since {_at(effect.since)}"
    return f"step {effect.name!r} was started at {_at(effect.since)}, and nobody knows whether it happened"


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
        since = _since(around.refused_since)
        yield f"{counted(around.refused, 'call')} refused in a row since it last ran{since}"


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
    wait = "waits for its" if around.waiting == 1 else "wait for their"
    return f"{counted(around.waiting, 'message')} {wait} turn{_since(around.waiting_since)}"


def _resource_line_sentence(resource: str, waiters: Waiters) -> str:
    """C10."""
    wait = "waits" if waiters.number == 1 else "wait"
    return f"{counted(waiters.number, 'message')} {wait} for {resource}{_since(waiters.since)}"


def _since(first: float | None) -> str:
    return "" if first is None else f", the first since {_at(first)}"


# --- what people decided ----------------------------------------------------------------------------------------------


def _decision_sentence(decision: Decision) -> str:
    by = f" by {decision.actor}" if decision.actor else ""
    why = f": {decision.reason}" if decision.reason else ""
    return f"{_decided(decision)} at {_at(decision.at)}{by}{why}"


def _decided(decision: Decision) -> str:
    if decision.kind == "fence.force_released":
        return f"its fence was released by hand, the token raised to {decision.token},"
    if decision.kind == "ledger.forgotten":
        return f"it was forgotten by hand, being {decision.state},"
    if decision.kind == "ledger.resolved":
        return f"it was resolved by hand as {decision.state}"
    return "it was released by hand"
