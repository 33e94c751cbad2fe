"""One call on its way to the broker: it is admitted, carries on, or goes out unguarded.

::

    apply_async ─┬─ once=False, no key ──────────────────────────► published with a bypass header (E16)
                 ├─ retry, replace() ── q for the successor ─────► published (E10)
                 └─ admit ── enqueued, awaiting, unguarded ──────► published with its header (K4)
                       ├──── replaced ───────────────────────────► the same, then confirmed (E13a)
                       └──── duplicate, kept_last ───────────────► the holder's result
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import states
from celery.exceptions import SoftTimeLimitExceeded
from kombu.utils.uuid import uuid

from celery_once_fenced import kept
from celery_once_fenced.admission import Admission, Call, Permit
from celery_once_fenced.delays import delay_of, expires_of
from celery_once_fenced.errors import DuplicateError, GrantError, StoreUnavailableError
from celery_once_fenced.gate import Ask, Gate, NotAdmittedError, answered
from celery_once_fenced.header import HEADER, Header
from celery_once_fenced.keys import Key, new_id
from celery_once_fenced.lease import queued_hold
from celery_once_fenced.outcome import Outcome
from celery_once_fenced.publishers import celery_is_bare, producer_of
from celery_once_fenced.stores import Enqueue, Mode

if TYPE_CHECKING:
    from celery_once_fenced.tasks import SingletonTask

__all__ = ["Publication"]

AWAITING_OPTIONS = frozenset({"chain", "chord", "group_id", "link", "link_error", "parent_id"})
"""Options of apply_async with which something waits for this very call (E12).  ``parent_id`` is given by Celery alone,
to a callback: an exception from its publish would make a failure of the task that has just succeeded.
"""
_UNPACKED = Header()
"""What a call has before it is published: nothing yet, but where a stored message names it (L9)."""


class Publication:
    """One call on its way to the broker."""

    def __init__(
        self,
        task: SingletonTask,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        task_id: str | None,
        options: dict[str, Any],
        *,
        eager: bool = False,
    ) -> None:
        self.task = task
        self._blueprint = task.blueprint
        self._by_producer = self._blueprint.by_producer and not eager and celery_is_bare(task.app)
        self.args = args
        self.kwargs = kwargs
        self.task_id = _plain(task_id) if task_id else uuid()
        self.options = options
        self.preassigned = task_id is not None
        self._gate: Gate | None = None

    def send(self, *, bypass: bool, once_key: str | None) -> Any:
        """Ask the guard, publish, and say what became of it."""
        before = self._header_before
        if bypass or (before is not None and before.bypass):
            return self._send_unguarded("bypassed", refused=bypass)
        if before is not None and before.key is not None and self.options.get("retries"):
            return self._send_successor(before.key, before)
        packed = before if before is not None and before.packed else _UNPACKED
        header = self._header(packed, once_key)
        if header.key is None:
            return self._send_unguarded("no_key", refused=False)
        if self._replaces_current:
            return self._send_successor(header.key, self._continued(header))
        if not self._asks:
            return self.complete(header, None)
        return self._send_asked(header.key, header, self._call(header.key, header))

    def draft(self) -> tuple[Header, Call | None]:
        """A new call before it is asked for: its header, and the question, where there is something to ask (E18).

        Raises what ``send`` raises for arguments that cannot be made into a key.
        """
        header = self._header(_UNPACKED, None)
        asks = header.key is not None and self._asks
        return header, self._call(header.key, header) if asks and header.key is not None else None

    def complete(self, header: Header, permit: Permit | None) -> Any:
        """Publish as the permit says (None: there was nothing to ask), and say what became of the call."""
        if header.key is None:
            return self._send_unguarded("no_key", refused=False)
        given = permit or Permit("enqueued", "free")
        if not given.publish:
            return self._holders_result(header.key, given)
        result, given = self._send(header.key, header, answered(given))
        return self._published(result, header.key, header, given)

    def take_back(self, header: Header) -> None:
        """Free what may be held for this call without a message that is out; it will not be published."""
        if header.key is not None and (self._gate is None or self._gate.may_hold):
            self._take_back(header.key, header)

    def _header(self, packed: Header, once_key: str | None) -> Header:
        """A stored message that knows its key keeps it: the call may have named another than its arguments make (L14)."""
        key, fingerprint = packed.key, packed.fingerprint
        if key is None:
            derived = self._blueprint.recipe.derive_call(self.args, self.kwargs, once_key)
            key, fingerprint = derived.key, derived.fingerprint
        return Header(
            key=key,
            fingerprint=fingerprint,
            delivery=packed.delivery or new_id(),
            run=packed.run,
            awaited=self._awaited,
            packed=packed.packed,
            seq=packed.seq,
        )

    @property
    def _header_before(self) -> Header | None:
        headers = self.options.get("headers")
        return Header.parse(headers.get(HEADER)) if headers else None

    @property
    def _awaited(self) -> bool:
        options = self.options
        return self.preassigned or any(options[name] for name in AWAITING_OPTIONS & options.keys())

    @property
    def _replaces_current(self) -> bool:
        if not self.preassigned:
            return False
        current = self.task.app.current_worker_task
        return current is not None and current.request.id == self.task_id

    def _continued(self, header: Header) -> Header:
        """What replaces the current task is not newer than it, where it has the same key (E13)."""
        current = Header.parse(getattr(self.task.app.current_worker_task.request, HEADER, None))
        same = current is not None and current.key == header.key
        return replace(header, seq=current.seq) if current is not None and same else header

    # --- the ways out -------------------------------------------------------------------------------------------------

    def _send_asked(self, key: Key, header: Header, call: Call) -> Any:
        """Celery makes the message while Redis answers.  Where another publishes in its place, or the last call was refused,
        so that the message is likely to be made for nothing, the answer comes first.
        """
        ask: Ask = partial(self._ask, call)
        try:
            if self._blueprint.refused or not self._by_producer:
                permit = ask()()
                if not permit.publish:
                    return self._holders_result(key, permit)
                ask = answered(permit)
            result, permit = self._send(key, header, ask)
        except NotAdmittedError as refused:
            return self._holders_result(key, refused.permit)
        except (DuplicateError, StoreUnavailableError):  # nothing is held; what may be is owed
            raise
        except BaseException:
            if self._gate is None:  # interrupted before there was an answer, or a message to be made
                self._take_back(key, header)
            raise
        return self._published(result, key, header, permit)

    def _ask(self, call: Call) -> Callable[[], Permit]:
        return partial(self._noted, self._admission.ask(call))

    def _noted(self, wait: Callable[[], Permit]) -> Permit:
        """The answer; whether it was a refusal is remembered for the next call."""
        try:
            permit = wait()
        except DuplicateError:
            self._blueprint.refused = True
            raise
        self._blueprint.refused = not permit.publish
        return permit

    def _send(self, key: Key, header: Header, ask: Ask) -> tuple[Any, Permit]:
        """Hand the call to Celery, with what the answer says; left by an exception, no key is held for a message that is not
        out (E11).
        """
        producers = partial(producer_of, self.task, self.options)
        gate = self._gate = Gate(ask, producers, partial(self._stamp, header))
        try:
            with gate:
                if self._by_producer:
                    result = self._hand_over(header, producer=gate, connection=None)
                else:
                    result = self._hand_over(self._permitted(header, gate.passed()))
                    gate.may_hold = False
            return result, gate.passed()  # asked for here where a producer was not used after all
        except BaseException:
            if gate.may_hold:
                self._take_back(key, header)
                gate.may_hold = False
            raise

    def _stamp(self, asked: Header, headers: dict[str, Any], permit: Permit) -> None:
        header = self._permitted(asked, permit)
        if header is not asked:
            headers[HEADER] = header.dump()

    def _permitted(self, header: Header, permit: Permit) -> Header:
        """The header with what the permit says."""
        if permit.status == "awaiting" and permit.by is not None and not self._blueprint.policy.span.ordered:
            header = replace(header, answer_from=permit.by.task_id)
        return header if header.seq == permit.seq else replace(header, seq=permit.seq)

    def _published(self, result: Any, key: Key, header: Header, permit: Permit) -> Any:
        if self._blueprint.policy.span.displaces and permit.seq:
            self._admission.confirm(key, header.delivery, published=True)
        return self._with_outcome(result, permit, key.text)

    def _holders_result(self, key: Key, permit: Permit) -> Any:
        holder = permit.by.task_id if permit.by is not None else ""
        return self._with_outcome(self.task.AsyncResult(holder), permit, key.text)

    @property
    def _asks(self) -> bool:
        span = self._blueprint.policy.span
        return span.sets_q or span.refused_by_q or span.refused_by_r

    def _send_successor(self, key: Key, before: Header) -> Any:
        """Retry or ``replace()``: the key goes on to a new delivery (E10)."""
        header = replace(
            before,
            delivery=new_id(),
            run=before.run or before.delivery,
            deferrals=0,
            republished=0,
            waiting_since=0,
        )
        result, permit = self._send(key, header, lambda: partial(self._succeed, key, header))
        return self._with_outcome(result, permit, key.text)

    def _succeed(self, key: Key, header: Header) -> Permit:
        policy, seq = self._blueprint.policy, header.seq
        if policy.span.sets_q and policy.unique != "until_expired":
            seq = self._admission.succeed(self._question(key, header, "successor", policy.queue_hold))
        return Permit("enqueued", "retry", seq=seq)

    def _send_unguarded(self, reason: str, *, refused: bool) -> Any:
        if refused and self._blueprint.policy.tier == "correctness":
            raise GrantError(f"task {self.task.name} is in the correctness tier: once=False is refused")
        result = self._hand_over(Header(bypass=True))
        result.outcome = Outcome(status="unguarded", reason=reason, key=None, task_id=self.task_id)
        return result

    @property
    def _admission(self) -> Admission:
        return self._blueprint.runtime.admission

    # --- parts --------------------------------------------------------------------------------------------------------

    def _question(self, key: Key, header: Header, mode: Mode, hold: float) -> Enqueue:
        task, span = self.task.name, self._blueprint.policy.span
        call = kept.pack(task, self.args, self.kwargs) if span.keeps_last and mode == "new" else ""
        delay = delay_of(self.task, self.options)
        seconds = queued_hold(hold, delay=delay, expires=expires_of(self.task, self.options))
        patience = self._blueprint.policy.lease + delay
        return Enqueue(
            key, task, span, header.delivery, self.task_id, seconds, mode, header.seq, call, patience
        )

    def _call(self, key: Key, header: Header) -> Call:
        policy = self._blueprint.policy
        return Call(
            question=self._question(key, header, "awaited" if header.awaited else "new", policy.hold),
            awaited=header.awaited,
            raises=policy.on_duplicate == "raise",
            strict=policy.tier == "efficiency" and policy.on_store_error == "raise",
            queue_hold=policy.hold,
            revoked=self._is_revoked,
        )

    def _is_revoked(self, task_id: str) -> bool:
        try:
            return bool(self.task.backend.get_state(task_id) == states.REVOKED)
        except SoftTimeLimitExceeded:  # that of the task that calls
            raise
        except Exception:  # noqa: BLE001  # a result backend that cannot be asked says nothing: the hold stands
            return False

    def _hand_over(self, header: Header, **options: Any) -> Any:
        headers = {**(self.options.get("headers") or {}), HEADER: header.dump()}
        return self.task.publish(
            self.args, self.kwargs, self.task_id, {**self.options, "headers": headers, **options}
        )

    def _take_back(self, key: Key, header: Header) -> None:
        if self._blueprint.policy.span.displaces:
            self._admission.confirm(key, header.delivery, published=False)
        else:
            self._admission.withdraw(key.digest, header.delivery)

    def _with_outcome(self, result: Any, permit: Permit, key: str) -> Any:
        if permit.by is None or permit.status == "replaced":
            own = Outcome(status=permit.status, reason=permit.reason, key=key, task_id=self.task_id)
            result.outcome = own
        else:
            result.outcome = Outcome.held_by(permit.by, status=permit.status, reason=permit.reason, key=key)
        return result


def _plain(task_id: Any) -> Any:
    """Of a member of an enumeration of texts ``str()`` makes its name, and JSON its text: that counts."""
    return str.__str__(task_id) if isinstance(task_id, str) else task_id
