"""All endings at once: workers of every pool, a call for each ending, what is done to them, and what is seen."""

from __future__ import annotations

import math
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from unittest import mock

import celery_once.backends.redis
from celery import Celery

from tests.acceptance.endings import GEVENT, PREFORK, SOLO, THREADS, Ending, cases
from tests.acceptance.endings_app import NOTES, QUEUE_HOLD, SHORT, build
from tests.acceptance.workers import PARKED, Site, Worker, eventually
from tests.fixtures.proxy import TcpProxy

HEIR_PATIENCE = 2.0
"""Seconds: the visibility timeout of the worker that comes when all others have ended theirs."""
SOFT_SECONDS = 1.0
SLACK = 2.5
"""Seconds beyond one lease: for a pool to see its child dead, and a busy machine."""
PATIENCE = 60.0
"""Seconds in which everything that is to come has come."""
GUARDED = "guarded"
PLAIN = "plain"
"""The variant with a lock that a hook frees."""
UNDISTURBED = ("shared", "recycled", "exits")
"""Places where the endings come by themselves or by a command."""
ENDED = ("warm", "soft", "cold", "crashed", "orphaned")
"""Places whose worker is ended."""
LEFT = ("cut", "soft", "cold", "crashed")
"""Places whose messages another worker takes over."""
CONCURRENCY = 10
MOST_STARTING = 5
"""Workers that start at the same time; more would not be ready in time on a small machine."""
NOTICED = "Connection to broker lost"
"""In the log of a worker that has lost its broker."""


class EndingSite(Site):
    """A site whose workers run the tasks of the endings."""

    @cached_property
    def app(self) -> Celery:
        return build(self.settings)

    def through(self, **changes: Any) -> EndingSite:
        return EndingSite(super().through(**changes).settings)

    def start(self, **options: Any) -> Worker:
        return super().start(**{"app": "tests.acceptance.endings_app", **options})


@dataclass
class Case:
    """One call that is to end in one way, in one pool; guarded, under a broken guard, or under the plain lock."""

    site: EndingSite
    ending: Ending
    pool: str
    variant: str = GUARDED
    label: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    result: Any = None
    touched: float = 0.0
    """When it was called, or something was done to it, on the monotonic clock."""
    over: bool = False
    """Whether all has come that was to come, or was not to."""
    overdue: bool = False
    """Whether the key was held when it had to be free."""
    told: str = ""
    """What another call was told while the worker was ending."""

    @property
    def name(self) -> str:
        return f"{self.ending.name} [{self.pool}]"

    @property
    def queue(self) -> str:
        """The queue of its worker; one of the solo pool has time for one body only."""
        alone = f".{self.ending.task}" if self.pool == SOLO and self.ending.place == "crashed" else ""
        return f"{self.pool}.{self.ending.place}{alone}"

    @property
    def task(self) -> Any:
        first = self.ending.hold if self.variant == GUARDED else self.variant
        return self.site.app.tasks[f"{first}.{self.ending.task}"]

    # --- what is done -------------------------------------------------------------------------------------------------

    def call(self, queue: str = "") -> None:
        link, errback = (
            self.site.app.signature(name, (self.label,), immutable=True) for name in ("linked", "errored")
        )
        if self.ending.by == "broken_link":
            link.set(serializer="there is none")
        options = {"queue": queue or self.queue, "link": link, "link_error": errback, **self.ending.call}
        self.touch()
        self.result = self.task.apply_async((self.label, *self.ending.acts), **options)

    def call_parked(self) -> dict[str, Any]:
        """Make the call and catch its message before a worker sees it."""
        self.call(queue=PARKED)
        return self.site.caught()

    def call_again(self) -> str:
        """Another call with this key, which no worker runs and which holds nothing; answers what it was told."""
        return str(self.task.apply_async((self.label,), queue=PARKED, expires=0.001).outcome.status)

    def let_go(self) -> None:
        self.site.stage.release(self.label)

    def touch(self) -> None:
        self.touched = time.monotonic()

    # --- what is seen -------------------------------------------------------------------------------------------------

    def has_run(self, times: int = 1) -> None:
        eventually(lambda: self.runs >= times, PATIENCE, what=f"run {times} of {self.name}")

    @property
    def runs(self) -> int:
        return self.site.stage.runs(self.label)

    @property
    def callbacks(self) -> set[str]:
        return {"linked", "errored"} & set(self.site.stage.events(self.label))

    @property
    def state(self) -> str:
        return str(self.site.app.AsyncResult(self.result.id).state)

    @property
    def held(self) -> bool:
        if self.variant == PLAIN:
            return bool(self.site.redis.exists(self.task.get_key((self.label,), {})))
        if self.ending.free == "asked":
            return self.call_again() != "enqueued"
        return bool(self.site.holds(self.task, self.label))

    def look(self) -> None:
        """Note whether all has come that is to come, and whether the key was free in time."""
        ending = self.ending
        if self.held:
            self.overdue = time.monotonic() > self.free_by
            self.over = self.overdue
        else:
            seen = (self.runs, self.state, self.callbacks)
            self.over = seen == (ending.runs, ending.state, set(ending.callbacks))

    @property
    def free_by(self) -> float:
        """When the key has to be free, as far as that is known by now.

        Where a body's end frees it there is no more to know: left alone, it would be held for an hour.
        """
        last = max([self.touched, *(note.at for note in self.site.stage.journal(self.label))])
        if self.ending.free == "lease" and self.runs >= self.ending.runs:
            return last + SHORT + SLACK
        return last + QUEUE_HOLD + SLACK if self.ending.free == "hold" else math.inf


