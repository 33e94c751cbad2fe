"""External steps of an execution: recorded before, recorded after, never silently repeated (L4, L5).

::

    effect_start ── go ──► fn(downstream key) ── returns ─────────► finish: done      replayed by every later attempt
       │ done ► replay              │ raises one of `failed` ─────► finish: failed    a later attempt calls with a new key
       │ fenced ► FencedOffError    └ raises anything else, dies ─► (stays started)   unknown: on_unknown decides
       └ unknown ► probe(downstream key): Happened ► done · DidNotHappen ► go · Unknown ► in doubt

``started`` is committed before the call, on a connection of the plugin's own and in a commit that checks the fence; the
outcome after it, compared with the holder that started the effect, so that a late receipt still counts.  The
downstream key is random, and kept until an outcome is certain: it is what lets the provider recognise a repetition.
A zombie may still be in the middle of its call; only the provider's own idempotency closes that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from celery_once_fenced.errors import FencedOffError, GrantError, InDoubtError, StoreUnavailableError
from celery_once_fenced.events import emit
from celery_once_fenced.ledger import Codec, Encoded, ResultOmitted, encode_error
from celery_once_fenced.stores import EffectFinish, EffectStart, EffectStarted, Held, LedgerStore

__all__ = ["DidNotHappen", "Effects", "Happened", "Probe", "Unknown"]

LONGEST_NAME = 100
FINISH_PAUSES = (0.1, 0.5, 2.0, 5.0)
"""Seconds between tries to record an outcome: a call that was made is worth waiting for a database that restarts."""


@dataclass(frozen=True, slots=True)
class Happened:
    """A probe's answer: the step was taken, and this was its result."""

    result: object = None


@dataclass(frozen=True, slots=True)
class DidNotHappen:
    """A probe's answer: the step was not taken, it may be called now."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A probe's answer: it cannot be known now; a person decides."""


Probe = Callable[[str], object]
Policy = Literal["hold", "rerun", "fail"] | Probe
Step = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class _Effect:
    name: str
    fn: Step
    failed: tuple[type[BaseException], ...]
    own: Policy | None


class Effects:
    """The effects of one execution.  Not for several threads at once, as the body is one."""

    def __init__(
        self,
        ledger: LedgerStore,
        held: Held,
        on_unknown: Policy,
        codec: Codec,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._ledger = ledger
        self._held = held
        self._on_unknown = on_unknown
        self._codec = codec
        self._sleep = sleep
        self._key = held.operation.digest.hex()
        self._task_id = held.operation.task_id
        self._names: set[str] = set()
        self._inside = ""

    def run(self, name: str, fn: Step, failed: tuple[type[BaseException], ...], own: Policy | None) -> object:
        """See ``Grant.effect``."""
        self._enter(name)
        try:
            effect = _Effect(name, fn, failed, own)
            return self._answered(effect, self._start(effect))
        finally:
            self._inside = ""

    def _enter(self, name: str) -> None:
        if not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
            raise GrantError(
                f"an effect needs a name of 1 to {LONGEST_NAME} printable characters, not {name!r:.120}"
            )
        if self._inside:
            raise GrantError(
                f"effect {name!r} is called inside effect {self._inside!r}: call them one after the other"
            )
        if name in self._names:
            raise GrantError(
                f"effect {name!r} was already called in this execution: give each step its own name"
            )
        self._names.add(name)
        self._inside = name

    def _answered(self, effect: _Effect, started: EffectStarted) -> object:
        if started.verdict == "fenced":
            raise FencedOffError(self._held.operation.resource, self._held.token)
        if started.verdict == "done":
            emit("effect.replayed", key=self._key, task_id=self._task_id, effect=effect.name)
            return self._decoded(started.result)
        if started.verdict == "unknown" and started.holder != self._held.holder:
            return self._find_out(effect, started)
        # Unknown and ours: the reply to the first asking was lost.  Names are used once, so the step was not taken.
        return self._call(effect, started)

    def _start(self, effect: _Effect, *, rerun: bool = False) -> EffectStarted:
        own = "rerun" if rerun else None if effect.own is None else _named(effect.own)
        return self._ledger.effect_start(EffectStart(self._held, effect.name, _named(self._on_unknown), own))

    # --- unknown ----------------------------------------------------------------------------------------------------------

    def _find_out(self, effect: _Effect, started: EffectStarted) -> object:
        """An earlier attempt started this step and nobody knows how it ended."""
        probe = self._on_unknown if effect.own is None else effect.own
        answer = probe(started.downstream_key or "") if callable(probe) else Unknown()
        emit(
            "effect.probed",
            key=self._key,
            task_id=self._task_id,
            effect=effect.name,
            answer=type(answer).__name__,
        )
        if isinstance(answer, Happened):
            return self._done(effect, started.holder or "", answer.result)
        if isinstance(answer, DidNotHappen):
            return self._answered(effect, self._start(effect, rerun=True))  # a late receipt may have come in
        if isinstance(answer, Unknown):
            raise InDoubtError(self._held.operation.key, effect.name, "")
        raise GrantError(
            f"the probe of effect {effect.name!r} answered {answer!r:.100}: it must answer Happened(result), "
            f"DidNotHappen() or Unknown()"
        )

    # --- the call ---------------------------------------------------------------------------------------------------------

    def _call(self, effect: _Effect, started: EffectStarted) -> object:
        holder = started.holder or self._held.holder
        emit("effect.started", key=self._key, task_id=self._task_id, effect=effect.name)
        try:
            value = effect.fn(started.downstream_key or "")
        except effect.failed as error:  # for certain: nothing happened there
            self._finish(effect, holder, "failed", error=encode_error(error))
            raise
        emit("effect.returned", key=self._key, task_id=self._task_id, effect=effect.name)
        return self._done(effect, holder, value)

    def _done(self, effect: _Effect, holder: str, value: object) -> object:
        """Record a result; what is returned is what a later attempt will get."""
        encoded = Encoded.of(value, self._codec)
        text = self._codec[0](encoded.value) if encoded.text is None else encoded.text
        self._finish(effect, holder, "done", result=text)
        return self._decoded(text)

    def _finish(
        self,
        effect: _Effect,
        holder: str,
        state: Literal["done", "failed"],
        *,
        result: str | None = None,
        error: str | None = None,
    ) -> None:
        outcome = EffectFinish(self._held.operation.digest, effect.name, holder, state, result, error)
        for pause in (*FINISH_PAUSES, None):
            try:
                self._ledger.effect_finish(outcome)
                break
            except StoreUnavailableError:
                if pause is None:
                    raise
                self._sleep(pause)
        emit("effect.finished", key=self._key, task_id=self._task_id, effect=effect.name, state=state)

    # --- parts ------------------------------------------------------------------------------------------------------------

    def _decoded(self, text: str | None) -> object:
        value: Any = None if text is None else self._codec[1](text)
        return ResultOmitted(str(value["reason"])) if ResultOmitted.matches(value) else value


def _named(policy: Policy) -> str:
    """How the ledger calls a policy: a function is ``probe``."""
    return "probe" if callable(policy) else policy
