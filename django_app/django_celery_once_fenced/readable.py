"""What stands in the stores for machines, as a person reads it.  Never raises: what stands there may be anybody's."""

from __future__ import annotations

import json
import re
from typing import Any

from django_celery_once_fenced.models import EffectState, State

__all__ = ["detail", "error", "outcome", "resource", "short", "value"]

_DIGEST = re.compile(r"#[0-9a-f]{64}\Z")


def resource(text: str | None) -> str:
    """Without the digest that makes the resource of a key its own."""
    return _DIGEST.sub("", text or "")


def short(text: str, task: str | None) -> str:
    """A key or a resource without the scope that only repeats its task."""
    return text.removeprefix(f"{task}:") or text


def value(text: Any) -> str:
    """A recorded result: JSON with its characters instead of their escapes."""
    found = _parsed(text)
    return str(text or "") if found is None else json.dumps(found, ensure_ascii=False)


def error(text: Any) -> str:
    """A recorded error: ``CardDeclined: insufficient funds``."""
    match _parsed(text):
        case {"type": str(name), **rest}:
            return ": ".join(filter(None, [name.rpartition(".")[2], str(rest.get("message") or "")]))
    return str(text or "")


def outcome(recorded: Any) -> str:
    """Of a dedup record or an effect: its result, its error, or why there is no result."""
    return value(recorded.result) or error(recorded.error) or getattr(recorded, "result_omitted", None) or ""


def detail(text: str | None) -> str:
    """Of an event: a reason as it was given, or what an SQL function noted."""
    match _parsed(text):
        case {"effect": str(name), "state": str(state), **rest}:
            said = value(rest.get("result")) or error(rest.get("error"))
            return f"{name}: {_label(EffectState, state)}" + (f", {said}" if said else "")
        case {"state": str(state), "reason": reason}:
            return f"{_label(State, state)}: {reason}"
    return text or ""


def _label(states: Any, state: str) -> str:
    return str(dict(states.choices).get(state, state))


def _parsed(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None
