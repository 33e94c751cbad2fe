"""The SQL of the correctness tier: which files there are, and in which order they run."""

from __future__ import annotations

from importlib import resources

__all__ = ["FILES", "schema_sql"]

FILES = (
    "schema_v1.sql",
    "timeline_v1.sql",
    "durable_v1.sql",
    "token_v1.sql",
    "evict_v1.sql",
    "lock_v1.sql",
    "claim_v1.sql",
    "begin_v1.sql",
    "complete_v1.sql",
    "record_v1.sql",
    "abandon_v1.sql",
    "renew_v1.sql",
    "effect_start_v1.sql",
    "effect_finish_v1.sql",
    "force_release_v1.sql",
    "resolve_v1.sql",
    "forget_v1.sql",
    "outbox_v1.sql",
    "fence_v1.sql",
    "prune_v1.sql",
    "guard_v1.sql",
    "unfenced_v1.sql",
)
"""Tables first, then each function after those it calls.  Released files are never edited: the next has _v2 files."""


def schema_sql() -> str:
    """The whole script: installs what is missing, and may run again.

    It creates everything in the current schema (first of the search path), and the functions remember that path.
    """
    folder = resources.files("celery_once_fenced.stores") / "sql"
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in FILES)
