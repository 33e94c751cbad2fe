"""Places to stop at, for bodies and for the plugin around them, and the journal of what it tells.

A run can be made to stop (``freeze``, ``die``, ``hold``) where a test says so: *granted* is after the claim, before the
body's transaction; *begun* in it, before its first write; *written* after it; *completed* between complete and COMMIT.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import redis
from celery import Celery, signals

from celery_once_fenced.events import Event, subscribe
from tests.acceptance.stage import SETTING, Stage

EVENT_POINTS = {"fence.acquired": "granted", "ledger.completed": "completed"}


class Orders:
    """What a test wants of runs that have not begun: one Redis key for each name and place."""

    def __init__(self, url: str, prefix: str) -> None:
        self._redis = redis.Redis.from_url(url, decode_responses=True)
        self._prefix = prefix

    @classmethod
    def of(cls, app: Any) -> Orders:
        """The orders of an app, one for each process."""
        made = app.__dict__.setdefault("_acceptance_orders", {})
        if os.getpid() not in made:
            made[os.getpid()] = cls(**app.conf[SETTING])
        orders: Orders = made[os.getpid()]
        return orders

    def give(self, name: str, point: str, action: str) -> None:
        """The next run of ``name`` (a label, or a digest) that comes to ``point`` does ``action`` there."""
        self._redis.set(f"{self._prefix}order:{name}:{point}", action)

    def carry_out(self, name: str, point: str) -> None:
        action = self._redis.getdel(f"{self._prefix}order:{name}:{point}")
        if action is not None:
            self._redis.set(f"{self._prefix}stopped:{name}", os.getpid())
            _ACTIONS[str(action)](self, name)

    def stopped(self, name: str) -> int:
        """Process id of the run that came to its point; 0 while there is none."""
        return int(self._redis.get(f"{self._prefix}stopped:{name}") or 0)

    def release(self, name: str) -> None:
        self._redis.set(f"{self._prefix}go:{name}", 1)

    def wait(self, name: str) -> None:
        deadline = time.monotonic() + 30
        while not self._redis.exists(f"{self._prefix}go:{name}") and time.monotonic() < deadline:
            time.sleep(0.01)

    def note(self, event: Event) -> None:
        said = {**event.fields, "event": event.name, "pid": os.getpid(), "at": time.monotonic()}
        self._redis.rpush(f"{self._prefix}events:{event.fields['key']}", json.dumps(said, default=str))

    def events(self, digest: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._redis.lrange(f"{self._prefix}events:{digest}", 0, -1)]

    def close(self) -> None:
        self._redis.close()


_ACTIONS: Mapping[str, Callable[[Orders, str], None]] = {
    "freeze": lambda orders, name: os.kill(os.getpid(), signal.SIGSTOP),
    "die": lambda orders, name: os.kill(os.getpid(), signal.SIGKILL),
    "hold": Orders.wait,
}


def watch(app: Celery) -> None:
    """In a worker: keep a journal of the plugin's events and of deliveries, and stop where a test wants it."""

    @subscribe
    def _on_event(event: Event) -> None:
        if "key" in event.fields:
            orders = Orders.of(app)
            orders.note(event)
            if event.name in EVENT_POINTS:
                orders.carry_out(str(event.fields["key"]), EVENT_POINTS[event.name])

    @signals.task_prerun.connect(weak=False)
    def _on_delivery(task: Any = None, args: Any = (), **_: Any) -> None:
        Stage.of(app).note(str(args[0]) if args else "", "delivered", task.request)

    @signals.task_postrun.connect(weak=False)
    def _on_end(task: Any = None, args: Any = (), state: Any = None, **_: Any) -> None:
        Stage.of(app).note(str(args[0]) if args else "", f"ended {state}", task.request)
