"""What a test says about keys and calls.  Each fails with what it found instead."""

from __future__ import annotations

from typing import Any, Literal

from celery_once_fenced.stores import Hold
from celery_once_fenced.testing.signatures import guarded_task, key_of

__all__ = ["assert_free", "assert_held", "assert_suppressed"]


def assert_suppressed(result: Any, *, by: Any = None) -> None:
    """The call that gave ``result`` was a duplicate, and did not run.

    Args:
        result: What ``delay()`` or ``apply_async()`` returned.
        by: Who held the key: the result of the first call, or a task id.  Default: whoever.
    """
    outcome = getattr(result, "outcome", None)
    if outcome is None:
        raise AssertionError(
            f"{result!r} has no outcome: its task is not guarded (base=SingletonTask or FencedTask), or it was not called "
            "by delay() or apply_async()"
        )
    if outcome.status == "unguarded" and outcome.reason == "eager":
        raise AssertionError(
            f"{result!r} was called in eager mode, which guards nothing outside enforce_once()"
        )
    if outcome.status != "duplicate":
        raise AssertionError(f"the call was not suppressed: {outcome}")
    holder = getattr(by, "id", by)
    if holder is not None and outcome.task_id != holder:
        raise AssertionError(f"the call was suppressed by task {outcome.task_id}, not by {holder}")


def assert_held(signature: Any, *, slot: Literal["q", "r"] | None = None) -> Hold:
    """The key of this call is held, in the store that its app uses now; gives the hold.

    Args:
        signature: The call, such as ``refresh_feed.s(7)``.
        slot: ``"q"`` queued or ``"r"`` running.  Default: either.
    """
    holds = _holds(signature)
    for hold in holds:
        if slot in (None, hold.slot):
            return hold
    wanted = {"q": "queued", "r": "running", None: "held"}[slot]
    raise AssertionError(f"{key_of(signature).text} is not {wanted}: {_told(holds)}")


def assert_free(signature: Any) -> None:
    """Nobody holds the key of this call: it would run at once."""
    if holds := _holds(signature):
        raise AssertionError(f"{key_of(signature).text} is not free: {_told(holds)}")


def _holds(signature: Any) -> list[Hold]:
    leases = guarded_task(signature).blueprint.runtime.leases
    return list(leases.look(key_of(signature).digest))


def _told(holds: list[Hold]) -> str:
    slots = {"q": "queued", "r": "running"}
    said = [f"{slots[hold.slot]} by task {hold.task_id} for {hold.left:.3g} s more" for hold in holds]
    return ", ".join(said) or "nobody holds it"
