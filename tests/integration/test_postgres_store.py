"""Fence and ledger on a real PostgreSQL: frozen sessions, lost connections, roles, schemas, many at once."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote, urlsplit

import psycopg
import pytest

from celery_once_fenced.errors import ConfigError, FencedOffError, GrantError, StoreUnavailableError
from celery_once_fenced.stores import Held
from celery_once_fenced.stores.postgres import PostgresLedgerStore, is_connection_loss, schema_sql
from tests.fixtures.ledger import Body, Ledger, body, eventually, fresh, ledger_at, operation, parked
from tests.fixtures.proxy import TcpProxy

MakeProxy = Callable[[str], TcpProxy]

PROMPTLY = 1.0
"""Seconds: a claim that waited for a frozen row would take for ever, an eviction takes milliseconds."""


@pytest.fixture(scope="module")
def ledger(module_postgres_url: str) -> Iterator[Ledger]:
    with ledger_at(module_postgres_url) as opened:
        yield opened


@pytest.fixture
def own(postgres_url: str) -> Iterator[Ledger]:
    """A database of the test's own, for what changes more than its rows."""
    with ledger_at(postgres_url) as opened:
        yield opened


def seconds(action: Callable[[], object]) -> float:
    started = time.monotonic()
    action()
    return time.monotonic() - started


def with_options(url: str, options: str) -> str:
    return f"{url}{'&' if urlsplit(url).query else '?'}options={quote(options)}"


# --- frozen sessions (C9) ---------------------------------------------------------------------------------------------


def test_a_holder_frozen_before_commit_is_evicted_by_its_successor(ledger: Ledger) -> None:
    held = ledger.lapsed(operation())
    with parked(ledger.url, held) as zombie:
        assert seconds(lambda: ledger.run(ledger.hold(held.operation))) < PROMPTLY
        with pytest.raises(psycopg.Error) as refused:
            zombie.commit()
    assert is_connection_loss(refused.value)
    assert len(ledger.writes(held.operation)) == 1


def test_a_holder_frozen_in_its_body_gives_up_the_rows_it_locked(own: Ledger) -> None:
    own.execute("create table account (balance int); insert into account values (100)")
    held = own.lapsed(operation())
    with body(own.url, held) as zombie:
        zombie.connection.execute("update account set balance = balance - 1")
        successor = own.hold(held.operation)
        own.run(
            successor,
            meanwhile=lambda c: c.execute("set local lock_timeout = '1s'; update account set balance = 7"),
        )
    assert own.execute("select balance from account") == [(7,)]


def test_a_live_holder_in_its_commit_is_neither_waited_for_nor_evicted(ledger: Ledger) -> None:
    held = ledger.hold(operation())
    with parked(ledger.url, held) as live:
        answer: list[Any] = []
        assert seconds(lambda: answer.append(ledger.claim(held.operation))) < PROMPTLY
        assert (answer[0].verdict, answer[0].same_key) == ("busy", True)
        live.commit()
    assert ledger.claim(held.operation).verdict == "completed"


def test_only_the_lapsed_holder_is_evicted(ledger: Ledger) -> None:
    held, bystander = ledger.lapsed(operation()), ledger.lapsed(operation())
    with parked(ledger.url, held), parked(ledger.url, bystander) as unharmed:
        ledger.hold(held.operation)
        unharmed.commit()


def test_a_row_locked_by_a_stranger_makes_claim_busy_within_bounds(ledger: Ledger) -> None:
    held = ledger.lapsed(operation())
    with psycopg.connect(ledger.url) as stranger:
        stranger.execute(
            "select from once_fenced_fence where resource = %s for update", (held.operation.resource,)
        )
        answers: list[Any] = []
        assert seconds(lambda: answers.append(ledger.claim(held.operation))) < 4
    assert answers[0].verdict == "busy"


def test_abandon_of_a_row_locked_by_a_stranger_changes_nothing_and_says_so(ledger: Ledger) -> None:
    held = ledger.hold(operation())
    with psycopg.connect(ledger.url) as stranger:
        stranger.execute(
            "select from once_fenced_fence where resource = %s for update", (held.operation.resource,)
        )
        with pytest.raises(StoreUnavailableError, match="OF006"):
            ledger.abandon(held)
    assert ledger.abandon(held).state == "retryable"


