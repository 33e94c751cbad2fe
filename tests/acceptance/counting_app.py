"""Tasks whose runs and events are tallied one by one beside the plugin's own counters, in a hash that no script touches.

``naive`` is what a counter in each process comes to: summed up when the process ends in good order.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Mapping
from typing import Any

import redis
from celery import Celery, signals

from celery_once_fenced import FencedTask, Once, SingletonTask
from celery_once_fenced.events import Event, subscribe
from tests.acceptance.app import LEASE, SETTINGS
from tests.acceptance.stage import SETTING

DEADLY = "die"


class Tally:
    """Counts what this process and all others did."""

    def __init__(self, url: str, prefix: str) -> None:
        self._redis = redis.Redis.from_url(url, decode_responses=True)
        self._all, self._naive = f"{prefix}tally", f"{prefix}naive"
        self._here: Counter[str] = Counter()

    def count(self, what: str, task: str) -> None:
        self._redis.hincrby(self._all, f"{what} {task}", 1)
        self._here[f"{what} {task}"] += 1

    def hand_over(self) -> None:
        for what, times in self._here.items():
            self._redis.hincrby(self._naive, what, times)
        self._here.clear()

    def all(self) -> Counter[str]:
        return Counter({name: int(times) for name, times in self._redis.hgetall(self._all).items()})

    def naive(self) -> Counter[str]:
        return Counter({name: int(times) for name, times in self._redis.hgetall(self._naive).items()})

    def close(self) -> None:
        self._redis.close()

    def told(self, event: Event) -> None:
        """An observer."""
        task, why = event.fields.get("task"), event.fields.get("why", event.fields.get("verdict", ""))
        if task and event.name in (
            "start.refused",
            "claim.answered",
            "execution.deferred",
            "ledger.replayed",
        ):
            detail = f" {why}" if event.name in ("start.refused", "claim.answered") else ""
            self.count(f"{event.name}{detail}", str(task))


def build(settings: Mapping[str, Any]) -> Celery:
    app = Celery("counting", set_as_current=False)
    app.conf.update(settings)
    tally = app.tally = Tally(**settings[SETTING])

    def task(name: str, base: type[SingletonTask], once: Once) -> None:
        def run(self: Any, key: int, *acts: str) -> int:
            tally.count("began", self.name)
            if DEADLY in acts:
                os.kill(os.getpid(), signal.SIGKILL)
            tally.count("ended", self.name)
            return key

        app.task(run, bind=True, name=name, base=base, once=once, shared=False)

    task("single", SingletonTask, Once(key="single:{key}", lease=LEASE))
    task(
        "serial",
        SingletonTask,
        Once(key="serial:{key}", unique="while_executing", lease=LEASE, max_deferred=9999),
    )
    task("posted", FencedTask, Once(key="posted:{key}", lease=LEASE, replay_for="1h"))
    return app


if SETTINGS in os.environ:
    app = build(json.loads(os.environ[SETTINGS]))
    subscribe(app.tally.told)
    signals.worker_process_shutdown.connect(lambda **_: app.tally.hand_over(), weak=False)
