"""The tasks of the acceptance tests: one body that plays what a test tells it, under every option that matters.

A worker is started with ``-A tests.acceptance.app`` and finds its settings in the environment; a test builds the same
app for itself with :func:`build`.  Each task is registered once as it should be (``good.late``) and once for every
broken variant of ``negative`` (``plain_delete.late``), so one worker serves the tests and their negative controls.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

from celery import Celery
from celery.exceptions import Ignore, Reject

from celery_once_fenced import Once, SingletonTask, current_grant
from celery_once_fenced.policy import SPANS, STRATEGIES
from tests.acceptance.negative import VARIANTS
from tests.acceptance.redelivery import restore_every_second
from tests.acceptance.stage import Stage

SETTINGS = "ONCE_FENCED_ACCEPTANCE"
"""Environment variable: the Celery settings of a worker, as JSON."""
LEASE = 1.5
"""Seconds: long enough for a busy machine to renew it twice, short enough to wait for."""
PATIENT_LEASE = 4.0
"""Seconds: longer than the shortest visibility timeout."""
QUEUE_HOLD = 30.0
WINDOW = 1.5


# --- the body ---------------------------------------------------------------------------------------------------------


class Fatal:
    """A result that kills the process which encodes it: after the body, before the result or the next step is out."""

    def __json__(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Slow:
    """A result that takes its time to be stored: its body is over, and its key is free."""

    def __init__(self, value: str) -> None:
        self.value = value

    def __json__(self) -> str:
        time.sleep(0.6)
        return self.value


def play(self: Any, label: str, *acts: str) -> Any:
    """Run number n of a label plays act n, the last one again and again; an act is verbs separated by commas."""
    stage = Stage.of(self.app)
    number = stage.enter(label, self.request)
    value: Any = f"{label}#{number}"
    try:
        for verb in acts[min(number, len(acts)) - 1].split(",") if acts else ():
            name, _, argument = verb.strip().partition(" ")
            value = VERBS[name](self, stage, label, argument) or value
    except BaseException as error:
        stage.leave(label, type(error).__name__, self.request)
        raise
    stage.leave(label, "returned", self.request)
    return value


def _hold(self: Any, stage: Stage, label: str, name: str) -> None:
    stage.wait(label, name)


def _sleep(self: Any, stage: Stage, label: str, seconds: str) -> None:
    time.sleep(float(seconds))


def _retry(self: Any, stage: Stage, label: str, countdown: str) -> None:
    raise self.retry(countdown=float(countdown), max_retries=5)


def _retry_then_linger(self: Any, stage: Stage, label: str, seconds: str) -> None:
    """The body's own ``finally`` still runs when its retry is on its way already."""
    try:
        raise self.retry(countdown=0, max_retries=5)
    finally:
        time.sleep(float(seconds))


def _fail(self: Any, stage: Stage, label: str, _: str) -> None:
    raise ValueError(label)