def test_a_forced_release_ends_a_session_that_is_frozen_before_commit(ledger: Ledger) -> None:
    held = ledger.hold(operation())
    with parked(ledger.url, held) as frozen:
        assert ledger.store.force_release(held.operation.resource, held.holder, "stuck")
        with pytest.raises(psycopg.Error):
            frozen.commit()


def test_a_takeover_is_on_record_with_both_sides(ledger: Ledger) -> None:
    old = ledger.lapsed(operation(task_id="first"), worker="a@host")
    new = ledger.hold(operation(old.operation.key, task_id="second"), worker="b@host")
    assert ledger.execute(
        "select kind, old_task_id, task_id, old_worker, worker, old_token, token from once_fenced_event"
        " where key_digest = %s and old_holder = %s",
        (old.operation.digest, old.holder),
    ) == [("fence.taken_over", "first", "second", "a@host", "b@host", old.token, new.token)]


# --- renewal (C8) -----------------------------------------------------------------------------------------------------


def test_the_bodys_transaction_does_not_block_renewal(ledger: Ledger) -> None:
    held = ledger.hold(operation())
    with body(ledger.url, held) as running:
        assert ledger.renew(held) == ["renewed"]
        running.complete().commit()


def test_renewal_skips_a_busy_row_and_renews_the_others(ledger: Ledger) -> None:
    first, last = sorted(
        (ledger.hold(operation()) for _ in range(2)), key=lambda held: held.operation.resource
    )
    with parked(ledger.url, first):
        answers: list[str] = []
        assert seconds(lambda: answers.extend(ledger.renew(first, last))) < PROMPTLY
    assert answers == ["locked", "renewed"]


# --- connections lost around the commit (C13) -------------------------------------------------------------------------


def test_a_commit_whose_reply_was_lost_is_found_to_have_succeeded(
    ledger: Ledger, tcp_proxy: MakeProxy
) -> None:
    proxy, held = tcp_proxy(ledger.url), ledger.hold(operation())
    with parked(proxy.url, held) as cut:
        proxy.drop_reply_to(b"COMMIT")
        with pytest.raises(psycopg.OperationalError) as lost:
            cut.commit()
    assert is_connection_loss(lost.value)
    reply = ledger.abandon(held)
    assert (reply.state, reply.ours, reply.result) == ("succeeded", True, '"done"')
    assert ledger.writes(held.operation) == [held.token]


def test_a_commit_that_never_arrived_is_found_to_be_rolled_back(ledger: Ledger, tcp_proxy: MakeProxy) -> None:
    proxy, held = tcp_proxy(ledger.url), ledger.hold(operation())
    with parked(proxy.url, held) as cut:
        proxy.cut()
        with pytest.raises(psycopg.OperationalError):
            cut.commit()
        assert ledger.abandon(held).state == "retryable"
    assert ledger.writes(held.operation) == []


def test_a_server_session_that_outlives_its_client_is_ended_before_the_ledger_is_asked(
    ledger: Ledger,
) -> None:
    held = ledger.hold(operation())
    with parked(ledger.url, held) as unreachable:
        replies: list[Any] = []
        assert seconds(lambda: replies.append(ledger.abandon(held))) < PROMPTLY
        assert (replies[0].state, replies[0].fence_ours) == ("retryable", True)
        with pytest.raises(psycopg.OperationalError):
            unreachable.commit()
    assert ledger.hold(held.operation).attempt == 2


def test_a_zombie_does_not_wait_for_its_successors_commit_to_learn_of_it(ledger: Ledger) -> None:
    held = ledger.lapsed(operation())
    with parked(ledger.url, ledger.hold(held.operation)):
        replies: list[Any] = []
        assert seconds(lambda: replies.append(ledger.abandon(held))) < PROMPTLY
    assert replies[0].state == "taken_over"


