"""Messages that are published if and only if the body commits (L9).

``put`` writes a message in the body's transaction; after the COMMIT ``publish`` looks which of them were committed (a
savepoint that was rolled back takes its messages along), hands those to the broker and confirms them.  A worker killed
in between leaves them unconfirmed, and a sweep of any worker publishes them: once, or twice where the kill came between
publishing and confirming.  Each message carries a task id and a delivery id made
from the attempt and its place in it, the same both times, so that a guarded follow-up recognises the second.  Apps may
share the database and not the broker, so each sweeps only what carries its own namespace.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

from celery_once_fenced.errors import StoreUnavailableError
from celery_once_fenced.events import emit
from celery_once_fenced.stores import Held, LedgerStore, OutboxMessage, Transaction

__all__ = ["AGE", "Outbox", "Post", "publish", "sweep"]

AGE = 60.0
"""Seconds after which a message that nobody confirmed is published by whoever looks."""


class Post(Protocol):
    """The way to the broker."""

    def pack(self, signature: Any, task_id: str, delivery: str) -> str:
        """A signature as text.  Raises ``GrantError`` for what is none."""
        ...

    def publish(self, task_id: str, message: str) -> None:
        """Publish a packed signature under ``task_id``."""
        ...


class Outbox:
    """The messages of one attempt."""

    def __init__(self, ledger: LedgerStore, post: Post) -> None:
        self._ledger = ledger
        self._post = post
        self._task_ids: list[str] = []

    def put(self, transaction: Transaction, held: Held, signature: Any) -> str:
        """Write a message in the body's transaction; returns the task id it will have."""
        made_from = f"{held.operation.digest.hex()}:{held.token}:{len(self._task_ids)}"
        digest = hashlib.sha256(made_from.encode()).digest()
        task_id = str(uuid.UUID(bytes=digest[:16], version=4))
        transaction.put(held, task_id, self._post.pack(signature, task_id, digest[16:].hex()))
        self._task_ids.append(task_id)
        return task_id

    def publish(self) -> None:
        """After the COMMIT.  Never raises: what cannot be published now is swept later."""
        task_ids, self._task_ids = self._task_ids, []
        if not task_ids:
            return
        try:
            messages = self._ledger.outbox_mine(task_ids)
        except StoreUnavailableError as error:
            emit("store.failed", operation="publish", key="", why=str(error))
            return
        publish(self._ledger, self._post, messages)


def sweep(ledger: LedgerStore, post: Post, namespace: str, *, age: float = AGE) -> int:
    """Publish what nobody has published for ``age`` seconds, of the app with this namespace; returns how many.

    Raises ``StoreUnavailableError`` when the database does not answer.
    """
    return publish(ledger, post, ledger.outbox_take(namespace, age))


def publish(ledger: LedgerStore, post: Post, messages: Sequence[OutboxMessage]) -> int:
    """Publish and confirm; returns how many.  Never raises: what cannot be published now is swept later."""
    published = [message.task_id for message in messages if _published(post, message)]
    if not published:
        return 0
    try:
        ledger.outbox_confirm(published)
    except StoreUnavailableError as error:  # then it is published again, under the same ids
        emit("store.failed", operation="confirm", key="", why=str(error))
    return len(published)


def _published(post: Post, message: OutboxMessage) -> bool:
    try:
        post.publish(message.task_id, message.message)
    except Exception as error:  # noqa: BLE001  # any broker's any error; the message stays where it is
        emit("message.delayed", task_id=message.task_id, why=type(error).__name__)
        return False
    emit("message.published", task_id=message.task_id)
    return True
