"""What bodies did, in an order that all processes agree on, and the signals that let them go on.

The journal is a list in Redis for every label; it is reached directly, never through a test's proxy.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import redis

SETTING = "acceptance_stage"
PATIENCE = 30.0
"""Seconds after which a body that nobody released goes on, so that no worker hangs for ever."""


@dataclass(frozen=True)
class Note:
    """One thing that a body did."""

    event: str
    run: int
    """Number of the run of this label: 1, 2, ..."""
    task_id: str
    retries: int
    pid: int
    at: float
    """Seconds on the machine's monotonic clock, which its processes share."""


class Stage:
    """The journal and the signals under one prefix."""

    def __init__(self, url: str, prefix: str) -> None:
        self._redis = redis.Redis.from_url(url)
        self._prefix = prefix
        self._runs: dict[str, int] = {}

    @classmethod
    def of(cls, app: Any) -> Stage:
        """The stage of an app, one for each process."""
        made = app.__dict__.setdefault("_acceptance_stages", {})
        if os.getpid() not in made:
            made[os.getpid()] = cls(**app.conf[SETTING])
        stage: Stage = made[os.getpid()]
        return stage

    # --- for bodies ---------------------------------------------------------------------------------------------------

    def enter(self, label: str, request: Any = None) -> int:
        """Note that a body has begun; answers the number of its run."""
        number = int(self._redis.incr(f"{self._prefix}runs:{label}"))
        self.note(label, "began", request, run=number)
        self._runs[label] = number
        return number

    def leave(self, label: str, how: str, request: Any = None) -> None:
        self.note(label, how, request)

    def note(self, label: str, event: str, request: Any = None, *, run: int | None = None) -> None:
        note = {
            "event": event,
            "run": self._runs.get(label, 0) if run is None else run,
            "task_id": getattr(request, "id", None) or "",
            "retries": getattr(request, "retries", None) or 0,
            "pid": os.getpid(),
            "at": time.monotonic(),
        }
        self._redis.rpush(f"{self._prefix}journal:{label}", json.dumps(note))

    def wait(self, label: str, name: str = "") -> None:
        """Go on when the test releases the label."""
        deadline = time.monotonic() + PATIENCE
        while not self._redis.exists(f"{self._prefix}go:{label}:{name}") and time.monotonic() < deadline:
            time.sleep(0.01)

    # --- for tests ----------------------------------------------------------------------------------------------------

    def release(self, label: str, name: str = "") -> None:
        """Let the bodies of a label go on: those that wait and those that will."""
        self._redis.set(f"{self._prefix}go:{label}:{name}", 1)

    def journal(self, label: str) -> list[Note]:
        lines = self._redis.lrange(f"{self._prefix}journal:{label}", 0, -1)
        return sorted((_parsed(json.loads(line)) for line in lines), key=lambda note: note.at)

    def runs(self, label: str) -> int:
        """How many bodies of this label have begun."""
        return sum(note.event == "began" for note in self.journal(label))

    def events(self, label: str) -> list[str]:
        return [note.event for note in self.journal(label)]

    def most_at_once(self, label: str) -> int:
        """The most bodies of this label that ran at the same moment.  One that was killed counts until the next one begins."""
        running: set[int] = set()
        most = 0
        for note in self.journal(label):
            if note.event == "began":
                running.add(note.run)
            elif note.event not in ("lost", "kept"):
                running.discard(note.run)
            most = max(most, len(running))
        return most

    def close(self) -> None:
        self._redis.close()


def _parsed(note: Mapping[str, Any]) -> Note:
    return Note(**note)
