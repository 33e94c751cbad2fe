"""The app of the tests with two databases: a body that writes to the one it is told.

A worker is started with ``-A tests.acceptance.two_databases_app``; fence and ledger are in the alias ``second``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from celery import Celery

from celery_once_fenced import FencedTask, Once
from example_project.servers import POSTGRES_VARIABLE, REDIS_VARIABLE
from tests.acceptance.app import SETTINGS
from tests.acceptance.correctness_orders import Orders, watch
from tests.acceptance.shop_app import LEASE, POSTGRES
from tests.acceptance.stage import SETTING, Stage

SECOND = "acceptance_second_postgres"
"""Setting: address of the database that fence and ledger are in."""


def write(self: Any, label: str, alias: str) -> str:
    from django.db import connections

    Stage.of(self.app).enter(label, self.request)
    with connections[alias].cursor() as cursor:
        cursor.execute("insert into writes (resource) values (%s)", (label,))
    Orders.of(self.app).carry_out(label, "written")
    return alias


def build(settings: Mapping[str, Any]) -> Celery:
    """The app with these Celery settings."""
    app = Celery("acceptance", set_as_current=False)
    app.conf.update(settings)
    once = Once(key="{label}", replay_for="1h", lease=LEASE)
    app.task(bind=True, base=FencedTask, name="good.write", once=once, shared=False)(write)
    return app


def of_worker() -> Celery:
    """The app in a worker process."""
    import django

    settings = json.loads(os.environ[SETTINGS])
    os.environ |= {
        "DJANGO_SETTINGS_MODULE": "tests.acceptance.two_databases_settings",
        POSTGRES_VARIABLE: settings[POSTGRES],
        "SECOND_POSTGRES_URL": settings[SECOND],
        REDIS_VARIABLE: settings[SETTING]["url"],
    }
    django.setup()
    app = build(settings)
    watch(app)
    return app


def __getattr__(name: str) -> Any:
    if name == "app":  # what `celery -A` asks for; a test process never does
        globals()["app"] = app = of_worker()
        return app
    raise AttributeError(name)
