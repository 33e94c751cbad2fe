"""Real Celery workers for the demo: frozen, woken and ended like the servers, and gone when the demo is gone."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from signal import SIGQUIT, SIGTERM

from example_project.servers import Server

__all__ = ["CeleryWorker"]


class CeleryWorker(Server):
    """``celery -A app worker`` with one child process.  Starts when entered as a context."""

    name = "worker"
    stop_signal = SIGTERM
    quit_signal = SIGQUIT

    def __init__(self, name: str, app: str, variables: Mapping[str, str] | None = None) -> None:
        self.node = f"{name}@shop"
        self.app = app
        self.variables = dict(variables or {})
        super().__init__()

    @property
    def url(self) -> str:
        """The worker's node name: where it is reached."""
        return self.node

    def prepare(self) -> None:
        """Nothing: a worker brings what it needs."""

    def command(self) -> list[str]:
        options = ["-c", "1", "--prefetch-multiplier", "1", "-n", self.url, "-l", "info", "--without-mingle"]
        return [sys.executable, "-W", "ignore", "-m", "celery", "-A", self.app, "worker", *options]

    def environment(self) -> dict[str, str]:
        return {**os.environ, **self.variables}

    def ready(self) -> bool:
        return f"{self.url} ready" in self.log()

    def open(self) -> CeleryWorker:
        """Start the worker and wait until it consumes.  Raises ``ServerError`` where it ends instead."""
        self.start()
        return self

    def __enter__(self) -> CeleryWorker:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.resume()
        self.stop()
        self.close()
