"""``record``: a frozen data class that costs no more than an open one.

A frozen data class sets each field through ``object.__setattr__``, five times as slow as an assignment, and a call or a
run makes ten of them.  So what stays inside is frozen for the type checker alone; what users get stays a real one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

__all__ = ["record"]

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:

    def record(*, frozen, slots, kw_only=False):
        """Like ``dataclass``, whose arguments these are."""
        return dataclass(slots=slots, kw_only=kw_only, unsafe_hash=frozen)
