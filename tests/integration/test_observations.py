"""What the servers say of themselves, for metrics, audit and doctor."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import redis
from celery import Celery

from celery_once_fenced.errors import StoreUnavailableError
from celery_once_fenced.runtime import runtime_of
from celery_once_fenced.stores import EffectStart, postgres_observations
from celery_once_fenced.stores.observations import GuardedTable, LedgerCounts
from celery_once_fenced.stores.postgres import schema_sql
from celery_once_fenced.stores.postgres_observations import function_hashes
from celery_once_fenced.stores.redis import RedisLeaseStore
from tests.fixtures.ledger import WRITES, Ledger, claim_of, operation


@pytest.fixture
def bare(postgres_url: str) -> Iterator[Ledger]:
    """A database without the schema."""
    ledger = Ledger(postgres_url)
    yield ledger
    ledger.store.close()


@pytest.fixture
def ledger(bare: Ledger) -> Ledger:
    bare.execute(schema_sql())
    return bare


def leave_in_doubt(ledger: Ledger, task: str) -> None:
    op = operation(task=task)
    held = ledger.hold(op)
    ledger.store.effect_start(EffectStart(held, "gateway", "hold", None))
    ledger.expire(op.resource)
    assert ledger.store.claim(claim_of(op)).verdict == "in_doubt"


def test_an_empty_ledger_counts_nothing(ledger: Ledger) -> None:
    assert ledger.store.counts() == LedgerCounts()


def test_what_is_in_doubt_is_counted_by_task(ledger: Ledger) -> None:
    for task in ("shop.charge", "shop.refund", "shop.charge"):
        leave_in_doubt(ledger, task)
    ledger.hold(operation(task="shop.charge"))  # runs, and is not in doubt
    assert ledger.store.counts().in_doubt == {"shop.charge": 2, "shop.refund": 1}


def test_messages_that_nobody_confirmed_are_counted_with_their_age(ledger: Ledger) -> None:
    insert = (
        "insert into once_fenced_outbox (namespace, key_digest, task_id, message, created_at, confirmed_at)"
        " values ('once', 'd', 't', 'm', clock_timestamp() - make_interval(secs => %s), {})"
    )
    ledger.execute(insert.format("null"), (90,))
    ledger.execute(insert.format("null"), (5,))
    ledger.execute(insert.format("clock_timestamp()"), (1000,))
    counts = ledger.store.counts()
    assert counts.unpublished == 2
    assert 90 <= counts.oldest_unpublished < 120


def test_rows_are_those_that_the_planner_knows_of(ledger: Ledger) -> None:
    ledger.hold(operation())
    assert ledger.store.counts().rows == {}
    ledger.execute("analyze once_fenced_ledger")
    assert ledger.store.counts().rows == {"ledger": 1}


def scans_the_ledger(ledger: Ledger, statement: str) -> bool:
    plan = ledger.execute(f"explain {statement}")
    return any("Seq Scan on once_fenced_ledger" in line for (line,) in plan)


def test_counting_scans_no_finished_entry(ledger: Ledger) -> None:
    ledger.execute(
        "insert into once_fenced_ledger (key_digest, key, scope, task_name, state, attempt, holder, resource, token)"
        " select decode(md5(n::text) || md5(n::text), 'hex'), 'k', 's', 't', 'succeeded', 1, 'h', 'r', 1"
        "   from generate_series(1, 1000) n"
    )
    ledger.execute("vacuum analyze once_fenced_ledger")
    assert not scans_the_ledger(ledger, postgres_observations.COUNTS)
    assert scans_the_ledger(ledger, "select state, count(*) from once_fenced_ledger group by state")


# --- facts ------------------------------------------------------------------------------------------------------------


def test_a_fresh_schema_lacks_nothing(ledger: Ledger) -> None:
    facts = ledger.store.facts()
    assert (facts.missing, facts.stale, facts.tables, facts.standby) == ((), (), (), False)
    assert facts.version >= 140000
    assert abs(facts.clock - time.time()) < 30


def test_functions_that_are_not_there_are_missing(bare: Ledger) -> None:
    assert set(bare.store.facts().missing) == set(function_hashes())
    bare.execute(schema_sql())
    bare.execute("drop function once_fenced_prune_v1")
    assert bare.store.facts().missing == ("once_fenced_prune_v1",)


def test_a_function_with_another_text_is_stale(ledger: Ledger) -> None:
    ledger.execute(
        "create or replace function once_fenced_timeline_v1() returns bigint language plpgsql stable"
        " set search_path from current as $$ begin return 0; end $$"
    )
    facts = ledger.store.facts()
    assert (facts.stale, facts.missing) == (("once_fenced_timeline_v1",), ())


def test_tables_with_a_guard_are_told_with_their_template(ledger: Ledger) -> None:
    ledger.execute("create table account (id bigint, region text, fence_token bigint)")
    ledger.execute(
        "create trigger zz_once_fenced before insert or update or delete on account for each row"
        " execute function once_fenced_guard_v1('require', 'account:', 'region', ':', 'id', '')"
    )
    assert ledger.store.facts().tables == (GuardedTable("account", "account:{}:{}", "require"),)


def test_rows_that_are_due_are_those_that_prune_deletes(ledger: Ledger) -> None:
    ledger.execute(WRITES)
    for _ in range(3):
        ledger.run(ledger.hold(operation()))
    ledger.execute("update once_fenced_ledger set retain_until = clock_timestamp() - interval '1 s'")
    ledger.hold(operation())
    assert ledger.store.due(3600.0) == 3
    assert ledger.store.prune(3600.0).entries == 3
    assert ledger.store.due(3600.0) == 0


def test_redis_tells_its_time(redis_url: str, namespace: str) -> None:
    store = RedisLeaseStore(redis_url, namespace=namespace)
    assert abs(store.server_clock() - time.time()) < 30
    store.close()


def test_a_reading_waits_for_a_busy_server_and_calls_do_not(redis_url: str, namespace: str) -> None:
    with (
        Celery("busy", broker="memory://", set_as_current=False) as app,
        redis.Redis.from_url(redis_url) as client,
    ):
        app.conf.once_fenced = {"redis_url": redis_url, "namespace": namespace, "socket_timeout": 0.2}
        runtime = runtime_of(app)
        client.client_pause(700)
        with pytest.raises(StoreUnavailableError):
            runtime.leases.stats()
        assert runtime.readings.stats() == {}
        runtime.close()


def test_a_reading_that_fails_does_not_let_calls_run_unguarded(redis_url: str, namespace: str) -> None:
    with Celery("failing", broker="memory://", set_as_current=False) as app:
        app.conf.once_fenced = {"redis_url": redis_url, "namespace": namespace}
        runtime = runtime_of(app)
        for _ in range(10):
            runtime.readings._link.breaker.failed()  # type: ignore[attr-defined]
        with pytest.raises(StoreUnavailableError):
            runtime.readings.stats()
        assert runtime.leases.stats() == {}
        runtime.close()