def test_a_claim_whose_reply_is_lost_is_asked_again_on_a_new_connection(
    ledger: Ledger, tcp_proxy: MakeProxy
) -> None:
    proxy = tcp_proxy(ledger.url)
    through = Ledger(proxy.url)
    through.claim(operation())
    proxy.drop_reply_to(b"once_fenced_claim")
    claimed = through.claim(operation())
    assert proxy.dropped.is_set()
    assert (claimed.verdict, claimed.attempt) == ("granted", 1)
    through.close()


# --- a server that is away --------------------------------------------------------------------------------------------


def test_a_server_that_refuses_is_unavailable_at_once(ledger: Ledger, tcp_proxy: MakeProxy) -> None:
    proxy = tcp_proxy(ledger.url)
    proxy.cut()
    store = PostgresLedgerStore(proxy.url)
    with pytest.raises(StoreUnavailableError):
        store.find("anything")


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "connecting"])
def test_a_server_that_hangs_is_unavailable_within_the_bound(
    ledger: Ledger, tcp_proxy: MakeProxy, connected: bool
) -> None:
    proxy = tcp_proxy(ledger.url)
    store = PostgresLedgerStore(proxy.url, timeout=0.3)
    if connected:
        store.find("anything")
    proxy.hang()

    def ask() -> None:
        with pytest.raises(StoreUnavailableError):
            store.find("anything")

    assert seconds(ask) < (1.0 if connected else 3.0)
    proxy.resume()
    assert store.find("anything") is None
    store.close()


def test_connections_that_broke_while_idle_are_replaced(ledger: Ledger) -> None:
    ledger.claim(operation())
    ledger.execute(
        "select pg_terminate_backend(pid, 1000) from pg_stat_activity"
        " where datname = current_database() and application_name = 'celery_once_fenced'"
    )
    assert ledger.claim(operation()).verdict == "granted"
    ledger.run(ledger.hold(operation()))


def test_an_error_says_what_to_do_and_holds_no_secret(postgres_url: str) -> None:
    with pytest.raises(StoreUnavailableError, match=r"manage\.py migrate"):
        PostgresLedgerStore(postgres_url).find("anything")
    with pytest.raises(StoreUnavailableError) as wrong:
        PostgresLedgerStore("host=localhost passwort=swordfish").find("anything")
    assert "swordfish" not in str(wrong.value)


def test_a_statement_timeout_of_the_body_is_no_loss_of_its_connection(ledger: Ledger) -> None:
    held = ledger.hold(operation())
    with pytest.raises(psycopg.errors.QueryCanceled) as slow:
        ledger.run(
            held, meanwhile=lambda c: c.execute("set local statement_timeout = 20; select pg_sleep(5)")
        )
    assert not ledger.database.connection_lost(slow.value)


def test_an_idle_transaction_that_the_server_ended_is_a_loss_whatever_the_body_made_of_it(
    ledger: Ledger,
) -> None:
    held = ledger.hold(operation())

    def dawdle(connection: psycopg.Connection[Any]) -> None:
        connection.execute("set local idle_in_transaction_session_timeout = 10")
        pid = connection.info.backend_pid
        eventually(lambda: not ledger.execute("select 1 from pg_stat_activity where pid = %s", (pid,)))
        try:
            connection.execute("select 1")
        except psycopg.Error:
            raise ValueError("the body's own words") from None

    with pytest.raises(ValueError, match="own words") as error:
        ledger.run(held, meanwhile=dawdle)
    assert ledger.database.connection_lost(error.value)


# --- connections of our own (C8) --------------------------------------------------------------------------------------


def test_a_process_never_uses_more_connections_than_it_was_given(own: Ledger) -> None:
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda _: own.claim(operation()), range(64)))
    found = own.execute(
        "select count(*) from pg_stat_activity"
        " where datname = current_database() and application_name = 'celery_once_fenced'"
    )
    assert 1 <= found[0][0] <= 4


def test_idle_connections_are_closed(ledger: Ledger) -> None:
    store = PostgresLedgerStore(f"{ledger.url}?application_name=idle_test", idle=0.01)
    count = "select count(*) from pg_stat_activity where application_name = 'idle_test'"
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(store.find, "abc"))
    time.sleep(0.02)
    store.find("d")
    assert eventually(lambda: ledger.execute(count) == [(1,)])
    store.close()