class Scene:
    """The workers, and every case."""

    def __getitem__(self, name: tuple[str, str, str]) -> Case:
        """The case of an ending's name, a pool and a variant."""
        (case,) = [case for case in self.cases if (case.ending.name, case.pool, case.variant) == name]
        return case

    def __init__(self, site: EndingSite, redis_url: str, stack: ExitStack) -> None:
        self.site = site
        self.cases = [Case(site, ending, pool) for ending, pool in cases()]
        for ending, pool in cases():
            controls = [PLAIN] * ending.blocks + [ending.broken] * bool(ending.broken)
            self.cases += [
                Case(site, ending, pool, control) for control in controls if pool == ending.pools[0]
            ]
        self.workers: dict[str, Worker] = {}
        """By queue."""
        self.way = stack.enter_context(closing(TcpProxy(redis_url)))
        """How workers reach the broker that are to lose it."""
        self._stack = stack
        self._starting: list[Worker] = []

    def at(self, *places: str) -> list[Case]:
        return [case for case in self.cases if case.ending.place in places]

    def start(self, pool: str, *places: str, options: Sequence[str] = (), **settings: Any) -> None:
        """Start a worker that takes what is called at these places of a pool; the first one names it."""
        queues = [f"{pool}.{place}" for place in places]
        others = [NOTES] if queues[0] == f"{PREFORK}.shared" else []
        worker = self.site.through(**settings).start(
            pool=pool,
            concurrency=CONCURRENCY,
            queues=[*queues, *others],
            options=["-n", self._named(queues[0]), *options],
        )
        self._stack.callback(worker.close)
        self._starting.append(worker)
        if len(self._starting) > MOST_STARTING:
            self._starting.pop(0).ready()
        self.workers.update(dict.fromkeys(queues, worker))

    def start_heir(self) -> None:
        """Start a worker that takes over what others have left, and soon."""
        transport = {**self.site.settings["broker_transport_options"], "visibility_timeout": HEIR_PATIENCE}
        queues = [queue for queue in self.workers if queue.split(".")[1] in LEFT]
        heir = self.site.through(broker_transport_options=transport).start(queues=queues)
        self._stack.callback(heir.close)
        heir.ready()

    def _named(self, queue: str) -> str:
        return f"{queue}@{self.site.name}"

    def ready(self) -> None:
        while self._starting:
            self._starting.pop().ready()

    def control(self, pool: str, do: str, *args: Any, **options: Any) -> None:
        """A command to the shared worker of a pool; it has been obeyed when this returns."""
        command = getattr(self.site.app.control, do)
        where = [self._named(f"{pool}.shared")]
        assert command(*args, destination=where, reply=True, timeout=20, limit=1, **options), (
            f"{do}: no answer"
        )

    def is_accepted(self, case: Case) -> bool:
        """Whether the pool of the shared worker knows that a child has taken a call."""
        where = self._named(f"{case.pool}.shared")
        active = self.site.app.control.inspect(destination=[where], limit=1, timeout=20).active() or {}
        return any(request["id"] == case.result.id for request in active.get(where, ()))

    def watch(self, cases: Sequence[Case]) -> None:
        """Look until every guarded case is over, or out of time."""
        deadline = time.monotonic() + PATIENCE
        left = [case for case in cases if case.variant == GUARDED]
        while left and time.monotonic() < deadline:
            for case in left:
                case.look()
            left = [case for case in left if not case.over]
            time.sleep(0.25)


# --- the acts ---------------------------------------------------------------------------------------------------------


@contextmanager
def played(redis_url: str) -> Iterator[Scene]:
    """Everything played to its end."""
    patient = {"socket_timeout": 5}  # else a busy machine's worker leaves its keys to their leases
    site = EndingSite(Site.at(redis_url, once_fenced=patient).settings)
    # celery-once keeps the first connection of its process for ever; that of another test's server may be gone.
    with mock.patch.object(celery_once.backends.redis, "redis", None), closing(site), ExitStack() as stack:
        scene = Scene(site, redis_url, stack)
        _start_shared(scene)
        # Commands first: the solo pool obeys none while it is busy.
        for case in sorted(scene.at(*UNDISTURBED), key=lambda case: case.ending.by not in ACTIONS):
            ACTIONS.get(case.ending.by, _call)(scene, case)
        _start_doomed(scene)
        scene.watch(scene.at(*UNDISTURBED))
        _lose_the_broker(scene)
        _end_workers(scene)
        scene.watch(scene.at(*ENDED))
        yield scene


