"""What PostgreSQL is asked for metrics, audit and doctor: one statement each, none of which scans a large table."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from celery_once_fenced.stores.observations import GuardedTable, LedgerCounts, LedgerFacts
from celery_once_fenced.stores.postgres_connections import Connections
from celery_once_fenced.stores.postgres_schema import schema_sql

__all__ = ["COUNTS", "counts", "due", "facts", "function_hashes"]

# Each part has an index of its own (in_doubt, outbox_open); rows are the planner's estimates.
COUNTS = """
select
  (select coalesce(json_object_agg(task_name, entries), '{}')
     from (select task_name, count(*) as entries from once_fenced_ledger where state = 'in_doubt' group by task_name) t
  ) as in_doubt,
  (select count(*) from once_fenced_outbox where confirmed_at is null) as unpublished,
  (select coalesce(extract(epoch from clock_timestamp() - min(created_at)), 0)::float8
     from once_fenced_outbox where confirmed_at is null) as oldest_unpublished,
  (select coalesce(json_object_agg(replace(relname, 'once_fenced_', ''), reltuples::bigint), '{}')
     from pg_class
    where reltuples >= 0
      and oid in (to_regclass('once_fenced_fence'), to_regclass('once_fenced_ledger'),
                  to_regclass('once_fenced_outbox'), to_regclass('once_fenced_event'))
  ) as rows
"""
_FACTS = """
select
  current_setting('server_version_num')::int as version,
  extract(epoch from clock_timestamp())::float8 as clock,
  pg_is_in_recovery() as standby,
  (select coalesce(json_object_agg(name, encode(sha256(convert_to(prosrc, 'UTF8')), 'hex')), '{}')
     from unnest(%s::text[]) as name join pg_proc on pg_proc.oid = to_regproc(name)) as functions,
  (select coalesce(json_agg(json_build_array(relname, encode(tgargs, 'hex')) order by relname), '[]')
     from pg_trigger join pg_class on pg_class.oid = tgrelid
    where tgfoid = to_regproc('once_fenced_guard_v1') and tgparentid = 0) as guards
"""
# What prune would delete of the ledger now, entries that have effects apart: it is for a progress bar.
_DUE = """
select (select count(*) from once_fenced_fence
         where coalesce(expires_at, acquired_at, '-infinity') < clock_timestamp() - make_interval(secs => %s))
     + (select count(*) from once_fenced_ledger
         where retain_until < clock_timestamp() and state in ('succeeded', 'failed', 'retryable'))
     + (select count(*) from once_fenced_outbox
         where confirmed_at < clock_timestamp() - make_interval(secs => %s)) as rows
"""
_FUNCTION = re.compile(r"^create or replace function (\w+)\(.*?\bas \$\$(.*?)\$\$", re.MULTILINE | re.DOTALL)


def counts(connections: Connections) -> LedgerCounts:
    """See ``LedgerStore.counts``."""
    return LedgerCounts(**connections.ask(COUNTS, ())[0])


def facts(connections: Connections) -> LedgerFacts:
    """See ``LedgerStore.facts``."""
    expected = function_hashes()
    row = connections.ask(_FACTS, (list(expected),))[0]
    found: Mapping[str, str] = row["functions"]
    return LedgerFacts(
        version=row["version"],
        clock=row["clock"],
        standby=row["standby"],
        missing=tuple(sorted(expected.keys() - found.keys())),
        stale=tuple(sorted(name for name in found if found[name] != expected[name])),
        tables=tuple(_guarded(*guard) for guard in row["guards"]),
    )


def due(connections: Connections, grace: float) -> int:
    """About how many rows ``prune`` with this grace would delete."""
    rows: int = connections.ask(_DUE, (grace, grace))[0]["rows"]
    return rows


def function_hashes() -> dict[str, str]:
    """The SHA-256 of the body of every SQL function of this release, by name."""
    found: list[tuple[Any, Any]] = _FUNCTION.findall(schema_sql())
    return {name: hashlib.sha256(body.encode()).hexdigest() for name, body in found}


def _guarded(table: str, arguments: str) -> GuardedTable:
    """The arguments of a guard are NUL-terminated: mode, text, column, text, …, column, text."""
    mode, *template = bytes.fromhex(arguments).decode().split("\0")[:-1]
    return GuardedTable(table, "{}".join(template[::2]), mode)