# --- what the tables take ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        "update once_fenced_ledger set state = 'done'",
        "update once_fenced_ledger set key_digest = 'short'",
        "update once_fenced_fence set resource = ''",
        "update once_fenced_fence set resource = repeat('x', 256)",
        "insert into once_fenced_effect select key_digest, 'step', 'begun', 1, '', '', 1 from once_fenced_ledger",
    ],
)
def test_a_row_that_no_function_would_write_is_refused(ledger: Ledger, change: str) -> None:
    ledger.hold(operation())
    with pytest.raises(psycopg.errors.CheckViolation):
        ledger.execute(change)


def test_rows_are_found_by_their_index(own: Ledger) -> None:
    own.hold(operation())
    for table, column, value in (("fence", "resource", "'a'::text"), ("ledger", "key_digest", "'a'::bytea")):
        with psycopg.connect(own.url, autocommit=True) as connection:
            connection.execute("set enable_seqscan = off")
            plan = connection.execute(
                f"explain select from once_fenced_{table} where {column} = {value}"
            ).fetchall()
        assert "Index Cond" in str(plan)


# --- prepared statements (C8) -----------------------------------------------------------------------------------------


def test_statements_are_prepared_on_a_server_of_ones_own(own: Ledger) -> None:
    for _ in range(10):
        own.run(own.hold(operation()))
    with own.database.transaction(own.hold(operation())) as body:
        found = body.connection.execute("select statement from pg_prepared_statements").fetchall()
    prepared = "".join(statement for (statement,) in found)
    assert "once_fenced_begin_v1" in prepared
    assert "once_fenced_complete_v1" in prepared


def test_what_was_to_be_prepared_after_an_error_is_prepared_the_next_time(own: Ledger) -> None:
    with pytest.raises(GrantError):
        own.run(own.hold(operation()), meanwhile=lambda c: c.execute("reset once_fenced.holder"))
    own.run(own.hold(operation()))


def test_a_body_may_roll_back_to_its_savepoints_and_change_tables(own: Ledger) -> None:
    """For which psycopg forgets what it has prepared, at the next statement and by DEALLOCATE ALL."""

    def change(connection: Any) -> None:
        connection.execute("savepoint s")
        connection.execute("create table tried (i int)")
        connection.execute("rollback to s")
        for _ in range(10):
            connection.execute("select 1")

    for _ in range(3):
        held = own.hold(operation())
        own.run(held, meanwhile=change)
        assert own.claim(held.operation).verdict == "completed"


def test_a_body_that_deallocates_what_is_prepared_loses_its_connection_and_runs_on_the_next(
    own: Ledger,
) -> None:
    def deallocate(connection: Any) -> None:
        connection.execute("deallocate all")

    own.run(own.hold(operation()))
    with pytest.raises(psycopg.errors.InvalidSqlStatementName) as lost:
        own.run(own.hold(operation()), meanwhile=deallocate)
    assert own.database.connection_lost(lost.value)
    own.run(own.hold(operation()), meanwhile=deallocate)


def test_a_body_gets_over_a_migration_of_what_it_reads(own: Ledger) -> None:
    own.execute("create table price (amount int); insert into price values (7)")

    def read(connection: Any) -> None:
        assert connection.execute("select * from price").fetchone()[0] == 7

    for _ in range(10):
        own.run(own.hold(operation()), meanwhile=read)
    own.execute("alter table price add currency text default 'EUR'")
    own.run(own.hold(operation()), meanwhile=read)


FORKING = """
import os, sys
from tests.fixtures.ledger import Ledger, operation
ledger = Ledger(sys.argv[1])
ledger.run(ledger.hold(operation()))
child = os.fork()
ledger.run(ledger.hold(operation()))
if child:
    assert os.waitpid(child, 0)[1] == 0
    ledger.run(ledger.hold(operation()))
"""


def test_a_forked_child_leaves_its_parents_connections_alone(ledger: Ledger) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", FORKING, ledger.url], check=True, timeout=30)
    pids = "select count(distinct holder) from writes"
    assert ledger.execute(pids)[0][0] >= 4