def _start_shared(scene: Scene) -> None:
    cut, commanded = {"broker_url": scene.way.url}, {"worker_enable_remote_control": True}
    scene.start(PREFORK, "shared", **commanded)
    scene.start(PREFORK, "recycled", "warm", options=["--max-tasks-per-child", "1"])
    scene.start(THREADS, "shared", "warm", **commanded)
    scene.start(SOLO, "shared", "cut", "warm", **cut, **commanded)
    scene.start(GEVENT, "shared", "cut", "warm", **cut, **commanded)
    scene.start(SOLO, "exits")
    scene.ready()


def _start_doomed(scene: Scene) -> None:
    queues = sorted({case.queue for case in scene.at("crashed", "orphaned", "cold")})
    for pool, place in (queue.split(".", 1) for queue in queues):
        scene.start(pool, place)
    for pool in (PREFORK, THREADS):
        scene.start(pool, "soft", worker_soft_shutdown_timeout=SOFT_SECONDS)
        scene.start(pool, "cut", broker_url=scene.way.url)  # which kombu 5.7 may not survive under threads
    cancelling = {"worker_cancel_long_running_tasks_on_connection_loss": True}
    scene.start(PREFORK, "cancelled", broker_url=scene.way.url, **cancelling)
    scene.ready()


def _lose_the_broker(scene: Scene) -> None:
    cases = _under_way(scene.at("cut", "cancelled"))
    scene.way.cut()
    scene.way.resume()
    for worker in {scene.workers[case.queue] for case in cases if case.pool != SOLO}:  # it is busy
        eventually(lambda worker=worker: NOTICED in worker.log(), PATIENCE, "a lost connection")
    for case in cases:
        case.touch()
        if case.ending.place == "cut":
            case.let_go()
    scene.watch(cases)


def _end_workers(scene: Scene) -> None:
    cases = _under_way(scene.at(*ENDED))
    for queue, worker in scene.workers.items():
        if (place := queue.split(".")[1]) in ENDED:
            HOW[place](worker)
    for case in cases:
        case.touch()
        case.told = case.call_again() if case.ending.place == "warm" else ""
        if case.ending.by != "kept":
            case.let_go()
    scene.start_heir()


def _under_way(cases: Sequence[Case]) -> Sequence[Case]:
    for case in cases:
        case.call()
    for case in cases:
        case.has_run()
    return cases


HOW: Mapping[str, Callable[[Worker], None]] = {
    "warm": lambda worker: worker.sigterm(),
    "soft": lambda worker: os.kill(worker.pid, signal.SIGQUIT),
    "cold": lambda worker: os.kill(worker.pid, signal.SIGQUIT),
    "crashed": lambda worker: worker.sigkill(),
    "orphaned": lambda worker: os.kill(worker.pid, signal.SIGKILL),
}
"""How a worker is ended."""


# --- what is done to one call -----------------------------------------------------------------------------------------


def _call(_: Scene, case: Case) -> None:
    case.call()


def _revoke(scene: Scene, case: Case) -> None:
    message = case.call_parked()
    scene.control(case.pool, "revoke", case.result.id)
    case.site.deliver(message, queue=case.queue)


def _revoke_at_eta(scene: Scene, case: Case) -> None:
    case.call()
    log = scene.workers[case.queue].log
    eventually(lambda: case.result.id in log(), PATIENCE, f"{case.name} at its worker")
    scene.control(case.pool, "revoke", case.result.id)


def _terminate(scene: Scene, case: Case, by: str = "SIGTERM") -> None:
    case.call()
    case.has_run()
    scene.control(case.pool, "revoke", case.result.id, terminate=True, signal=by)
    case.touch()


def _kill(scene: Scene, case: Case) -> None:
    _terminate(scene, case, "SIGKILL")


def _kill_child(scene: Scene, case: Case) -> None:
    """Once its pool knows that a child has taken the call: else the pool hands it to another one."""
    case.call()
    case.has_run()
    eventually(lambda: scene.is_accepted(case), PATIENCE, f"{case.name} known to its pool")
    os.kill(case.site.stage.journal(case.label)[-1].pid, signal.SIGKILL)
    case.touch()


def _let_expire(_: Scene, case: Case) -> None:
    message = case.call_parked()
    case.touch()
    eventually(lambda: time.monotonic() > case.touched + case.ending.call["expires"])
    case.site.deliver(message, queue=case.queue)


def _purge(_: Scene, case: Case) -> None:
    case.call(queue="doomed")
    with case.site.app.connection_for_write() as connection:
        assert connection.default_channel.queue_purge("doomed")


def _mistake(_: Scene, case: Case) -> None:
    message = case.call_parked()
    message["headers"]["task"] = "nobody.knows.it"
    case.site.deliver(message, queue=case.queue)


ACTIONS: Mapping[str, Callable[[Scene, Case], None]] = {
    "revoked": _revoke,
    "revoked_at_eta": _revoke_at_eta,
    "terminated": _terminate,
    "killed": _kill,
    "child_killed": _kill_child,
    "expired": _let_expire,
    "purged": _purge,
    "unknown": _mistake,
}
"""What is done to a call, by the name in the table; the others are just made."""
