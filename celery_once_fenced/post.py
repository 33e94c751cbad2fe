"""Signatures as text and back to the broker: the outbox's way through Celery."""

from __future__ import annotations

from collections import UserList
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from celery.canvas import Signature, chord, group
from celery.canvas import _chain as chain
from kombu.utils import json

from celery_once_fenced.errors import GrantError
from celery_once_fenced.header import HEADER, Header

__all__ = ["CeleryPost"]


class CeleryPost:
    """Packs and publishes signatures of one app: tasks, chains, groups and chords."""

    def __init__(self, app: Any) -> None:
        self._app = app

    def pack(self, signature: Any, task_id: str, delivery: str) -> str:
        """As ASCII JSON.  Raises ``GrantError`` for what is no signature, or has arguments that JSON cannot hold."""
        if not isinstance(signature, Signature):
            raise GrantError(f"grant.send() takes a signature such as task.s(...), not {signature!r:.100}")
        packed = self._copied(signature)
        for place, first in enumerate(_first_steps(packed)):
            # Two first steps with the same key are two calls.
            _name_delivery(first, f"{delivery}{place}", f"{task_id}.{place}" if place else task_id)
        return str(json.dumps({"message": dict(packed)}))  # type: ignore[no-untyped-call]

    def _copied(self, signature: Signature) -> Any:
        """As it will be read back.  ``clone()`` would leave the tasks of a group the caller's own."""
        try:
            text = json.dumps(_listed(signature))  # type: ignore[no-untyped-call]
        except (TypeError, ValueError) as error:
            raise GrantError(
                f"grant.send() stores the message as JSON, which its arguments do not allow: {error}"
            ) from error
        return self._app.signature(json.loads(text))  # type: ignore[no-untyped-call]

    def publish(self, task_id: str, message: str) -> None:
        """Under ``task_id``; "" = the one the signature had."""
        packed = json.loads(message)["message"]  # type: ignore[no-untyped-call]
        signature = self._app.signature(packed)
        signature.apply_async(task_id=task_id or signature.options.get("task_id"))


def _listed(value: Any) -> Any:
    """A generator of signatures, which Celery keeps in a group as it is, as a list."""
    if isinstance(value, dict):
        return {name: _listed(one) for name, one in value.items()}
    return [_listed(one) for one in value] if isinstance(value, list | tuple | UserList) else value


def _first_steps(signature: Any) -> Iterator[Any]:
    """The tasks that start when a signature is called."""
    if isinstance(signature, chord):
        yield from _all_first(signature.tasks)
    elif isinstance(signature, chain):
        yield from _first_steps(signature.tasks[0])
    elif isinstance(signature, group):
        yield from _all_first(signature.tasks)
    else:
        yield signature


def _all_first(signatures: Any) -> Iterator[Any]:
    for signature in list(signatures):
        yield from _first_steps(signature)


def _name_delivery(signature: Any, delivery: str, run: str) -> None:
    headers = signature.options.get("headers") or {}
    header = Header.parse(headers.get(HEADER)) or Header()
    named = replace(header, delivery=delivery, run=header.run or run, packed=True)
    signature.set(headers={**headers, HEADER: named.dump()})
