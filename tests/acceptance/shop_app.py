"""The app of the correctness tier's acceptance tests: postings in the example shop, and places to stop at.

A worker is started with ``-A tests.acceptance.shop_app`` and finds its settings in the environment; a test builds the
same app for itself with :func:`build`.  As in ``app``, each task is registered once as it should be (``good.post``) and
once for every broken variant of ``correctness_negative``.  Where to stop: see ``correctness_orders``.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from typing import Any

import psycopg
from celery import Celery

from celery_once_fenced import FencedTask, Once
from example_project.servers import POSTGRES_VARIABLE, REDIS_VARIABLE
from tests.acceptance.app import SETTINGS
from tests.acceptance.correctness_orders import Orders, watch
from tests.acceptance.redelivery import restore_every_second
from tests.acceptance.stage import SETTING, Stage

POSTGRES = "acceptance_postgres"
"""Setting: address of the database, for Django and the plugin."""
LEASE = 1.5
"""Seconds: long enough for a busy machine to renew it twice, short enough to wait for."""
AMOUNT = 10


class DeclinedError(Exception):
    """An error that ends a key."""


# --- the body ---------------------------------------------------------------------------------------------------------


def post(self: Any, label: str, account: int, *acts: str) -> Any:
    """Run number n of a label plays act n, the last one again and again; without acts it makes the posting."""
    stage = Stage.of(self.app)
    number = stage.enter(label, self.request)
    value: Any = None
    for verb in (acts[min(number, len(acts)) - 1] if acts else "post").split(","):
        name, _, argument = verb.strip().partition(" ")
        value = VERBS[name](self, label, account, argument) or value
    return value


def post_in_atomic(self: Any, label: str, account: int, *acts: str) -> Any:
    """The same for tasks that no one opens a transaction for."""
    from django.db import transaction

    with transaction.atomic():
        value = post(self, label, account, *acts)
        Orders.of(self.app).carry_out(label, "completed")
    return value


def _post(self: Any, label: str, account: int, _: str) -> int:
    from example_project.shop.tasks import post_entry

    orders = Orders.of(self.app)
    orders.carry_out(label, "begun")
    balance: int = post_entry.run(int(label, 16), account, AMOUNT)
    orders.carry_out(label, "written")
    return balance


def _overwrite(self: Any, label: str, account: int, _: str) -> int:
    """Read the balance, think, write it back: the write that only a fence protects."""
    from example_project.shop.models import Account

    balance = Account.objects.get(pk=account).balance - AMOUNT
    Orders.of(self.app).carry_out(label, "begun")
    Account.objects.filter(pk=account).update(balance=balance)
    return balance


def _look(self: Any, label: str, account: int, _: str) -> int:
    """One more statement: the one at which a body learns that its session is gone."""
    from example_project.shop.models import Account

    return Account.objects.get(pk=account).balance


def _hold(self: Any, label: str, account: int, name: str) -> None:
    Stage.of(self.app).wait(label, name)


def _sleep(self: Any, label: str, account: int, seconds: str) -> None:
    time.sleep(float(seconds))


def _die(self: Any, label: str, account: int, _: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fail(self: Any, label: str, account: int, _: str) -> None:
    raise ValueError(label)


def _decline(self: Any, label: str, account: int, _: str) -> None:
    raise DeclinedError(label)


def _retry(self: Any, label: str, account: int, countdown: str) -> None:
    raise self.retry(countdown=float(countdown or 0), max_retries=5)


def _disconnect(self: Any, label: str, account: int, _: str) -> None:
    """An administrator ends this body's session, which learns of it at its next statement."""
    from django.db import connection

    pid = connection.connection.info.backend_pid
    with psycopg.connect(self.app.conf[POSTGRES], autocommit=True) as other:
        other.execute("select pg_terminate_backend(%s, 5000)", (pid,))
    connection.cursor().execute("select 1")


def _idle(self: Any, label: str, account: int, _: str) -> None:
    """The server ends a session that is idle in its transaction."""
    from django.db import connection

    connection.cursor().execute("set local idle_in_transaction_session_timeout = '50ms'")
    time.sleep(0.2)
    connection.cursor().execute("select 1")


def _hook(self: Any, label: str, account: int, _: str) -> None:
    from django.db import transaction

    def raising() -> None:
        raise RuntimeError("a hook that fails")

    transaction.on_commit(raising)


