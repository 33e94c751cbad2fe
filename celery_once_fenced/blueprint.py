"""How one bound task is guarded: its policy, how its keys are derived, and the runtime it is guarded with."""

from __future__ import annotations

from dataclasses import dataclass

from celery_once_fenced.keys import KeyRecipe
from celery_once_fenced.policy import Policy
from celery_once_fenced.runtime import Runtime

__all__ = ["Blueprint"]


@dataclass(slots=True)
class Blueprint:
    """How one bound task is guarded: made at binding, after the settings are merged."""

    policy: Policy
    recipe: KeyRecipe
    runtime: Runtime
    by_producer: bool
    """Whether no base class publishes in Celery's place, perhaps without a producer."""
    refused: bool = False
    """Whether the last call was refused: then the next is likely to be, and its message would be made for nothing."""
