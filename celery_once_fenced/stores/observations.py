"""What a ledger store says of itself, for metrics, audit and doctor: frozen answers without a driver in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["GuardedTable", "LedgerCounts", "LedgerFacts"]


@dataclass(frozen=True, slots=True)
class GuardedTable:
    """A table whose trigger checks tokens."""

    table: str
    resource: str
    """Its template, with ``{}`` for each column: ``account:{}``."""
    mode: str
    """``stamp`` or ``require``."""


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """How much of what there is now.  Cheap to ask, however large the ledger is."""

    in_doubt: Mapping[str, int] = field(default_factory=dict)
    """Entries in doubt per task."""
    unpublished: int = 0
    """Messages of committed bodies that nobody has confirmed as published."""
    oldest_unpublished: float = 0.0
    """Age of the oldest one, in seconds."""
    rows: Mapping[str, int] = field(default_factory=dict)
    """Rows per table (``fence``, ``ledger``, ``outbox``, ``event``), as the planner estimates them; one that was never
    analysed is left out."""


@dataclass(frozen=True, slots=True)
class LedgerFacts:
    """The server and what is installed on it."""

    version: int
    """As ``server_version_num``: 140005 is 14.5."""
    clock: float
    """Unix time."""
    standby: bool
    """Whether it only follows another server."""
    missing: tuple[str, ...] = ()
    """SQL functions of this release that it lacks."""
    stale: tuple[str, ...] = ()
    """SQL functions of this release whose text is another there."""
    tables: tuple[GuardedTable, ...] = ()