def _follow(self: Any, label: str, account: int, follower: str) -> None:
    """Make another posting when this body commits."""
    self.app.tasks["good.post"].delay_on_commit(follower, account)


def _commit(self: Any, label: str, account: int, _: str) -> None:
    from django.db import connection

    connection.connection.commit()


VERBS: Mapping[str, Callable[[Any, str, int, str], Any]] = {
    "post": _post,
    "overwrite": _overwrite,
    "look": _look,
    "hold": _hold,
    "sleep": _sleep,
    "die": _die,
    "fail": _fail,
    "decline": _decline,
    "retry": _retry,
    "disconnect": _disconnect,
    "idle": _idle,
    "hook": _hook,
    "follow": _follow,
    "commit": _commit,
}

RESULTS: Mapping[str, Callable[[], Any]] = {
    "zero": lambda: 0,
    "text": lambda: "",
    "list": list,
    "dict": dict,
    "false": lambda: False,
    "none": lambda: None,
    "nan": lambda: float("nan"),
    "nul": lambda: "a\0b",
    "surrogate": lambda: "\ud800",
    "decimal": lambda: Decimal("1.10"),
    "large": lambda: "x" * 70_000,
    "object": object,
}
"""What a body may return, by name."""


def give(self: Any, label: str, account: int, name: str) -> Any:
    """Make a posting and return a result of a strange kind."""
    post(self, label, account)
    return RESULTS[name]()


# --- the tasks --------------------------------------------------------------------------------------------------------

BODIES: Mapping[str, Callable[..., Any]] = {"give": give}

OPTIONS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "post": ({}, {}),
    "give": ({}, {}),
    "each": ({"replay_for": 0}, {}),
    "own": ({"resource": None}, {}),
    "replaces": ({"replay_for": 0, "on_duplicate": "replace"}, {}),
    "keeps_last": ({"replay_for": 0, "resource": None, "on_duplicate": "keep_last"}, {}),
    "loose": ({"fingerprint": ()}, {}),
    "strict": ({"on_duplicate": "raise", "on_conflict": "raise"}, {}),
    "patient": ({"lease": 5 * LEASE}, {}),
    "unrenewed": ({"lease": LEASE / 3, "max_hold": LEASE / 3}, {}),
    "final": ({"final_errors": (DeclinedError,)}, {}),
    "thrice": ({"max_attempts": 2}, {}),
    "autoretry": ({}, {"autoretry_for": (Exception,), "retry_backoff": False, "default_retry_delay": 0}),
}
"""Options of ``Once`` and of the task, by name."""


def build(settings: Mapping[str, Any]) -> Celery:
    """The app with these Celery settings."""
    from tests.acceptance import correctness_negative as negative

    app = Celery("acceptance", set_as_current=False)
    app.conf.update(settings)
    app.conf.ONCE = negative.plain_lock(app.conf.once_fenced["redis_url"])
    add = partial(app.task, shared=False)  # or every app of this process would get them too
    for variant, (base, names) in {"good": (FencedTask, tuple(OPTIONS)), **negative.BASES}.items():
        for name in names:
            once, options = OPTIONS[name]
            given = Once(
                **{
                    "key": "{label}",
                    "resource": "account:{account}",
                    "replay_for": "1h",
                    "lease": LEASE,
                    **once,
                }
            )
            add(bind=True, base=base, name=f"{variant}.{name}", once=given, **options)(BODIES.get(name, post))
    negative.register_unfenced(add)
    add(name="unguarded.collect")(collect)
    return app


def collect(results: Any, label: str) -> Any:
    """A tail: the body of a chord, or the last step of a chain."""
    from celery import current_app

    Stage.of(current_app._get_current_object()).enter(label)
    return results


def of_worker() -> Celery:
    """The app in a worker process, whose Django project is the shop."""
    import django

    settings = json.loads(os.environ[SETTINGS])
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.acceptance.correctness_settings"
    os.environ[POSTGRES_VARIABLE], os.environ[REDIS_VARIABLE] = settings[POSTGRES], settings[SETTING]["url"]
    django.setup()
    restore_every_second()
    app = build(settings)
    watch(app)
    return app


def __getattr__(name: str) -> Any:
    if name == "app":  # what `celery -A` asks for; a test process never does
        globals()["app"] = app = of_worker()
        return app
    raise AttributeError(name)
