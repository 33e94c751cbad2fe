"""The app of the tests of effects, outbox and ``atomic=False``: bodies that call a gateway, write, and send.

A worker is started with ``-A tests.acceptance.effects_app``.  Run number n of a label plays act n, the last one again
and again; an act is a list of verbs (the methods of ``Play``).  Orders of a test (``correctness_orders``) stop a run
at a point: *granted*, *started*, *calling*, *charged*, *returned*, *finished*, *completed*, *recording*; and of what it
sends, by the label of that, *publishing* and *sent*.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from celery import Celery, Task, chain, chord, group, signals

from celery_once_fenced import (
    DidNotHappen,
    FencedTask,
    Grant,
    Happened,
    Once,
    SingletonTask,
    Unknown,
    current_grant,
)
from celery_once_fenced.events import Event, subscribe
from celery_once_fenced.header import HEADER
from celery_once_fenced.runtime import runtime_of
from example_project.servers import POSTGRES_VARIABLE, REDIS_VARIABLE
from tests.acceptance.app import SETTINGS
from tests.acceptance.correctness_orders import Orders
from tests.acceptance.effects_gateway import DeclinedError, Gateway
from tests.acceptance.shop_app import AMOUNT, LEASE, POSTGRES
from tests.acceptance.stage import SETTING, Stage

SWEEP = 2.0
"""Seconds between the sweeps of a test's worker, and the age of what they publish."""
EVENT_POINTS = {
    "fence.acquired": "granted",
    "effect.started": "started",
    "effect.returned": "returned",
    "effect.finished": "finished",
    "ledger.completed": "completed",
}


class Play:
    """One run of a body."""

    def __init__(self, task: Any, label: str, account: int) -> None:
        self.task, self.label, self.account = task, label, account
        self.app = task.app
        self.block = ExitStack()

    @property
    def grant(self) -> Grant:
        return current_grant()

    def act(self, acts: tuple[str, ...]) -> Any:
        number = Stage.of(self.app).enter(self.label, self.task.request)
        value = None
        with self.block:
            for verb in acts[min(number, len(acts)) - 1].split(","):
                value = self.do(verb.strip()) or value
        return value

    def do(self, verb: str) -> Any:
        name, _, argument = verb.partition(" ")
        return getattr(self, name)(*([argument] if argument else []))

    def stop(self, point: str) -> None:
        Orders.of(self.app).carry_out(self.label, point)

    # --- verbs --------------------------------------------------------------------------------------------------------

    def charge(self, name: str = "gateway") -> Any:
        return self.grant.effect(name, self.call, failed=(DeclinedError,))

    def call(self, key: str) -> Any:
        self.stop("calling")
        receipt = Gateway.of(self.app).charge(self.label, key)
        self.stop("charged")
        return receipt

    def timeout(self) -> Any:
        return self.grant.effect("gateway", self.time_out)

    def time_out(self, key: str) -> None:
        self.call(key)
        raise TimeoutError(self.label)

    def scribble(self) -> Any:
        """Write through the body's connection while the other system is called."""
        return self.grant.effect("gateway", lambda key: self.post() or self.call(key))

    def post(self) -> int:
        from example_project.shop.tasks import post_entry

        balance: int = post_entry.run(int(self.label, 16), self.account, AMOUNT)
        return balance

    def insert(self) -> None:
        """A write where there is no Django: through the connection, or session, that the grant hands over."""
        given, row = self.grant.connection, (self.label, self.grant.token)
        execute = given.connection().exec_driver_sql if hasattr(given, "flush") else given.execute
        execute("insert into writes (resource, token) values (%s, %s)", row)

    def open(self) -> None:
        self.block.enter_context(self.grant.atomic())

    def close(self) -> None:
        self.block.close()
        self.stop("recording")

    def swallow(self, verb: str) -> None:
        with suppress(Exception):
            self.do(verb)

    def savepoint(self, verb: str) -> None:
        """Do something in a savepoint that is rolled back."""
        from django.db import transaction

        with transaction.atomic():
            self.do(verb)
            transaction.set_rollback(True)

    def send(self, what: str) -> str:
        kind, _, label = what.partition(" ")
        return self.grant.send(SENT[kind](self.app, label))

    def naive(self, label: str) -> None:
        """What a follow-up is sent with where there is no outbox."""
        from django.db import transaction

        transaction.on_commit(lambda: self.app.tasks["good.follow"].delay(label))

    def hold(self) -> None:
        Stage.of(self.app).wait(self.label)

    def fail(self) -> None:
        raise ValueError(self.label)

    def retry(self) -> None:
        raise self.task.retry(countdown=0, max_retries=5)

    def divide(self) -> None:
        """A statement that fails."""
        from django.db import connection

        connection.cursor().execute("select 1 / 0")

    def lose(self) -> None:
        """A block whose session is ended in the middle of it."""
        with self.grant.atomic():
            self.post()
            self.disconnect()

    def disconnect(self) -> None:
        """An administrator ends the session of the block, which learns of it at its next statement."""
        import psycopg
        from django.db import connection

        pid = connection.connection.info.backend_pid
        with psycopg.connect(self.app.conf[POSTGRES], autocommit=True) as other:
            other.execute("select pg_terminate_backend(%s, 5000)", (pid,))
        connection.cursor().execute("select 1")

    def check(self) -> Any:
        self.grant.check()
        return [
            self.grant.headers().get("Fencing-Token") == str(self.grant.token),
            self.grant.remaining() > 0,
        ]

    def watch(self) -> list[Any]:
        """Look after the lease until it is lost, as a long body does."""
        deadline = time.monotonic() + 20
        while not self.grant.lost and time.monotonic() < deadline:
            time.sleep(0.02)
        Stage.of(self.app).note(self.label, f"lost {self.grant.lost} {self.grant.remaining():g}")
        self.grant.check()
        return []

    def give(self, text: str) -> str:
        return text


