"""``enforce_once()``: eager mode with the real semantics, in the memory of one process and by a clock of its own.

A call asks the admission and runs through the guard, as in production; the lease store is ``MemoryLeaseStore``, and
Celery's ``apply`` takes the place of broker and worker.  There is one thread, so what a worker would come back to later
waits in a list::

    delay ── admitted ──► apply ──► __call__ ─┬─ guard ──► body ──► result
                │ duplicate                   │ put aside: queueing(), inside a fenced body, deferred
                ▼                             ▼
         the holder's result              waiting ──► work(), as soon as no body runs and no block is open
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from celery import signals, states
from celery.exceptions import Ignore
from celery.result import EagerResult

from celery_once_fenced import runtime as runtimes
from celery_once_fenced import worker
from celery_once_fenced.admission import Admission
from celery_once_fenced.bulk import send_many
from celery_once_fenced.detached import Detached
from celery_once_fenced.enforcement import enforce
from celery_once_fenced.guard import Guard
from celery_once_fenced.header import HEADER, Header
from celery_once_fenced.keys import Key, new_id
from celery_once_fenced.policy import SPANS
from celery_once_fenced.runtime import Runtime
from celery_once_fenced.stores import Enqueue, Hold, Settle, Start
from celery_once_fenced.stores.memory import MemoryLeaseStore
from celery_once_fenced.testing.clock import Clock
from celery_once_fenced.testing.delivered import Delivered, Waiting
from celery_once_fenced.testing.results import EagerError, LaterResult
from celery_once_fenced.testing.signatures import guarded_task, key_of
from celery_once_fenced.testing.stillness import StillFenceKeeper, StillLeaseKeeper
from celery_once_fenced.testing.swap import swapped

__all__ = ["Enforced", "enforce_once"]


@contextmanager
def enforce_once(app: Any = None) -> Iterator[Enforced]:
    """Guard eager calls for the length of the block: leases in memory, time by ``once.clock``.

    Turns ``task_always_eager`` on.  No broker, worker, result backend or Redis is asked; fence and ledger are the
    project's own database, in the transaction of the test where Django's TestCase opened one.

    Args:
        app: The Celery app.  Default: the current one, or the one that has the setting ``once_fenced``.

    Raises:
        ConfigError: there is no app with this setting, or the setting is wrong.
    """
    once = Enforced(runtimes.current() if app is None else runtimes.runtime_of(app))
    with once._in_place():
        yield once


@dataclass(frozen=True, slots=True)
class _Running:
    task_id: str
    fenced: bool


class Enforced:
    """The state of one ``enforce_once()`` block.  Not for several threads at once."""

    def __init__(self, runtime: Runtime) -> None:
        self.clock = Clock(self._moved)
        """The time of leases, windows and, for what the ledger keeps, of the database."""
        self._runtime = runtime
        self._ledger = _ledger_of(runtime)
        self._leases = MemoryLeaseStore(self.clock)
        self._results: dict[str, EagerResult] = {}
        self._waiting: list[Waiting] = []
        self._running: list[_Running] = []
        self._delivering = ""
        self._queueing = 0
        self._holding = 0

    # --- for tests ----------------------------------------------------------------------------------------------------

    @contextmanager
    def hold(self, signature: Any, *, queued: bool = False) -> Iterator[str]:
        """Hold the key of a call, as a task that runs it on another worker; gives the task id of that holder.

        The hold is never renewed: ``clock.advance`` beyond the lease lets it lapse, as after a crash.  What was put off
        because of it runs when the block ends.

        Args:
            signature: The call, such as ``refresh_feed.s(7)``.
            queued: Hold it as a call that no worker has come to.  So it is where ``unique`` knows no other hold.

        Raises:
            EagerError: the key is held already, or its span has no queued hold.
        """
        task, key = guarded_task(signature), key_of(signature)
        holder, task_id = new_id(), str(uuid.uuid4())
        span = task.blueprint.policy.span
        slot: Literal["q", "r"] = "q" if queued or not span.sets_r else "r"
        if slot == "q" and not span.sets_q:
            raise EagerError(f"{key.text}: unique={task.blueprint.policy.unique!r} holds no key while queued")
        by = self._take(slot, task, key, holder, task_id)
        if by is not None:
            raise EagerError(f"{key.text} is held by task {by.task_id} already")
        with self._block("_holding"):
            try:
                yield task_id
            finally:
                self._leases.release(key.digest, slot, holder)

    def _take(self, slot: str, task: Any, key: Key, holder: str, task_id: str) -> Hold | None:
        policy = task.blueprint.policy
        if slot == "q":
            return self._leases.enqueue(Enqueue(key, task.name, policy.span, holder, task_id, policy.hold)).by
        span = SPANS["while_executing"]
        return self._leases.start(
            Start(key, task.name, span, key.digest, holder, holder, task_id, "test", policy.lease, False)
        ).by

    @contextmanager
    def queueing(self) -> Iterator[None]:
        """As if no worker were up: calls of guarded tasks wait, in order, and run when the block ends."""
        with self._block("_queueing"):
            yield

    @contextmanager
    def _block(self, kind: str) -> Iterator[None]:
        setattr(self, kind, getattr(self, kind) + 1)
        try:
            yield
        finally:
            setattr(self, kind, getattr(self, kind) - 1)
        self._work_if_idle()

    @property
    def waiting(self) -> list[Any]:
        """The calls that wait, as signatures: queued, or deferred because their key was held."""
        return [one.task.signature(one.args, one.kwargs, task_id=one.task_id) for one in self._waiting]

    def work(self) -> int:
        """Let a worker run what waits, until nothing is left but what would be deferred again; how many have run.

        Errors of the bodies are in their results.
        """
        ran, progress = 0, True
        while progress:
            batch = self._waiting[:]
            self._waiting.clear()
            done = [self._deliver(one) for one in batch]
            progress = any(done)
            ran += sum(done)
        return ran

    # --- what the task classes ask ------------------------------------------------------------------------------------

    def guards(self, task: Any) -> bool:
        """See ``Enforcer``.  A task whose options are wrong is an error here, as it would be in a worker."""
        return task.blueprint.runtime is self._runtime

    def send(self, publication: Any, *, bypass: bool, once_key: str | None) -> Any:
        """See ``Enforcer``."""
        publication.options["throw"] = False  # an error of the body is none of the publishing
        result = self._answer(publication.task, publication.send(bypass=bypass, once_key=once_key))
        self._work_if_idle()
        self._propagate(result)
        return result

    def send_many(self, task: Any, calls: Any, options: Mapping[str, Any]) -> list[Any]:
        """See ``Enforcer``."""
        sent = send_many(task, calls, {**options, "throw": False})
        results = [self._answer(task, one) for one in sent]
        self._work_if_idle()
        return results

    def run(self, task: Any, request: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """See ``Enforcer``."""
        request.once_passage = worker.Passage()  # whatever the body does with its own task is another call
        if any(running.task_id == request.id for running in self._running):
            return task.run(*args, **kwargs)  # replace() in eager mode: the same call, inside its own body
        header = _header_of(request)
        delivered = Delivered(task, self._results, self._waiting)
        if header is not None and self._must_wait(request.id):
            delivered.put_aside(request, args, kwargs)
            raise Ignore("queued")
        self._refuse_foreign_block(task, header)
        try:
            with self._in_body(task, request.id):
                return worker.run(delivered, request, args, kwargs)  # type: ignore[arg-type]
        except Ignore:
            if header is None and delivered.has_put_aside:
                raise delivered.without_a_worker() from None
            if header is None and delivered.skipped:
                raise delivered.instead_of_skipping(args) from None
            raise

    # --- running ------------------------------------------------------------------------------------------------------

    def _answer(self, task: Any, sent: Any) -> Any:
        """What the caller gets in the place of a result that would ask a backend."""
        outcome = sent.outcome
        if outcome is None:  # of apply_many, could not be sent
            return sent
        if outcome.status in ("duplicate", "kept_last"):
            result: Any = LaterResult(outcome.task_id, task.name, self._results)
        elif self._waits(sent.id):
            result = LaterResult(sent.id, task.name, self._results)
        else:
            result = self._results.setdefault(sent.id, sent)
        result.outcome = outcome
        if hasattr(sent, "error"):
            result.error = sent.error
        return result

    @contextmanager
    def _in_body(self, task: Any, task_id: str) -> Iterator[None]:
        fenced = task.blueprint.policy.correctness
        self._running.append(_Running(task_id, fenced))
        try:
            yield
        finally:
            self._running.pop()
            if fenced and self._ledger is not None:
                self._ledger.leave()

    def _refuse_foreign_block(self, task: Any, header: Header | None) -> None:
        fenced = task.blueprint.policy.correctness and self._ledger is not None
        if not fenced or not self._ledger.in_foreign_block:
            return
        if header is not None and header.key is not None:
            self._runtime.admission.withdraw(header.key.digest, header.delivery)
        raise EagerError(
            f"{task.name} is called inside transaction.atomic(), and runs at once in eager mode: its own transaction would "
            "not be one.  Call it by delay_on_commit(), in a TestCase within captureOnCommitCallbacks(execute=True)"
        )

    def _must_wait(self, task_id: str) -> bool:
        """A worker takes what a fenced body sends, outside of its transaction: so after it."""
        inside = any(running.fenced for running in self._running)
        return task_id != self._delivering and (self._queueing > 0 or inside)

    def _waits(self, task_id: str) -> bool:
        return any(one.task_id == task_id for one in self._waiting)

    def _deliver(self, one: Waiting) -> bool:
        """Whether it has run; False: it is put aside again."""
        before, self._delivering = self._delivering, one.task_id
        try:
            result = one.task.apply(one.args, one.kwargs, throw=False, **one.apply_options)
        finally:
            self._delivering = before
        if self._waits(one.task_id):
            return False
        self._results.setdefault(one.task_id, result)
        return True

    def _work_if_idle(self) -> None:
        if self._waiting and not (self._running or self._queueing or self._holding or self._delivering):
            self.work()

    def _propagate(self, result: Any) -> None:
        eager_propagates = self._runtime.app.conf.task_eager_propagates
        if eager_propagates and result.state == states.FAILURE and isinstance(result.result, BaseException):
            raise result.result

    # --- being in place -----------------------------------------------------------------------------------------------

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self._stores())
            conf = self._runtime.app.conf
            stack.callback(setattr, conf, "task_always_eager", conf.task_always_eager)
            conf.task_always_eager = True
            stack.callback(enforce, enforce(self))
            signals.task_postrun.connect(self._on_postrun, weak=False)
            stack.callback(signals.task_postrun.disconnect, self._on_postrun)
            yield

    @contextmanager
    def _stores(self) -> Iterator[None]:
        keeper = StillLeaseKeeper(self._leases, clock=self.clock)
        parts: dict[str, Any] = {
            "leases": self._leases,
            "keeper": keeper,
            "admission": Admission(self._leases),
        }
        with ExitStack() as stack:
            if self._ledger is not None:
                # A test database cannot be dropped while somebody is connected to it.
                stack.callback(self._ledger.close)
                fences = StillFenceKeeper(self._ledger, clock=self.clock)
                parts |= {"ledger": self._ledger, "fence_keeper": fences}
            stack.enter_context(swapped(self._runtime, **parts))
            vars(self._runtime)["guard"] = Guard(
                self._leases,
                self._runtime._correctness(),
                keeper=keeper,
                backing=Detached(lambda: self._runtime),
                sleep=lambda _seconds: None,  # nothing can change meanwhile
                jitter=lambda: 0.0,
            )
            yield

    def _on_postrun(self, task: Any = None, state: Any = None, retval: Any = None, **_: Any) -> None:
        """What ``signals`` does for messages: free what never reached its body (E8c), settle a kept call (E13b)."""
        request = task.request_stack.top if hasattr(task, "blueprint") and self.guards(task) else None
        if request is None or not request.is_eager:
            return
        sent = Header.parse((request.headers or {}).get(HEADER))
        passage = getattr(request, "once_passage", None)
        if passage is None and sent is not None and sent.key is not None:
            self._runtime.admission.withdraw(sent.key.digest, sent.delivery)
        if passage is not None and passage.settles:
            self._settle(passage, ended=state != states.RETRY)
        if sent is None:  # by apply(), which tells nobody what it returns
            if state in states.READY_STATES:
                self._results.setdefault(request.id, EagerResult(request.id, retval, state, name=task.name))
            self._work_if_idle()

    def _settle(self, passage: Any, *, ended: bool) -> None:
        if passage.seq and ended:
            self._runtime.guard.settle(Settle(passage.key, passage.delivery, 0.0, passage.seq))

    def _moved(self, seconds: float) -> None:
        if self._ledger is not None:
            self._ledger.let_pass(seconds)


def _ledger_of(runtime: Runtime) -> Any:
    if runtime.database is None:
        return None
    from celery_once_fenced.testing.ledger import LedgerInTest

    source = runtime.settings.postgres_url or runtime.database.conninfo  # type: ignore[attr-defined]
    return LedgerInTest(source, runtime.database.alias)


def _header_of(request: Any) -> Header | None:
    """The header of a message, where the gate looks for it; a retry in eager mode is a new delivery (E10)."""
    header = Header.parse((request.headers or {}).get(HEADER))
    if header is None:
        return None
    if request.retries and header.delivery and not header.deferrals:
        header = replace(header, delivery=new_id(), run=header.run or header.delivery)
    setattr(request, HEADER, header.dump())
    return header
