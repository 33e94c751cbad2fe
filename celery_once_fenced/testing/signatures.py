"""The key of a call that a test writes as a signature: ``refresh_feed.s(7)``."""

from __future__ import annotations

from typing import Any

from celery_once_fenced.keys import Key

__all__ = ["guarded_task", "key_of"]


def guarded_task(signature: Any) -> Any:
    """The task of a signature.  Raises ``AssertionError`` where no guard stands around it."""
    if not hasattr(signature, "type"):
        raise AssertionError(f"give a signature such as refresh_feed.s(7), not {signature!r:.100}")
    task = signature.type
    if not hasattr(task, "blueprint"):
        raise AssertionError(
            f"task {task.name} is not guarded: declare it with base=SingletonTask or FencedTask"
        )
    return task


def key_of(signature: Any) -> Key:
    """Its key.  Raises ``AssertionError`` where the call has none, so that nothing could hold it."""
    task = guarded_task(signature)
    once_key = signature.options.get("once_key")
    key: Key | None = task.blueprint.recipe.derive_call(signature.args, signature.kwargs, once_key).key
    if key is None:
        raise AssertionError(
            f"{signature!r:.100} has no key: Once(key=…) gives None for it, so it is not guarded"
        )
    return key