def play(self: Any, label: str, account: int, *acts: str) -> Any:
    return Play(self, label, account).act(acts)


def naive_charge(self: Any, label: str, account: int, *acts: str) -> Any:
    """An in-progress mark that goes away by itself: whoever finds none, charges."""
    stage, gateway = Stage.of(self.app), Gateway.of(self.app)
    stage.enter(label, self.request)
    while not gateway.mark(label, LEASE):
        time.sleep(0.02)
    return Play(self, label, account).call(str(uuid.uuid4()))


# --- what is sent -----------------------------------------------------------------------------------------------------


def follow(self: Any, label: str, *_: Any) -> str:
    Stage.of(self.app).enter(label, self.request)
    return label


def _named(app: Any, name: str, label: str, **options: Any) -> Any:
    return app.signature(f"good.{name}", (label,), immutable=True, **options)


SENT: Mapping[str, Any] = {
    **{
        name: partial(lambda name, app, label: _named(app, name, label), name)
        for name in ("follow", "each", "single", "plain")
    },
    "chain": lambda app, label: chain(
        _named(app, "follow", f"{label} one"), _named(app, "single", f"{label} two"), app=app
    ),
    "group": lambda app, label: group(
        _named(app, "each", f"{label} one"), _named(app, "single", f"{label} two"), app=app
    ),
    "chord": lambda app, label: chord(
        [_named(app, "each", f"{label} one"), _named(app, "follow", f"{label} two")],
        _named(app, "plain", f"{label} tail"),
        app=app,
    ),
    "pair": lambda app, label: group(_named(app, "each", label), _named(app, "each", label), app=app),
}
"""Signatures by kind."""

# --- the tasks --------------------------------------------------------------------------------------------------------