# --- roles, schemas, settings -----------------------------------------------------------------------------------------


def test_an_unprivileged_role_is_enough(own: Ledger, servers: Any) -> None:
    role = fresh("role").replace(":", "_")
    own.execute(f"create role {role} login")
    own.execute(f"grant select, insert, update, delete on all tables in schema public to {role}")
    own.execute("revoke execute on function pg_walfile_name(pg_lsn) from public")
    as_role = Ledger(
        urlsplit(own.url)._replace(netloc=f"{role}@{urlsplit(own.url).netloc.rpartition('@')[2]}").geturl()
    )
    try:
        held = as_role.lapsed(operation())
        with parked(as_role.url, held):
            as_role.run(as_role.hold(held.operation))
        assert as_role.abandon(held).state == "succeeded"
        assert as_role.renew(held) == ["lost"]
        assert own.execute("select timeline, epoch from once_fenced_epoch") == [(0, 0)]
    finally:
        as_role.close()
        own.execute(f"drop owned by {role}; drop role {role}")


def test_a_superusers_session_is_not_ours_to_end(own: Ledger) -> None:
    own.execute("create role plain")
    try:
        with (
            psycopg.connect(own.url, application_name="once_fenced:h") as theirs,
            psycopg.connect(own.url) as ours,
        ):
            ours.execute("grant postgres to plain; set role plain")
            assert ours.execute("select once_fenced_evict_v1('h')").fetchone() == (0,)
            ours.rollback()
            theirs.execute("select 1")
    finally:
        own.execute("drop role plain")


