"""The app of the demo's workers: the shop, a place to stop at, and the same job under a plain Redis lock.

``DEMO_PAUSE`` names a database table: the first statement of this process that inserts into it or updates it waits
there for ``DEMO_PAUSE_SECONDS``, after saying so in its log.  That is long enough to freeze the process from outside in
the middle of its transaction.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from celery.signals import task_prerun
from celery_once import QueueOnce

from example_project.celery_app import app

__all__ = ["app", "post_entry_under_plain_lock"]

app.conf.ONCE = {
    "backend": "celery_once.backends.Redis",
    "settings": {"url": app.conf.once_fenced["redis_url"], "default_timeout": 3},
}


@app.task(base=QueueOnce, once={"graceful": True, "timeout": 3}, acks_late=True, reject_on_worker_lost=True)
def post_entry_under_plain_lock(entry_id: int, account_id: int, amount: int) -> int:
    """The body of ``post_entry``, in one transaction too, but guarded by celery-once."""
    from django.db import transaction

    from example_project.shop.tasks import post_entry

    with transaction.atomic():
        balance: int = post_entry.run(entry_id, account_id, amount)
    return balance


class Pause:
    """Stops the first statement that writes to ``table``, once."""

    def __init__(self, table: str, seconds: float) -> None:
        self.table = table
        self.seconds = seconds
        self.done = False

    def __call__(self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        if not self.done and sql.startswith(("INSERT", "UPDATE")) and f'"{self.table}"' in sql:
            self.done = True
            print("demo: paused", flush=True)
            time.sleep(self.seconds)
        return execute(sql, params, many, context)


def _install(**_: Any) -> None:
    from django.db import connection

    if _pause is not None and _pause not in connection.execute_wrappers:
        connection.execute_wrappers.append(_pause)


_pause: Pause | None = None
if "DEMO_PAUSE" in os.environ:
    _pause = Pause(os.environ["DEMO_PAUSE"], float(os.environ["DEMO_PAUSE_SECONDS"]))
    task_prerun.connect(_install)
