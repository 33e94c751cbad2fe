"""What people ask PostgreSQL of one key, and what is kept of their decisions: one statement each.

The table of fences has no index but its primary key (renewals are HOT updates), so the fences of a key are those of the
resources that its running entries name: a look-up, however many there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from celery_once_fenced.stores.hold import Hold
from celery_once_fenced.stores.ledger_questions import Decision, HeldFence, RecordedEffect
from celery_once_fenced.stores.postgres_connections import Connections

__all__ = ["decisions", "effects", "fence", "fences", "fences_of", "note_released"]

PAGE = 500
"""Fences read in one round trip."""
DECIDED = ["fence.force_released", "lease.released_by_hand", "ledger.forgotten", "ledger.resolved"]

_HELD = """
select resource, token, holder, key_digest as digest, task_id, task_name as task, key, worker,
       extract(epoch from acquired_at)::float8 as since,
       extract(epoch from expires_at - clock_timestamp())::float8 as left
  from once_fenced_fence
 where expires_at is not null
"""
_PAGE = f"{_HELD} and resource > %s order by resource limit %s::int"
_ONE = f"{_HELD} and resource = %s"
_RUNNING = (
    "select resource from once_fenced_ledger where state = 'running' and (key_digest = %s::bytea or key = %s)"
)
_OF_KEY = f"{_HELD} and (key_digest = %s::bytea or key = %s) and resource in ({_RUNNING}) order by resource"  # constants
_EFFECTS = """
select name, state::text as state, extract(epoch from started_at)::float8 as since, holder
  from once_fenced_effect where key_digest = %s::bytea order by started_at, name
"""
_DECISIONS = """
select kind, extract(epoch from at)::float8 as at, coalesce(actor, '') as actor, coalesce(detail, '') as detail, token
  from once_fenced_event
 where key_digest = any(%s::bytea[]) and kind = any(%s::text[]) and at > %s::timestamptz
 order by id desc limit %s::int
"""
_NOTE = """
insert into once_fenced_event (kind, resource, key_digest, task_name, old_task_id, old_holder, old_worker, actor, detail)
values ('lease.released_by_hand', nullif(%s, ''), %s::bytea, nullif(%s, ''), nullif(%s, ''), %s, nullif(%s, ''), %s, %s) returning id
"""


def fences(connections: Connections) -> Iterator[HeldFence]:
    """See ``LedgerStore.fences``."""
    after = ""
    while page := connections.ask(_PAGE, (after, PAGE)):
        yield from (HeldFence(**row) for row in page)
        after = page[-1]["resource"]


def fence(connections: Connections, resource: str) -> HeldFence | None:
    """See ``LedgerStore.fence``."""
    found = connections.ask(_ONE, (resource,))
    return HeldFence(**found[0]) if found else None


def fences_of(connections: Connections, digest: bytes, key: str) -> list[HeldFence]:
    """See ``LedgerStore.fences_of``."""
    return [HeldFence(**row) for row in connections.ask(_OF_KEY, (digest, key, digest, key))]


def effects(connections: Connections, digest: bytes) -> list[RecordedEffect]:
    """See ``LedgerStore.effects``."""
    return [RecordedEffect(**row) for row in connections.ask(_EFFECTS, (digest,))]


def decisions(connections: Connections, digests: Sequence[bytes], after: float, limit: int) -> list[Decision]:
    """See ``LedgerStore.decisions``."""
    since = datetime.fromtimestamp(after, UTC)
    found = connections.ask(_DECISIONS, (list(digests), DECIDED, since, limit))
    return [Decision.of(**row) for row in reversed(found)]


def note_released(connections: Connections, hold: Hold, reason: str, actor: str) -> None:
    """See ``LedgerStore.note_released``.  A lease protects its key: that is what the row names as its resource."""
    digest = bytes.fromhex(hold.digest)
    connections.ask(
        _NOTE, (hold.text, digest, hold.task, hold.task_id, hold.holder, hold.worker, actor, reason)
    )
