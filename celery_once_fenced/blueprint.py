"""How one bound task is guarded: its policy, how its keys are derived, and the runtime it is guarded with."""

from __future__ import annotations

from dataclasses import dataclass

from celery_once_fenced.keys import KeyRecipe
from celery_once_fenced.policy import Policy
from celery_once_fenced.runtime import Runtime

__all__ = ["Blueprint"]


@dataclass(frozen=True, slots=True)
class Blueprint:
    """How one bound task is guarded: made at binding, after the settings are merged."""

    policy: Policy
    recipe: KeyRecipe
    runtime: Runtime
    by_producer: bool
    """Whether a call that is published goes through a producer of Celery, for certain."""
