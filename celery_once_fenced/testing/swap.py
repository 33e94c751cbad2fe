"""Parts of a runtime, replaced for the length of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery_once_fenced.runtime import Runtime

__all__ = ["PARTS", "swapped"]

PARTS = ("leases", "keeper", "admission", "ledger", "fence_keeper", "guard")
"""What a runtime makes when it is first needed, and keeps."""


@contextmanager
def swapped(runtime: Runtime, **parts: Any) -> Iterator[None]:
    """Let a runtime use ``parts``, and make the rest of ``PARTS`` anew around them; its own come back afterwards."""
    kept = vars(runtime)
    before = {name: kept.pop(name) for name in PARTS if name in kept}
    kept.update(parts)
    try:
        yield
    finally:
        for name in PARTS:
            kept.pop(name, None)
        kept.update(before)