def test_a_schema_of_its_own_needs_no_help_from_the_caller(postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as connection:
        connection.execute("create schema once; set search_path = once")
        connection.execute(schema_sql())
        connection.execute("set search_path = public; select once.once_fenced_prune_v1(0, 10)")
    with ledger_at(with_options(postgres_url, "-csearch_path=once")) as ledger:
        ledger.run(ledger.hold(operation()))


def test_the_script_may_run_again(own: Ledger) -> None:
    held = own.hold(operation())
    own.execute(schema_sql())
    own.run(held)


def test_a_role_with_a_stricter_isolation_level_is_served_at_read_committed(ledger: Ledger) -> None:
    strict = Ledger(with_options(ledger.url, "-cdefault_transaction_isolation=serializable"))
    held = strict.hold(operation())
    strict.run(held)
    assert strict.claim(held.operation).verdict == "completed"
    strict.close()


def test_a_body_at_another_isolation_level_is_refused_at_its_begin(ledger: Ledger) -> None:
    held = ledger.hold(operation())
    unready = Body(ledger.url, held)
    unready.connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    with pytest.raises(psycopg.Error) as refused:
        unready.begin()
    unready.close()
    assert refused.value.sqlstate == "OF004"


@pytest.mark.parametrize(
    ("setting", "at_commit"),
    [("off", "on"), ("local", "on"), ("remote_write", "on"), ("remote_apply", "remote_apply")],
)
def test_complete_commits_durably(ledger: Ledger, setting: str, at_commit: str) -> None:
    with parked(
        with_options(ledger.url, f"-csynchronous_commit={setting}"), ledger.hold(operation())
    ) as done:
        assert done.connection.execute("show synchronous_commit").fetchone() == (at_commit,)
        done.connection.rollback()
        assert done.connection.execute("show synchronous_commit").fetchone() == (setting,)


def test_what_begin_sets_ends_with_the_transaction(ledger: Ledger) -> None:
    held = ledger.hold(operation())
    with parked(ledger.url, held) as done:
        done.commit()
        left = done.connection.execute(
            "select current_setting('once_fenced.token', true), current_setting('application_name')"
        ).fetchone()
    assert left is not None
    assert left[0] in (None, "")
    assert not left[1].startswith("once_fenced:")


def test_another_timeline_never_issues_a_token_again(own: Ledger) -> None:
    held = own.hold(operation())
    own.run(held)
    own.execute(
        "update once_fenced_epoch set timeline = timeline + 1"
    )  # as if another server had been the last one
    other = own.hold(operation(resource=held.operation.resource))
    assert other.token > 1 << 44 > held.token
    own.run(other)
    assert own.hold(operation(resource=held.operation.resource)).token == other.token + 1


def test_the_epoch_row_is_made_again_when_a_test_runner_flushed_it(own: Ledger) -> None:
    own.execute("truncate once_fenced_epoch")
    own.run(own.hold(operation()))
    own.execute("truncate once_fenced_epoch")
    assert own.store.prune(-1).fences == 1
    assert own.execute("select floor > 0 from once_fenced_epoch") == [(True,)]


def token_of_a_claim_that_a_prune_overtakes(own: Ledger) -> tuple[int, int]:
    """Between the count of a new resource's token and the write of its row: the floor then, and the token."""
    own.run(own.hold(operation()))
    with psycopg.connect(own.url) as pruning, ThreadPoolExecutor(1) as thread:
        pruning.execute("lock table once_fenced_fence in share mode")
        claiming = thread.submit(own.hold, operation())
        eventually(lambda: own.execute("select 1 from pg_locks where not granted"))
        (floor,) = pruning.execute(
            "update once_fenced_epoch set floor = floor + 100 returning floor"
        ).fetchone() or (0,)
        pruning.commit()
        return floor, claiming.result(timeout=10).token


def test_a_floor_that_rises_before_a_new_row_is_written_counts(own: Ledger) -> None:
    floor, token = token_of_a_claim_that_a_prune_overtakes(own)
    assert token > floor


def test_a_claim_that_counts_once_is_caught(postgres_url: str) -> None:
    once = schema_sql().replace("if again <> higher then", "if false then")
    with ledger_at(postgres_url, once) as own:
        floor, token = token_of_a_claim_that_a_prune_overtakes(own)
    assert token < floor


# --- many at once -----------------------------------------------------------------------------------------------------


def test_of_many_claims_at_once_one_is_granted(ledger: Ledger) -> None:
    resource = fresh("account")
    together = threading.Barrier(8)

    def claim(number: int) -> str:
        together.wait()
        return ledger.claim(operation(f"{resource} {number}", resource)).verdict

    with ThreadPoolExecutor(8) as threads:
        assert sorted(threads.map(claim, range(8))) == ["busy"] * 7 + ["granted"]


def test_many_workers_on_few_resources_run_every_key_once_without_deadlock(own: Ledger) -> None:
    keys = [operation(f"key {number}", f"account {number % 3}") for number in range(48)]

    def work(seed: int) -> None:
        for op in random.Random(seed).sample(keys, len(keys)):
            finish(own, op)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert own.execute("select count(*), count(distinct key_digest) from writes") == [(48, 48)]
    tokens = own.execute("select resource, count(*), count(distinct token) from writes group by 1")
    assert all(count == distinct for _, count, distinct in tokens)


def finish(ledger: Ledger, op: Any) -> None:
    def step() -> bool:
        claimed = ledger.claim(op, holder := fresh("holder"))
        if claimed.verdict == "granted" and claimed.token is not None:
            ledger.run(Held(op, holder, claimed.token, claimed.attempt))
        return claimed.verdict in ("granted", "completed")

    eventually(step, within=30)


def test_takeovers_at_full_speed_never_let_a_stale_write_through(own: Ledger) -> None:
    resource = "account"

    def work(number: int) -> None:
        for turn in range(12):
            held = own.hold(operation(f"{number} {turn}", resource), lease=0.001)
            try:
                own.run(held)
            except (FencedOffError, psycopg.Error, StoreUnavailableError, GrantError):
                own.abandon(held)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    found = own.execute(
        "select count(*) - count(distinct token), count(*) - count(distinct key_digest) from writes"
    )
    assert found == [(0, 0)]


# --- the driver -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["3.1.20", "3.2.9", "3.2.10"])
def test_a_driver_that_waits_without_end_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(psycopg, "__version__", version)
    with pytest.raises(ConfigError, match=r"install psycopg 3\.2\.11"):
        PostgresLedgerStore("")


@pytest.mark.parametrize("version", ["3.2.11", "3.3.0.dev1", "4.0"])
def test_later_drivers_are_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(psycopg, "__version__", version)
    PostgresLedgerStore("").close()
