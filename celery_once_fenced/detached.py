"""What stands behind a grant where nothing is recorded: direct and eager calls, and the efficiency tier.

Effects run, an ordinary transaction is opened, messages are published when Django's transaction commits (at once
where there is none).  There is no token and nothing is stored.
"""

from __future__ import annotations

import importlib
import sys
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from celery_once_fenced.errors import GrantError

if TYPE_CHECKING:
    from celery_once_fenced.runtime import Runtime

__all__ = ["Detached"]


class Detached:
    """The ``Backing`` of a detached grant."""

    def __init__(self, runtime: Callable[[], Runtime]) -> None:
        self._runtime = runtime

    def effect(
        self, _name: str, fn: Callable[[str], object], _failed: tuple[type[BaseException], ...], _own: Any
    ) -> object:
        return fn(str(uuid.uuid4()))

    def atomic(self) -> AbstractContextManager[Any]:
        database = self._runtime().database
        if database is None:
            raise GrantError("grant.atomic() needs a database: name one in the setting once_fenced")
        return database.detached()

    def send(self, signature: Any) -> str:
        task_id = str(uuid.uuid4())
        message = self._runtime().post.pack(signature, task_id, uuid.uuid4().hex)
        self._on_commit(lambda: self._runtime().post.publish(task_id, message))
        return task_id

    def _on_commit(self, publish: Callable[[], None]) -> None:
        alias = getattr(self._runtime().database, "alias", "")
        if alias and "django.db" in sys.modules:
            importlib.import_module("django.db.transaction").on_commit(publish, using=alias)
        else:
            publish()
