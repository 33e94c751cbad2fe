"""The app of the chaos: charges and postings under the correctness tier, and the charge under celery-once's plain lock.

Workers are started with ``-A tests.chaos.chaos_app`` and find their settings in the environment.  Every body writes a row
with its token beside the balance it changes, so that the tables alone say what was committed, and under which token.
"""

from __future__ import annotations

import json
import os
import random
import threading
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any

from celery import Celery
from celery_once import QueueOnce

from celery_once_fenced import FencedTask, Once, current_grant
from example_project.servers import POSTGRES_VARIABLE
from tests.acceptance.redelivery import restore_every_second

SETTINGS = "CHAOS_SETTINGS"
POSTGRES = "chaos_postgres"
"""Setting: address of the database."""
LEASE = 1.5
VISIBILITY_TIMEOUT = 3.0
"""Seconds."""
THINKING = 0.2
"""Seconds at most that a body stays between its two writes."""
JOURNAL = "create table chaos_write (number int, account_id bigint, amount int, token bigint)"
LOCK = {"graceful": True, "timeout": 2, "keys": ["number"]}


def charge(number: int, account: int, amount: int) -> None:
    """An external step, then a transaction."""
    from example_project.shop import gateway

    grant = current_grant()
    grant.effect("gateway", lambda key: gateway.charge(number, amount, idempotency_key=key))
    with grant.atomic():
        _write(number, account, amount, grant.token)


def post(number: int, account: int, amount: int) -> None:
    """A body that is a transaction as a whole."""
    _write(number, account, amount, current_grant().token)


def charge_under_plain_lock(number: int, account: int, amount: int) -> None:
    """``charge`` as people write it with a lock."""
    from django.db import transaction

    from example_project.shop import gateway

    gateway.charge(number, amount, idempotency_key=str(uuid.uuid4()))
    with transaction.atomic():
        _write(number, account, amount, None)


def _write(number: int, account: int, amount: int, token: int | None) -> None:
    from django.db import connection
    from django.db.models import F

    from example_project.shop.models import Account

    with connection.cursor() as cursor:
        cursor.execute("insert into chaos_write values (%s, %s, %s, %s)", (number, account, amount, token))
    threading.Event().wait(random.uniform(0, THINKING))  # what is frozen here has written and holds no lock
    Account.objects.filter(pk=account).update(balance=F("balance") - amount)


def build(settings: Mapping[str, Any]) -> Celery:
    """The app with these settings."""
    app = Celery("chaos", set_as_current=False)
    app.conf.update({**settings, "task_acks_late": True, "task_reject_on_worker_lost": True})
    app.conf.ONCE = {
        "backend": "celery_once.backends.Redis",
        "settings": {"url": app.conf.once_fenced["redis_url"], "default_timeout": 2},
    }
    add = partial(app.task, shared=False)  # or every app of this process would get them too
    once = partial(
        Once, key="{number}", resource="account:{account}", replay_for="30d", lease=LEASE, max_attempts=30
    )
    add(base=FencedTask, name="chaos.charge", once=once(atomic=False, on_unknown="rerun"))(charge)
    add(base=FencedTask, name="chaos.charge_or_hold", once=once(atomic=False, on_unknown="hold"))(charge)
    add(base=FencedTask, name="chaos.post", once=once())(post)
    add(base=QueueOnce, name="chaos.charge_under_plain_lock", once=LOCK)(charge_under_plain_lock)
    return app


def _of_worker() -> Celery:
    import django

    restore_every_second()
    settings = json.loads(os.environ[SETTINGS])
    os.environ["DJANGO_SETTINGS_MODULE"] = "example_project.settings"
    os.environ[POSTGRES_VARIABLE] = settings[POSTGRES]
    django.setup()
    return build(settings)


def __getattr__(name: str) -> Any:
    if name == "app":  # what `celery -A` asks for; a test process never does
        globals()["app"] = app = _of_worker()
        return app
    raise AttributeError(name)
