"""What the demos share: the stage with its servers and the shop's tables, and the way they tell what happens."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from importlib import import_module

import django

from example_project.servers import POSTGRES_VARIABLE, REDIS_VARIABLE, Servers, servers, wait_until

__all__ = ["LEASE", "VISIBILITY_TIMEOUT", "Story", "stage", "until"]

LEASE = 3
VISIBILITY_TIMEOUT = 5
"""Seconds."""
ENVIRONMENT = {
    "DJANGO_SETTINGS_MODULE": "example_project.settings",
    "SHOP_LEASE": str(LEASE),
    "SHOP_VISIBILITY_TIMEOUT": str(VISIBILITY_TIMEOUT),
}


class Story:
    """Tells what happens, with the time, and keeps what was not as promised."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.broken: list[str] = []

    def title(self, text: str) -> None:
        print(f"\n── {text} {'─' * max(0, 100 - len(text))}", flush=True)

    def tell(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", flush=True)

    def promise(self, text: str, kept: bool) -> None:
        """Tell a promise and whether it was kept."""
        self.tell(f"{'✔' if kept else '✘ NOT AS PROMISED:'} {text}")
        if not kept:
            self.broken.append(text)

    def end(self) -> int:
        """Tell how it went; returns the exit code."""
        self.title("as promised" if not self.broken else "NOT as promised")
        if self.broken:
            print(f"\n{len(self.broken)} not as promised: {'; '.join(self.broken)}")
        return 1 if self.broken else 0


@contextlib.contextmanager
def stage(story: Story) -> Iterator[Servers]:
    """Yields both servers, with this process and its workers on a fresh, migrated database of the shop."""
    with servers() as running:
        name = f"shop_demo_{secrets.token_hex(4)}"
        os.environ |= {
            **ENVIRONMENT,
            REDIS_VARIABLE: running.redis_url,
            POSTGRES_VARIABLE: running.create_database(name),
        }
        try:
            _migrate(story)
            yield running
        finally:
            _close()
            running.drop_database(name)


def until(condition: Callable[[], bool], seconds: float, problem: str | Callable[[], str]) -> None:
    """Wait until the condition holds.  Raises ``TimeoutError`` with the problem, which may be looked for only then."""

    def failure() -> TimeoutError:
        return TimeoutError(f"{problem() if callable(problem) else problem} within {seconds:g} s")

    wait_until(condition, seconds, failure)


def _migrate(story: Story) -> None:
    from django.core.management import call_command

    story.title("Valkey and PostgreSQL, from wheels")
    django.setup()
    import_module("example_project.celery_app")
    call_command("migrate", verbosity=0)
    story.tell("servers are up, the shop's tables and the plugin's are migrated")


def _close() -> None:
    from django.db import connections

    from celery_once_fenced import runtime

    connections.close_all()
    with contextlib.suppress(Exception):
        runtime.current().close()