def honest_probe(key: str) -> Any:
    from celery import current_app

    gateway = Gateway.of(current_app._get_current_object())
    return Happened({"receipt": f"found {key}"}) if gateway.knows(key) else DidNotHappen()


def unsure_probe(key: str) -> Any:
    return Unknown()


POLICIES: Mapping[str, Any] = {
    "hold": "hold",
    "rerun": "rerun",
    "fail": "fail",
    "probe": honest_probe,
    "unsure": unsure_probe,
}


def build(settings: Mapping[str, Any]) -> Celery:
    """The app with these Celery settings."""
    app = Celery("acceptance", set_as_current=False)
    app.conf.update(settings)
    add = partial(app.task, bind=True, shared=False)
    once = {"key": "{label}", "replay_for": "1h", "lease": LEASE}
    for name, policy in POLICIES.items():
        for suffix, atomic in (("", True), ("_open", False)):
            options = Once(**once, resource="account:{account}", on_unknown=policy, atomic=atomic)
            add(base=FencedTask, name=f"good.{name}{suffix}", once=options)(play)
    each = Once(**{**once, "replay_for": 0}, resource="account:{account}", atomic=False)
    add(base=FencedTask, name="good.each_open", once=each)(play)
    add(base=Task, name="naive.charge", acks_late=True, reject_on_worker_lost=True)(naive_charge)
    add(base=FencedTask, name="good.follow", once=Once(**once))(follow)
    add(base=FencedTask, name="good.each", once=Once(**{**once, "replay_for": 0}))(follow)
    add(base=SingletonTask, name="good.single", once=Once(key="{label}", lease=LEASE))(follow)
    add(base=Task, name="good.plain")(follow)
    return app


# --- in a worker ------------------------------------------------------------------------------------------------------


def watch(app: Celery) -> None:
    """Keep a journal of the plugin's events and of deliveries, and stop where a test wants it."""

    @subscribe
    def _on_event(event: Event) -> None:
        if "key" in event.fields:
            orders = Orders.of(app)
            orders.note(event)
            if event.name in EVENT_POINTS:
                orders.carry_out(str(event.fields["key"]), EVENT_POINTS[event.name])

    @signals.before_task_publish.connect(weak=False)
    def _before(body: Any = None, **_: Any) -> None:
        Orders.of(app).carry_out(str(body[0][0]), "publishing")

    @signals.after_task_publish.connect(weak=False)
    def _after(body: Any = None, headers: Any = None, **_: Any) -> None:
        if headers.get(HEADER, {}).get("packed"):  # a deferral is published, too
            Stage.of(app).note(str(body[0][0]), "sent")
            Orders.of(app).carry_out(str(body[0][0]), "sent")

    @signals.task_prerun.connect(weak=False)
    def _on_delivery(task: Any = None, args: Any = (), **_: Any) -> None:
        Stage.of(app).note(str(args[0]) if args else "", "delivered", task.request)

    @signals.task_postrun.connect(weak=False)
    def _on_end(task: Any = None, args: Any = (), state: Any = None, **_: Any) -> None:
        Stage.of(app).note(str(args[0]) if args else "", f"ended {state}", task.request)


def of_worker() -> Celery:
    """The app in a worker process; its Django project, where the settings name its database, is the shop."""
    settings = json.loads(os.environ[SETTINGS])
    if POSTGRES in settings:
        _set_up_django(settings)
    app = build(settings)
    runtime_of(app).outbox_age = SWEEP
    watch(app)
    return app


def _set_up_django(settings: Mapping[str, Any]) -> None:
    import django

    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.acceptance.correctness_settings"
    os.environ[POSTGRES_VARIABLE], os.environ[REDIS_VARIABLE] = settings[POSTGRES], settings[SETTING]["url"]
    django.setup()


def __getattr__(name: str) -> Any:
    if name == "app":  # what `celery -A` asks for; a test process never does
        globals()["app"] = app = of_worker()
        return app
    raise AttributeError(name)
