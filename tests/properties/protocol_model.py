"""A small world around the real store: producers, a broker, two workers, and what can go wrong at each step.

One step for each point between which a process can be killed::

    producer   make ── (held) ── publish ── (sent) ── confirm                    confirm: replace only
    worker     take ┬─ (body) ──────────────────── end ─ (ended) ─ callbacks ─ (called) ─ result ─ (stored) ─ settle ─ (over) ─ ack
                    ├─ (looking) ─ answered or body                              an awaited duplicate
                    │  (body) ─ q for a retry ─ (retrying) ─ publish ─ (retried) ─ end
                    └─ (aside) ─ what the guard said ─ ack

What store, guard and admission decide is decided by them (``protocol_model_store``).  The glue around them (worker,
signals, publication) is written down here again, step by step.

Time moves by lapses only.  What nobody holds any more lapses by itself; where somebody still does, it is a fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from celery_once_fenced.guard import Guard
from celery_once_fenced.run import Aside, Defer, Drop, Skip, Superseded
from celery_once_fenced.signals import _is_over
from celery_once_fenced.stores.memory import MemoryLeaseStore
from tests.properties.protocol_model_store import Memory, Message, Setup, call_of

__all__ = ["Call", "Model", "Step", "ViolationError", "Worker", "World"]

FINAL = ("success", "failure", "revoked")
BODY = ("body", "retrying", "retried", "rejecting")
"""Phases in which a body runs."""
RUNNING = ("looking", *BODY)
"""Phases in which a worker has r."""
EXCUSES = (
    "delivered again",
    "killed over",
    "killed retried",
    "killed stored",
    "lapsed",
    "lost",
    "mark lapsed",
    "producer killed",
    "retry unpublished",
)
"""Faults that a documented limit rests on."""
ENDING = ("ended", "called", "stored")


class ViolationError(AssertionError):
    """A property does not hold."""


class Call(NamedTuple):
    phase: str = "new"
    """new, held, sent, made; failing, error, dead: its publish failed, so did the call, its producer was killed;
    duplicate, kept: answered by another."""
    by: int = 0
    """The call that answers for it."""
    seq: int = 0
    answer_from: int = 0
    took_q: bool = False
    result: str = ""
    tail: bool = False
    """Whether what is chained to it has been published."""
    served: bool = False
    """A body has ended that did what this call asked for."""
    minted: int = 0
    """Retries that were given a delivery id."""


class Worker(NamedTuple):
    message: Message
    phase: str
    holder: str = ""
    args: int = 0
    seq: int = 0
    how: str = ""
    """How the body ended."""
    serves: tuple[int, ...] = ()
    """Calls that were made when the body began."""
    aside: Aside | None = None
    retry: Message | None = None
    lapsed: bool = False
    """Its lease has lapsed under it."""


class World(NamedTuple):
    store: int = 0
    calls: tuple[Call, ...] = ()
    queue: tuple[Message, ...] = ()
    workers: tuple[Worker, ...] = ()
    """The busy ones."""
    faults: tuple[str, ...] = ()
    last: int = 0
    """The newest arguments with which a body has ended."""
    settled: tuple[str, ...] = ()

    def call(self, number: int, **changes: object) -> World:
        calls = list(self.calls)
        calls[number - 1] = calls[number - 1]._replace(**changes)  # type: ignore[arg-type]
        return self._replace(calls=tuple(calls))

    def worker(self, index: int, worker: Worker | None) -> World:
        """One worker goes on, or is idle."""
        others = self.workers[:index] + self.workers[index + 1 :]
        return self._replace(workers=_sorted((*others, worker) if worker else others))

    def put(self, *messages: Message) -> World:
        return self._replace(queue=tuple(sorted((*self.queue, *messages))))

    def fault(self, what: str) -> World:
        """Of those that excuse nothing it is only remembered that there was one."""
        kept = what if what.startswith(EXCUSES) else "other"
        return self._replace(faults=tuple(sorted((*self.faults, kept))))

    def happened(self, *kinds: str) -> bool:
        """Whether a fault of one of these kinds has happened."""
        return any(fault.startswith(kinds) for fault in self.faults)


def _sorted(workers: tuple[Worker, ...]) -> tuple[Worker, ...]:
    return tuple(sorted(workers, key=lambda each: (each.message, each.phase, each.holder)))


Step = tuple[str, World]


class Model:
    """All steps of a world.  Broken variants override one of its methods, or bring a broken store."""

    guard: type[Guard] = Guard
    workers = 2
    reduced = True
    """Whether steps that concern nobody else are taken before all others."""

    def __init__(self, setup: Setup, store: type[MemoryLeaseStore] = MemoryLeaseStore) -> None:
        self.setup = setup
        self.memory = Memory(setup, store, self.guard)
        self.span = self.memory.span

    @property
    def first(self) -> World:
        return World(calls=(Call(),) * self.setup.calls)

    def steps(self, world: World) -> Iterator[Step]:
        may_fail = len(world.faults) < self.setup.faults
        alone = self._alone(world, may_fail) if self.reduced else None
        yield from alone if alone is not None else self._all_steps(world, may_fail)

    def _all_steps(self, world: World, may_fail: bool) -> Iterator[Step]:
        for number, call in enumerate(world.calls, 1):
            yield from self._produce(world, number, call, may_fail)
        for message in dict.fromkeys(world.queue):
            if len(world.workers) < self.workers:
                yield from self._take(world, message, may_fail)
            if may_fail and message.deferred and not message.redelivered:
                yield f"broker delivers {message.delivery} again", self._again(world, message)
        for index, worker in enumerate(world.workers):
            yield from self._work(world, index, worker, may_fail)
        yield from self._lapses(world, may_fail)

    # --- what need not be interleaved -----------------------------------------------------------------------

    def _alone(self, world: World, may_fail: bool) -> Iterator[Step] | None:
        """The steps of one process whose next step concerns nobody else: when it is taken makes no difference to others.

        Only its own steps and faults are looked at then, which leaves all ends of the search as they are.
        """
        for number, call in enumerate(world.calls, 1):
            if call.phase == "held":
                return self._produce(world, number, call, may_fail)
        for index, worker in enumerate(world.workers):
            if self._is_private(world, index, worker):
                return self._work(world, index, worker, may_fail)
        return None

    def _is_private(self, world: World, index: int, worker: Worker) -> bool:
        phase, message, aside = worker.phase, worker.message, worker.aside
        if phase in ("over", "ended", "retrying") or isinstance(aside, Defer | Drop):
            return True
        others = [*world.queue, *(each.message for i, each in enumerate(world.workers) if i != index)]
        if phase == "called" or isinstance(aside, Superseded):  # a result
            return not self._reads_results and all(each.call != message.call for each in others)
        if phase == "stored":  # marks of a delivery
            return not self.span.keeps_last and all(each.delivery != message.delivery for each in others)
        return False

    @property
    def _reads_results(self) -> bool:
        return self.setup.after_get or bool(self.setup.awaited)

    # --- producers ------------------------------------------------------------------------------------------

    def _produce(self, world: World, number: int, call: Call, may_fail: bool) -> Iterator[Step]:
        name = f"call {number}"
        if call.phase == "new" and self._is_next(world, number):
            yield f"{name} is made", self._make(world, number)
        elif call.phase == "held":
            yield f"{name} is published", self._publish(world, number, call)
            if may_fail:
                yield (
                    f"{name}: publish fails",
                    world.call(number, phase="failing").fault(f"unpublished:{number}"),
                )
                yield f"{name}: producer killed before publish", self._dies(world, number)
        elif call.phase == "sent":
            store = self.memory.confirm(world.store, str(number), published=True)
            yield f"{name} is confirmed", world._replace(store=store).call(number, phase="made")
            if may_fail:
                made = world.call(number, phase="made").fault(f"unconfirmed:{number}")
                yield f"{name}: producer killed before confirm", made
        elif call.phase == "failing":
            yield f"{name} is taken back", self._fail(world, number, call)
            if may_fail:
                yield f"{name}: producer killed before it takes its hold back", self._dies(world, number)

    def _is_next(self, world: World, number: int) -> bool:
        before = world.calls[number - 2] if number > 1 else None
        if before is None or before.phase == "new":
            return before is None
        answered = before.result in FINAL or before.phase in ("error", "dead")
        return answered or not self.setup.after_get

    def _make(self, world: World, number: int) -> World:
        permit, store = self.memory.admit(world.store, number)
        world = world._replace(store=store)
        by = call_of(permit.by.task_id) if permit.by else 0
        if not permit.publish:
            if self.setup.after_get and not world.faults:
                raise ViolationError(
                    f"call {number} is suppressed, though the one before it had been answered"
                )
            phase = "kept" if permit.status == "kept_last" else "duplicate"
            return world.call(number, phase=phase, by=by)
        answer_from = by if permit.status == "awaiting" and not self.span.ordered else 0
        took_q = permit.status in ("enqueued", "replaced")
        return world.call(number, phase="held", seq=permit.seq, answer_from=answer_from, took_q=took_q)

    def _publish(self, world: World, number: int, call: Call) -> World:
        message = Message(number, str(number), call.seq, number, answer_from=call.answer_from)
        phase = "sent" if self.span.displaces and call.seq else "made"
        return world.put(message).call(number, phase=phase, seq=0, answer_from=0, took_q=False)

    def _fail(self, world: World, number: int, call: Call) -> World:
        store = self.memory.take_back(world.store, str(number), call.seq) if call.took_q else world.store
        return world._replace(store=store).call(number, phase="error", seq=0, took_q=False)

    @staticmethod
    def _dies(world: World, number: int) -> World:
        return world.call(number, phase="dead").fault(f"producer killed:{number}")

    # --- broker ---------------------------------------------------------------------------------------------

    @staticmethod
    def _again(world: World, message: Message) -> World:
        return world.put(message._replace(redelivered=True)).fault(f"delivered again:{message.call}")

    def _give_back(self, world: World, message: Message, fault: str) -> World:
        """What was not acknowledged comes again; what was is gone with its worker, as everywhere in Celery."""
        if self.setup.late:
            return world.put(message._replace(redelivered=True)).fault(f"{fault}:{message.call}")
        over = fault in ("killed stored", "killed retried")
        return world.fault(f"{fault if over else 'lost'}:{message.call}")

    # --- a worker takes a message ---------------------------------------------------------------------------

    def _take(self, world: World, message: Message, may_fail: bool) -> Iterator[Step]:
        queue = list(world.queue)
        queue.remove(message)
        taken = world._replace(queue=tuple(queue))
        yield self._start(taken, message)
        if may_fail and not self.setup.late:
            lost = taken.fault(f"lost:{message.call}")
            yield f"worker killed with {message.delivery} before its start", lost

    def _start(self, world: World, message: Message) -> Step:
        holder = self._free_holder(world)
        answer, store = self.memory.start(world.store, message, holder)
        world = world._replace(store=store)
        if not isinstance(answer, tuple):
            answer = self.heeded(answer)
            why = getattr(answer, "why", "")
            worker = Worker(message, "aside", aside=answer)
            said = f"{message.delivery} is to step aside: {type(answer).__name__} {why}".rstrip()
            return said, world._replace(workers=_sorted((*world.workers, worker)))
        self._check_grant(world, message)
        seq, args = answer
        worker = Worker(message, "looking", holder, args, seq)
        if not message.answer_from:
            return f"{message.delivery} starts as {holder}", self._enter(world, worker)
        return f"{message.delivery} is granted as {holder}", world._replace(
            workers=_sorted((*world.workers, worker))
        )

    def heeded(self, aside: Aside) -> Aside:
        """What is made of the guard's answer."""
        return aside

    def _free_holder(self, world: World) -> str:
        taken = {worker.holder for worker in world.workers} | set(self.memory.holders(world.store))
        return next(name for name in ("h1", "h2", "h3", "h4", "h5") if name not in taken)

    def _enter(self, world: World, worker: Worker) -> World:
        """The body begins, and STARTED is stored."""
        self._check_entry(world, worker)
        call = worker.message.call
        made = tuple(number for number, each in enumerate(world.calls, 1) if each.phase != "new")
        worker = worker._replace(phase="body", serves=made)
        return self._started(world._replace(workers=_sorted((*world.workers, worker))), call)

    def _started(self, world: World, call: int) -> World:
        result = world.calls[call - 1].result
        if result in FINAL and not self._may_run_again(world, call):
            raise ViolationError(f"result of call {call} goes from {result} back to started")
        return world.call(call, result="started")

    def _check_grant(self, world: World, message: Message) -> None:
        if message.delivery in world.settled:
            raise ViolationError(f"{message.delivery} runs again after it was settled")
        if not self._returns(message) or world.happened("mark lapsed"):
            return
        if any(w.message.delivery == message.delivery and w.phase in ENDING for w in world.workers):
            raise ViolationError(f"{message.delivery} runs again while its result is on its way out")

    def _check_entry(self, world: World, worker: Worker) -> None:
        message = worker.message
        for other in world.workers:
            twin = other.message.delivery == message.delivery and self._returns(message)
            if other.phase in BODY and (self.span.needs_r or twin) and not (worker.lapsed or other.lapsed):
                raise ViolationError(f"two bodies at a time: {other.message.delivery} and {message.delivery}")
        if self.span.ordered and worker.args < world.last and message.call not in self.setup.awaited:
            raise ViolationError(f"call {worker.args} runs after call {world.last}")

    @staticmethod
    def _may_run_again(world: World, call: int) -> bool:
        """The documented repeats.

        Killed or frozen between result and settle, or between the publish of a retry and settle (E8).  A call that was
        skipped leaves no tombstone, so it runs when its message comes again (E8a).  Two copies of a deferred message
        that is acknowledged early: one fails because the broker is away, the other runs.
        """
        faults = (f"{what}:{call}" for what in ("killed stored", "killed retried", "lapsed", "mark lapsed"))
        again = world.happened(f"delivered again:{call}")
        skipped = world.calls[call - 1].result == "revoked" and (
            again or world.happened(f"killed over:{call}")
        )
        return world.happened(*faults) or skipped or (again and world.happened(f"lost:{call}"))

    def _returns(self, message: Message) -> bool:
        return self.memory.execution(message).redelivery_possible

    # --- a worker goes on -----------------------------------------------------------------------------------

    def _work(self, world: World, index: int, worker: Worker, may_fail: bool) -> Iterator[Step]:
        if worker.phase == "aside":
            yield from self._step_aside(world, index, worker, may_fail)
        elif worker.phase == "body":
            yield from self._body(world, index, worker, may_fail)
        elif worker.phase == "retrying":
            yield from self._retry(world, index, worker, may_fail)
        else:
            yield self._next(world, index, worker)
        if may_fail:
            yield from self._faults(world, index, worker)

    def _next(self, world: World, index: int, worker: Worker) -> Step:
        """Where there is only one way to go on."""
        delivery = worker.message.delivery
        match worker.phase:
            case "looking":
                return self._look(world, index, worker)
            case "retried":
                return f"{delivery} ends: retry", self._end(world, index, worker, "retry")
            case "rejecting":
                return f"{delivery} ends: rejected", self._reject(world, index, worker)
            case "ended":
                return f"callbacks of {delivery} are published", self._call_back(world, index, worker)
            case "called":
                return f"result of {delivery} is stored: {worker.how}", self._store(world, index, worker)
            case "stored":
                return f"{delivery} is settled", self._settle(world, index, worker)
        return f"{delivery} is acknowledged", world.worker(index, None)

    def _look(self, world: World, index: int, worker: Worker) -> Step:
        """An awaited duplicate is answered from its holder's success, else it runs (E12a)."""
        message = worker.message
        if world.calls[message.answer_from - 1].result == "success":
            return f"{message.delivery} is answered from its holder", self._end(
                world, index, worker, "success"
            )
        return f"{message.delivery} finds no answer and runs", self._enter(world.worker(index, None), worker)

    def _body(self, world: World, index: int, worker: Worker, may_fail: bool) -> Iterator[Step]:
        message = worker.message
        yield f"{message.delivery} ends", self._end(world, index, worker, "success")
        if message.call in self.setup.failing:
            yield f"{message.delivery} ends: failure", self._end(world, index, worker, "failure")
        if message.call in self.setup.retried and message.retries == 0:
            yield f"{message.delivery} asks for a retry: q for it", self._ask_for_retry(world, index, worker)
        if may_fail:
            yield f"{message.delivery} is given back by its body", self._requeue(world, index, worker)
            yield f"cold shutdown in the body of {message.delivery}", self._exit(world, index, worker)

    # --- retry ----------------------------------------------------------------------------------------------

    def _ask_for_retry(self, world: World, index: int, worker: Worker) -> World:
        world, retry = self._minted(world, worker)
        seq, store = self.memory.succeed(world.store, self._as_run(worker), retry.delivery)
        worker = worker._replace(phase="retrying", retry=retry._replace(seq=seq))
        return world._replace(store=store).worker(index, worker)

    @staticmethod
    def _as_run(worker: Worker) -> Message:
        """What the request says while the body runs: the kept call, if that was taken over (E13b)."""
        message = worker.message
        same = worker.args == message.args
        return message if same else message._replace(args=worker.args, seq=worker.seq)

    def _minted(self, world: World, worker: Worker) -> tuple[World, Message]:
        message = self._as_run(worker)
        minted = world.calls[message.call - 1].minted + 1
        delivery = f"{message.call}.{minted}"
        retry = message._replace(delivery=delivery, retries=1, redelivered=False, deferred=False)
        return world.call(message.call, minted=minted), retry

    def _retry(self, world: World, index: int, worker: Worker, may_fail: bool) -> Iterator[Step]:
        assert worker.retry is not None
        retried = world.put(worker.retry).worker(index, worker._replace(phase="retried", retry=None))
        yield f"{worker.retry.delivery} is published", retried
        if may_fail:
            failed = world.worker(index, worker._replace(phase="rejecting"))
            yield (
                f"{worker.retry.delivery}: publish fails",
                failed.fault(f"retry unpublished:{worker.message.call}"),
            )

    def _reject(self, world: World, index: int, worker: Worker) -> World:
        """Celery rejects a message whose retry it could not publish, and stores no result."""
        assert worker.retry is not None
        store = self.memory.take_back(world.store, worker.retry.delivery, worker.retry.seq)
        return self._end(world._replace(store=store), index, worker._replace(retry=None), "rejected")

    # --- the end of a body ----------------------------------------------------------------------------------

    def _end(self, world: World, index: int, worker: Worker, how: str) -> World:
        store = self.memory.end(world.store, worker.message, worker.holder, how)
        world = world._replace(store=store)
        if how in ("success", "failure") and worker.phase == "body":
            world = self._served(world, worker)
        tail = how == "success" and worker.message.call in self.setup.awaited
        phase = "ended" if tail else "called"
        return world.worker(index, Worker(worker.message, phase, seq=worker.seq, how=how))

    def _served(self, world: World, worker: Worker) -> World:
        """Whose work has been done: of calls that were made before it began; before it ended where r refuses calls."""
        for number, call in enumerate(world.calls, 1):
            counts = number in worker.serves or (self.span.refused_by_r and call.phase != "new")
            if counts and (not self.span.ordered or number <= worker.args):
                world = world.call(number, served=True)
        return world._replace(last=max(world.last, worker.args))

    def _call_back(self, world: World, index: int, worker: Worker) -> World:
        call = worker.message.call
        return world.call(call, tail=True).worker(index, worker._replace(phase="called"))

    def _store(self, world: World, index: int, worker: Worker) -> World:
        # Celery stores RETRY over the result of a retry that was quicker; that nobody waits for long is up to its countdown.
        late = worker.how == "retry" and world.calls[worker.message.call - 1].result in FINAL
        if worker.how != "rejected" and not late:
            world = world.call(worker.message.call, result=worker.how)
        if self._settles(worker):
            return world.worker(index, worker._replace(phase="stored"))
        return self._finished(world, index, worker)

    def _settles(self, worker: Worker) -> bool:
        return self._returns(worker.message) or (self.span.keeps_last and worker.seq > 0)

    def _settle(self, world: World, index: int, worker: Worker) -> World:
        if not self.is_over(worker.how):
            return self._finished(world, index, worker)
        seq = worker.seq if self.span.keeps_last and worker.how != "retry" else 0
        world = world._replace(store=self.memory.settle(world.store, worker.message, seq))
        if self._returns(worker.message):
            world = world._replace(settled=tuple(sorted({*world.settled, worker.message.delivery})))
        return self._finished(world, index, worker)

    def is_over(self, how: str) -> bool:
        return _is_over(how.upper() or None, None)

    def _finished(self, world: World, index: int, worker: Worker) -> World:
        return world.worker(index, Worker(worker.message, "over") if self.setup.late else None)

    def _requeue(self, world: World, index: int, worker: Worker) -> World:
        """``Reject(requeue=True)``: no state, no settle, the message comes again."""
        world = world._replace(store=self.memory.end(world.store, worker.message, worker.holder, "requeue"))
        world = world.put(worker.message._replace(redelivered=True)).worker(index, None)
        return world.fault(f"requeued:{worker.message.call}")

    def _exit(self, world: World, index: int, worker: Worker) -> World:
        """SystemExit in the body: it ends without a state, and the message is given back."""
        world = world._replace(store=self.memory.end(world.store, worker.message, worker.holder, "cold"))
        if self.is_over(""):
            world = self._settle(world, index, worker)
        return self._give_back(world.worker(index, None), worker.message, "cold")

    # --- aside ----------------------------------------------------------------------------------------------

    def _step_aside(self, world: World, index: int, worker: Worker, may_fail: bool) -> Iterator[Step]:
        aside, message = worker.aside, worker.message
        if isinstance(aside, Defer):
            yield from self._defer(world, index, worker, aside, may_fail)
        elif isinstance(aside, Drop):
            yield f"{message.delivery} is dropped", self._acknowledged(world, index, worker)
        elif isinstance(aside, Skip):
            skipped = self._revoked(world, message, aside.by)
            yield f"{message.delivery} is skipped", self._acknowledged(skipped, index, worker)
        elif isinstance(aside, Superseded):
            over = (
                self.memory.execution(message).seen_before and world.calls[message.call - 1].result in FINAL
            )
            after = world if over else self._revoked(world, message, aside.by)
            yield f"{message.delivery} is superseded", self._acknowledged(after, index, worker)
        else:
            raise TypeError(aside)

    def _revoked(self, world: World, message: Message, by: str) -> World:
        call = world.calls[message.call - 1]
        if call.result in ("success", "failure") and not world.happened(f"delivered again:{message.call}"):
            raise ViolationError(f"result of call {message.call} goes from {call.result} to revoked")
        return world.call(message.call, result="revoked", by=call_of(by))

    def _acknowledged(self, world: World, index: int, worker: Worker) -> World:
        return world.worker(index, Worker(worker.message, "over") if self.setup.late else None)

    def _defer(
        self, world: World, index: int, worker: Worker, aside: Defer, may_fail: bool
    ) -> Iterator[Step]:
        message = worker.message
        answer_from = call_of(aside.answer_from) if aside.answer_from else message.answer_from
        copy = message._replace(deferred=True, redelivered=False, answer_from=answer_from)
        deferred = world._replace(store=self.memory.defer(world.store, message.delivery))
        yield f"{message.delivery} is deferred", self._acknowledged(deferred.put(copy), index, worker)
        if may_fail:
            failed = self._give_back(deferred.worker(index, None), message, "deferral unpublished")
            if not self.setup.late:
                failed = failed.call(message.call, result="failure")
            yield f"{message.delivery}: publish of its deferral fails", failed

    # --- faults ---------------------------------------------------------------------------------------------

    def _faults(self, world: World, index: int, worker: Worker) -> Iterator[Step]:
        message, phase = worker.message, worker.phase
        if worker.how == "retry" and phase != "over":
            phase = "retried"
        killed = self._give_back(world.worker(index, None), message, f"killed {phase}")
        yield f"worker killed with {message.delivery} ({phase})", killed
        if self.setup.late and not message.redelivered and not world.happened("delivered again"):
            yield f"broker delivers {message.delivery} again ({phase})", self._again(world, message)
        if phase in RUNNING and (name := self.memory.holders(world.store).get(worker.holder)):
            lapsed = world._replace(store=self.memory.without(world.store, name)).fault(
                f"lapsed:{message.call}"
            )
            yield (
                f"{worker.holder} is frozen, its lease lapses",
                lapsed.worker(index, worker._replace(lapsed=True)),
            )
        if worker.phase in ENDING and any(
            name == message.delivery for name, _ in self.memory.notes(world.store, "ending")
        ):
            lapsed = world._replace(store=self.memory.without(world.store, ("ending", message.delivery)))
            yield (
                f"{message.delivery} is frozen, its mark lapses",
                lapsed.fault(f"mark lapsed:{message.call}"),
            )

    # --- time -----------------------------------------------------------------------------------------------

    def _lapses(self, world: World, may_fail: bool) -> Iterator[Step]:
        running = {worker.holder for worker in world.workers if worker.phase in RUNNING}
        for holder, name in self.memory.holders(world.store).items():
            if holder not in running:
                yield (
                    f"lease of {holder} lapses",
                    world._replace(store=self.memory.without(world.store, name)),
                )
        ending = {worker.message.delivery for worker in world.workers if worker.phase in ENDING}
        for delivery, _ in self.memory.notes(world.store, "ending"):
            if delivery not in ending:
                store = self.memory.without(world.store, ("ending", delivery))
                yield f"ending mark of {delivery} lapses", world._replace(store=store)
        delivery, call = self.memory.queued(world.store)
        if delivery:
            yield from self._q_lapses(world, delivery, call, may_fail)
        if delivery := self.memory.is_unconfirmed(world.store):
            yield from self._stays_unconfirmed(world, delivery, may_fail)

    def _q_lapses(self, world: World, delivery: str, call: int, may_fail: bool) -> Iterator[Step]:
        lapsed = world._replace(store=self.memory.q_lapses(world.store))
        if not self._is_alive(world, call):
            self._check_orphan(world, call)
            yield f"q of {delivery} lapses", lapsed
        elif may_fail:
            yield f"q of {delivery} lapses before its message starts", lapsed.fault(f"hold lapsed:{call}")

    def _stays_unconfirmed(self, world: World, delivery: str, may_fail: bool) -> Iterator[Step]:
        waited = world._replace(store=self.memory.unconfirmed_lapses(world.store))
        if world.calls[int(delivery) - 1].phase not in ("held", "sent", "failing"):
            yield f"{delivery} is not confirmed in time", waited
        elif may_fail:
            yield (
                f"{delivery} is not confirmed in time: its producer is slow",
                waited.fault(f"slow:{delivery}"),
            )

    @staticmethod
    def _is_alive(world: World, call: int) -> bool:
        """Whether somebody has a message of this call, or is about to."""
        messages = [*world.queue, *(worker.message for worker in world.workers if worker.phase != "over")]
        return world.calls[call - 1].phase in ("held", "failing") or any(
            each.call == call for each in messages
        )

    def _check_orphan(self, world: World, call: int) -> None:
        """A q that nobody will free blocks its key until it lapses.  Where that may be, it is documented."""
        if (
            self.span.displaces
        ):  # Refuses nobody: what a slow producer gave back may stay until it lapses (E13a).
            return
        if not world.happened(f"producer killed:{call}", f"lost:{call}"):
            raise ViolationError(f"q of call {call} is left behind and blocks the key")

    # --- at the end -----------------------------------------------------------------------------------------

    def check_end(self, world: World) -> None:
        """Nothing more will happen by itself: no call was lost, and the key is free."""
        if world.queue or world.workers:
            raise ViolationError("a message is waiting for ever")
        if self.memory.holders(world.store) or self.memory.queued(world.store)[0]:
            raise ViolationError("the key is held for ever")
        for number, call in enumerate(world.calls, 1):
            self._check_call(world, number, call)
        self._check_newest(world)

    def _check_call(self, world: World, number: int, call: Call) -> None:
        if call.phase in ("new", "error", "dead") or self._is_excused(world, number):
            return
        if call.phase in ("duplicate", "kept") or call.result == "revoked":
            # A duplicate of an awaited call that was answered from its holder has the holder's result (E12a).
            answered = call.by in self.setup.awaited and world.calls[call.by - 1].result == "success"
            if not call.served and not answered:
                raise ViolationError(
                    f"call {number} is lost: {call.phase}, and {call.by or 'nobody'} has not run for it"
                )
        elif call.result not in FINAL:
            raise ViolationError(f"call {number} is lost: its result stays {call.result or 'pending'}")
        elif call.result == "success" and number in self.setup.awaited and not call.tail:
            raise ViolationError(f"the tail of call {number} is lost")

    def _is_excused(self, world: World, number: int, *seen: int) -> bool:
        """The documented limits: lost with its worker under early ack; rejected by Celery; answered by such a one, or by
        one whose publish failed (E11).
        """
        call = world.calls[number - 1]
        if world.happened(f"retry unpublished:{number}", f"lost:{number}"):
            return True
        if call.by in (0, number, *seen):
            return False
        unpublished = world.calls[call.by - 1].phase in ("error", "dead")
        told = call.phase in ("duplicate", "kept")
        return (told and unpublished) or self._is_excused(world, call.by, number, *seen)

    def _check_newest(self, world: World) -> None:
        """Under replace and keep_last the last run has the newest arguments."""
        if not self.span.ordered:
            return
        for number in range(self.setup.calls, 0, -1):
            call = world.calls[number - 1]
            if (
                call.phase in ("error", "dead")
                or number in self.setup.awaited
                or self._is_excused(world, number)
            ):
                continue
            if world.last < number:
                raise ViolationError(f"call {number} is the newest, and the last that ran is {world.last}")
            return
