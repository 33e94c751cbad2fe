"""A call as text, as a queued call keeps the last one for its run (E13b): kombu's JSON, as a message would be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kombu.utils import json

from celery_once_fenced.errors import KeyDerivationError

__all__ = ["pack", "unpack"]


def pack(task: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Arguments as text.  Raises ``KeyDerivationError`` (a ``TypeError``) where JSON cannot hold them."""
    try:
        return str(json.dumps([list(args), dict(kwargs)]))  # type: ignore[no-untyped-call]
    except (TypeError, ValueError) as error:
        raise KeyDerivationError(
            task, f"on_duplicate='keep_last' stores its arguments as JSON: {error}"
        ) from error


def unpack(text: str) -> tuple[list[Any], dict[str, Any]] | None:
    """What ``pack`` made.  None for anything else: what comes back from a store is untrusted."""
    try:
        call = json.loads(text)  # type: ignore[no-untyped-call]
    except ValueError:
        return None
    match call:
        case [list() as args, dict() as kwargs]:
            return args, kwargs
    return None
