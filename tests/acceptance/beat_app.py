"""What beats send: one entry of every recipe, at ticks that all beats share, as those of a crontab.

``-A tests.acceptance.beat_app:app`` knows the tasks, ``:stranger`` has only their names.  A beat sends for the groups
that ``BEAT_GROUPS`` names; it is told apart by ``BEAT``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from celery import Celery
from celery.beat import BeatLazyFunc
from celery.schedules import schedule

from celery_once_fenced import FencedTask, Once, SingletonTask
from tests.acceptance.app import SETTINGS
from tests.acceptance.stage import Stage

PERIOD = 3.0
"""Seconds between two ticks.  A crontab's least would be a minute."""
WINDOW = PERIOD / 2
"""Longer than the beats lie apart, and short enough to end before the next tick."""
INTERVAL = 1
"""Seconds between two ticks of one beat that counts from its own start."""
NEARLY = 0.9 * INTERVAL
BEAT, GROUPS = "BEAT", "BEAT_GROUPS"

ONCE: Mapping[str, Once] = {
    "windowed": Once(key=("group",), unique="until_expired", window=WINDOW),
    "due": Once(key=("group", "due"), unique="until_expired", window="1h"),
    "raising": Once(key=("group",), unique="until_expired", window=WINDOW, on_duplicate="raise"),
    "skipping": Once(key=("group",), lease=10),
    "once_more": Once(key=("group",), lease=10, unique="until_and_while_executing"),
    "keeping_last": Once(key=("group",), lease=10, on_duplicate="keep_last"),
    "fenced": Once(key=("group",), fingerprint=(), replay_for=WINDOW),
    "nearly": Once(key=("group",), unique="until_expired", window=NEARLY),
    "fenced_nearly": Once(key=("group",), fingerprint=(), replay_for=NEARLY),
    "fenced_due": Once(key=("group", "due"), fingerprint=(), replay_for="1d"),
}
"""The recipes by the name of their task; ``bare`` and ``overlapping`` have none."""
LONG_RUNNING = ("skipping", "once_more", "keeping_last")
LONG = 1.5 * PERIOD
"""Seconds that a body of these runs, which is not done at the next tick."""


class Ticks(schedule):
    """Due once in every period of the wall clock, whenever the beat was started."""

    def __init__(self, app: Any = None) -> None:
        super().__init__(run_every=PERIOD, app=app)

    def is_due(self, last_run_at: datetime) -> tuple[bool, float]:
        now = time.time()
        left = PERIOD - now % PERIOD
        return int(last_run_at.timestamp() // PERIOD) < int(now // PERIOD), left

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()


def due() -> float:
    """The tick that is being sent: the same for all beats."""
    return time.time() // PERIOD * PERIOD


# --- the tasks --------------------------------------------------------------------------------------------------------


def tick(self: Any, group: str, due: float, sent: float, beat: str) -> None:
    """Note which tick this is, which beat sent it when, and that it runs now."""
    Stage.of(self.app).note(label(group, self.name), json.dumps([due, sent, beat, time.time()]), self.request)


def long_tick(self: Any, group: str, due: float, sent: float, beat: str) -> None:
    """A body that is not done at the next tick."""
    stage, name = Stage.of(self.app), label(group, self.name)
    number, began = stage.enter(name, self.request), time.time()
    time.sleep(LONG)
    stage.note(name, "returned", run=number)
    stage.note(f"{name}.sent", json.dumps([sent, began]), run=number)


def label(group: str, name: str) -> str:
    return f"{group}.{name}"


def build(settings: Mapping[str, Any]) -> Celery:
    app = Celery("beats", set_as_current=False)
    app.conf.update(settings)
    options = {"bind": True, "shared": False}
    app.task(name="bare", **options)(tick)
    app.task(name="overlapping", **options)(long_tick)
    for name, once in ONCE.items():
        base = FencedTask if name.startswith("fenced") else SingletonTask
        body = long_tick if name in LONG_RUNNING else tick
        app.task(name=name, base=base, once=once, **options)(body)
    return app


def entries(groups: Mapping[str, list[str]]) -> dict[str, Any]:
    """The schedule of the groups, each with the tasks that it sends."""
    return {
        label(group, name): {
            "task": name,
            "schedule": Ticks(),
            "args": (group, BeatLazyFunc(due), BeatLazyFunc(time.time), os.environ.get(BEAT, "")),
        }
        for group, names in groups.items()
        for name in names
    }


def _strange(settings: Mapping[str, Any]) -> Celery:
    app = Celery("strangers", set_as_current=False)
    app.conf.update({name: value for name, value in settings.items() if name != "once_fenced"})
    return app


def __getattr__(name: str) -> Any:
    if name not in ("app", "stranger"):
        raise AttributeError(name)
    settings = json.loads(os.environ[SETTINGS])
    app = build(settings) if name == "app" else _strange(settings)
    app.conf.beat_schedule = entries(json.loads(os.environ.get(GROUPS, "{}")))
    globals()[name] = app
    return app
