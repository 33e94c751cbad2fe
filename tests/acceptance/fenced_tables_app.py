"""The app of the tests of fenced tables: bodies that write past the plugin's transaction, or to another's rows.

A worker is started with ``-A tests.acceptance.fenced_tables_app``.  ``naive`` tasks do what one would do by hand: with
no fence, or with a column for the token that each compares for itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from celery import Celery, Task

from celery_once_fenced import FencedTask, Once
from example_project.servers import POSTGRES_VARIABLE, REDIS_VARIABLE
from tests.acceptance.app import SETTINGS
from tests.acceptance.correctness_orders import Orders, watch
from tests.acceptance.shop_app import AMOUNT, LEASE, POSTGRES
from tests.acceptance.stage import SETTING, Stage


def _balance() -> Any:
    from django.db.models import F

    return F("balance") - AMOUNT


def withdraw(self: Any, label: str, account: int) -> None:
    """In no transaction, so nothing is locked or evicted while it is frozen; the write says whose it is."""
    from tests.fixtures.fenced_app.models import Account

    _begin(self, label)
    Account.objects.fenced(self.grant).filter(pk=account).update(balance=_balance())


def withdraw_unfenced(self: Any, label: str, account: int) -> None:
    """The same, as if the grant alone were enough."""
    from tests.fixtures.fenced_app.models import Plain

    _begin(self, label)
    Plain.objects.filter(pk=account).update(balance=_balance())


def _begin(task: Any, label: str) -> None:
    Stage.of(task.app).enter(label, task.request)
    Orders.of(task.app).carry_out(label, "begun")


def change(self: Any, label: str, account: int) -> None:
    """A write to a stamped row, in the plugin's transaction."""
    from tests.fixtures.fenced_app.models import Account

    Account.objects.filter(pk=account).update(balance=_balance())


def change_by_hand(self: Any, label: str, account: int) -> None:
    """The check that one would write by hand."""
    from tests.fixtures.fenced_app.models import Naive

    newer = Naive.objects.filter(pk=account, fence_token__lte=self.grant.token)
    if not newer.update(balance=_balance(), fence_token=self.grant.token):
        raise ValueError("refused: the row has seen a newer token")


def fill(model: str, row: int, text: str) -> None:
    """No task of the plugin's: it knows of no fence."""
    from tests.fixtures.fenced_app import models

    getattr(models, model).objects.filter(pk=row).update(**{FIELDS[model]: text})


def save_old(self: Any, model: str, row: int, label: str) -> None:
    """Read an instance, and save it as it was when the world has gone on."""
    from tests.fixtures.fenced_app import models

    stage = Stage.of(self.app)
    old = getattr(models, model).objects.get(pk=row)
    stage.enter(label, self.request)
    stage.wait(label)
    old.save()


FIELDS = {"Vault": "content", "Plain": "balance"}


def build(settings: Mapping[str, Any]) -> Celery:
    """The app with these Celery settings."""
    app = Celery("acceptance", set_as_current=False)
    app.conf.update(settings)
    add = partial(app.task, bind=True, shared=False)

    def once(resource: str, *, atomic: bool = True) -> dict[str, Any]:
        options = {"key": "{label}", "replay_for": "1h", "lease": LEASE}
        return {"base": FencedTask, "once": Once(**options, resource=resource, atomic=atomic)}

    add(name="good.withdraw", **once("account:{account}", atomic=False))(withdraw)
    add(name="naive.withdraw", **once("account:{account}", atomic=False))(withdraw_unfenced)
    for resource in ("account", "audit"):
        add(name=f"good.{resource}", **once(f"{resource}:{{account}}"))(change)
        add(name=f"naive.{resource}", **once(f"{resource}:{{account}}"))(change_by_hand)
    app.task(base=Task, name="bare.fill", shared=False)(fill)
    add(base=Task, name="bare.save_old")(save_old)
    return app


def of_worker() -> Celery:
    """The app in a worker process."""
    import django

    settings = json.loads(os.environ[SETTINGS])
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.acceptance.fenced_tables_settings"
    os.environ[POSTGRES_VARIABLE], os.environ[REDIS_VARIABLE] = settings[POSTGRES], settings[SETTING]["url"]
    django.setup()
    app = build(settings)
    watch(app)
    return app


def __getattr__(name: str) -> Any:
    if name == "app":  # what `celery -A` asks for; a test process never does
        globals()["app"] = app = of_worker()
        return app
    raise AttributeError(name)