def _die(self: Any, stage: Stage, label: str, _: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fatal(self: Any, stage: Stage, label: str, _: str) -> Fatal:
    return Fatal()


def _slow(self: Any, stage: Stage, label: str, _: str) -> Slow:
    return Slow(f"slow {label}")


def _ignore(self: Any, stage: Stage, label: str, _: str) -> None:
    raise Ignore


def _requeue(self: Any, stage: Stage, label: str, _: str) -> None:
    raise Reject("again", requeue=True)


def _await_loss(self: Any, stage: Stage, label: str, seconds: str) -> None:
    """Go on until the lease is lost, as a body does that asks for it."""
    deadline = time.monotonic() + float(seconds)
    while not current_grant().lost and time.monotonic() < deadline:
        time.sleep(0.02)
    stage.note(label, "lost" if current_grant().lost else "kept")


def _note_trust(self: Any, stage: Stage, label: str, _: str) -> None:
    stage.note(label, "lost" if current_grant().lost else "kept")


def _say(self: Any, stage: Stage, label: str, word: str) -> str:
    return word


def _call(self: Any, stage: Stage, label: str, name: str) -> str:
    """Call another task with the same label from inside this body."""
    return str(self.app.tasks[f"good.{name}"].delay(label).id)


def _call_itself(self: Any, stage: Stage, label: str, _: str) -> Any:
    return self(label)


VERBS: dict[str, Callable[[Any, Stage, str, str], Any]] = {
    "hold": _hold,
    "sleep": _sleep,
    "retry": _retry,
    "retry_then_linger": _retry_then_linger,
    "fail": _fail,
    "die": _die,
    "fatal": _fatal,
    "slow": _slow,
    "ignore": _ignore,
    "requeue": _requeue,
    "await_loss": _await_loss,
    "note_trust": _note_trust,
    "say": _say,
    "call": _call,
    "call_itself": _call_itself,
}


# --- the tasks --------------------------------------------------------------------------------------------------------

# With a delay: Celery may store the state RETRY after the result of a retry that was faster, and over it.
AUTORETRY = {"autoretry_for": (ValueError,), "retry_backoff": False, "default_retry_delay": 0.2}
LATE = {"acks_late": True, "reject_on_worker_lost": True}

OPTIONS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "early": ({}, {}),
    "late": ({}, LATE),
    "autoretry": ({}, AUTORETRY),
    "autoretry_late": ({}, {**LATE, **AUTORETRY}),
    "patient": ({"lease": PATIENT_LEASE}, LATE),
    "tracked": ({}, {**LATE, "track_started": True}),
    "serial": ({"unique": "while_executing"}, {"max_retries": 0}),
    "late_serial": ({"unique": "while_executing"}, LATE),
    "until_executing": ({"unique": "until_executing"}, {}),
    "until_executing_late": ({"unique": "until_executing"}, LATE),
    "until_expired": ({"unique": "until_expired", "window": WINDOW}, {}),
    "one_and_one": ({"unique": "until_and_while_executing"}, {}),
    "replaces": ({"on_duplicate": "replace"}, {}),
    "keeps_last": ({"on_duplicate": "keep_last"}, {}),
    "keeps_last_late": ({"on_duplicate": "keep_last"}, LATE),
    "short_line": ({"unique": "while_executing", "max_deferred": 2}, {}),
    "dropped_line": ({"unique": "while_executing", "max_deferred": 2, "on_overflow": "drop"}, {}),
    "long_line": ({"unique": "while_executing", "on_overflow": "drop"}, {}),
    "defers": ({"on_conflict": "defer"}, {}),
    "raises": ({"on_duplicate": "raise", "on_conflict": "raise"}, {}),
    "strict": ({"on_store_error": "raise"}, {}),
    "unrenewed": ({"max_hold": LEASE}, {}),
    "brief_hold": ({"queue_hold": 0.5}, {}),
    "all_arguments": ({"key": None}, {}),
    "no_key": ({"key": lambda arguments: None}, {}),
}
"""Options of ``Once`` and of the task, by name."""
CROSS = [
    (unique, on_duplicate)
    for unique, on_duplicate in product(SPANS, STRATEGIES)
    if (unique == "while_executing") <= (on_duplicate == "return_existing")
    and (on_duplicate == "keep_last") <= (unique == "until_and_while_executing")
]
"""Every span with every strategy that it allows (E20)."""
CROSSED = {
    f"{unique} {on_duplicate}": {
        "unique": unique,
        "on_duplicate": on_duplicate,
        **({"window": QUEUE_HOLD} if unique == "until_expired" else {}),
    }
    for unique, on_duplicate in CROSS
}


def build(settings: Mapping[str, Any]) -> Celery:
    """The app with these Celery settings."""
    app = Celery("acceptance", set_as_current=False)
    app.conf.update(settings)
    for variant, (base, names) in {"good": (SingletonTask, OPTIONS), **VARIANTS}.items():
        for name in names:
            _register(app, f"{variant}.{name}", base, *OPTIONS[name])
    for name, once in CROSSED.items():
        _register(app, f"good.{name}", SingletonTask, once, {})
    _register_others(app)
    return app


def _register(
    app: Celery, name: str, base: type[Any], once: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    given = {"key": "{label}", "lease": LEASE, "queue_hold": QUEUE_HOLD, **once}
    guarded = {"once": Once(**given)} if issubclass(base, SingletonTask) else {}
    app.task(bind=True, shared=False, base=base, name=name, **guarded, **options)(play)


def _register_others(app: Celery) -> None:
    class NeverEntered(SingletonTask):
        abstract = True

        def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
            raise RuntimeError("not today")

    once = {"once": Once(key="{label}", lease=LEASE)}
    app.task(bind=True, shared=False, base=NeverEntered, name="good.never_entered", **once)(play)
    app.task(shared=False, base=SingletonTask, name="good.add", once=Once(lease=LEASE))(add)
    app.task(shared=False, base=SingletonTask, name="good.typed", once=Once(lease=LEASE))(typed)
    app.task(shared=False, base=SingletonTask, name="good.single", once=Once(key="{label}", lease=LEASE))(
        single
    )
    app.task(shared=False, name="unguarded.collect")(collect)
    app.task(bind=True, shared=False, name="unguarded.replaced")(replaced)


def add(a: int, b: int = 2) -> int:
    return a + b


def typed(label: str, value: Any) -> str:
    """For arguments of every kind that a message can hold."""
    stage = Stage.of(typed_app())
    number = stage.enter(label)
    stage.wait(label)
    stage.leave(label, "returned")
    return f"{label}#{number}"


def single(label: str) -> str:
    """With one argument, so that Celery publishes it as an error callback; with more it would call the body."""
    return typed(label, None)


def replaced(self: Any, by: Any) -> None:
    """Replaced by another signature."""
    raise self.replace(self.app.signature(by))


def typed_app() -> Any:
    from celery import current_app

    return current_app._get_current_object()


def collect(results: Sequence[Any], label: str) -> list[Any]:
    """The body of a chord."""
    stage = Stage.of(typed_app())
    stage.enter(label)
    stage.leave(label, "returned")
    return list(results)


def __getattr__(name: str) -> Any:
    if name == "app":  # what `celery -A` asks for; a test process never does
        restore_every_second()
        globals()["app"] = app = build(json.loads(os.environ[SETTINGS]))
        return app
    raise AttributeError(name)
