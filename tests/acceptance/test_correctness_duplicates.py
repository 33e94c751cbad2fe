"""What the duplicate of a finished key costs the database: one read, no write, no lock.

The server counts: ``pg_stat_statements`` each statement, those inside functions too, and the transaction ids that were
given out: one goes to every transaction that writes or locks a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from django.core.management import call_command

from celery_once_fenced.errors import StoreUnavailableError
from celery_once_fenced.stores import Held
from celery_once_fenced.stores.postgres import schema_sql
from example_project.servers import Servers, start_postgres
from tests.acceptance.correctness_posting import Posting, has_one_effect
from tests.acceptance.correctness_site import ShopSite
from tests.acceptance.workers import eventually
from tests.fixtures.django_project import database_at
from tests.fixtures.ledger import Ledger, operation

COUNTING = {
    "shared_preload_libraries": "pg_stat_statements",
    "pg_stat_statements.track": "all",
    "autovacuum": "off",
}
READ = "select * from once_fenced_ledger where key_digest = p_digest"
TABLES = "once_fenced_fence, once_fenced_ledger, once_fenced_effect, once_fenced_event, once_fenced_outbox"
# Broken on purpose: claims that ask under a lock, write what they answered, or look for effects that nobody asks for.
ANSWER = "select * into l from once_fenced_ledger where key_digest = p_digest;"
CAREFUL = (ANSWER, ANSWER.replace(";", " for no key update;"))
COUNTS = (
    ANSWER,
    f"{ANSWER} update once_fenced_ledger set takeovers = takeovers where key_digest = p_digest;",
)
LOOKS = (
    "if known and (verdict is null or verdict = 'in_doubt' or l.error like '%OutcomeUnknownError%') then",
    "if true then",
)


@dataclass
class Seen:
    """What a server was asked of the plugin's, and how many transactions have written or locked a row."""

    asked: list[str] = field(default_factory=list)
    """What came from outside."""
    read: list[str] = field(default_factory=list)
    """What was done for it, inside functions."""
    transactions: int = 0


class Counting(Ledger):
    """A database whose server counts."""

    def transactions(self) -> int:
        ((next_one,),) = self.execute("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
        return int(next_one)

    @contextmanager
    def watched(self) -> Iterator[Seen]:
        """What was asked within the block.  Sweeps of the outbox are a worker's own, whatever it is sent."""
        seen, before = Seen(), self.transactions()
        self.execute("select pg_stat_statements_reset()")
        yield seen
        rows = self.execute(
            "select toplevel, query, calls from pg_stat_statements"
            " where query ~ 'once_fenced_' and query !~ 'outbox|pg_stat_statements' and dbid ="
            " (select oid from pg_database where datname = current_database())"
        )
        for toplevel, query, calls in rows:
            (seen.asked if toplevel else seen.read).extend([" ".join(query.split())] * calls)
        seen.transactions = self.transactions() - before

    @contextmanager
    def with_claim(self, old: str, new: str) -> Iterator[None]:
        """The functions with something in them changed."""
        assert old in schema_sql()
        self.execute(schema_sql().replace(old, new))
        yield
        self.execute(schema_sql())


@pytest.fixture(scope="module")
def ledger() -> Iterator[Counting]:
    with ExitStack() as stack:
        server = stack.enter_context(start_postgres(COUNTING))
        stack.enter_context(database_at(server.url))
        call_command("migrate", verbosity=0, interactive=False)
        ledger = stack.enter_context(closing(Counting(server.url, timeout=2.0)))
        ledger.execute("create extension pg_stat_statements")
        ledger.execute("create table writes (resource text, token bigint, key_digest bytea, holder text)")
        yield ledger


@pytest.fixture(scope="module")
def site(servers: Servers, ledger: Counting) -> Iterator[ShopSite]:
    site = ShopSite.on(servers.redis_url, ledger.url)
    with closing(site), site.worker(concurrency=1):
        yield site


# --- the store --------------------------------------------------------------------------------------------------------


def succeeded(ledger: Ledger) -> Held:
    held = ledger.hold(operation())
    ledger.run(held)
    return held


def failed(ledger: Ledger) -> Held:
    held = ledger.hold(operation())
    ledger.abandon(held, state="failed")
    return held


FINISHED: dict[str, Callable[[Ledger], Held]] = {"completed": succeeded, "failed_final": failed}


def duplicate_is_answered_by_one_read(ledger: Counting, verdict: str) -> None:
    held = FINISHED[verdict](ledger)
    with ledger.watched() as seen:
        assert ledger.claim(held.operation).verdict == verdict
    assert len(seen.asked) == 1
    assert seen.read == [READ], f"read {seen.read}"
    assert seen.transactions == 0, "it wrote, or locked a row"


@pytest.mark.parametrize("verdict", FINISHED)
def test_duplicate_is_answered_by_one_read(ledger: Counting, verdict: str) -> None:
    duplicate_is_answered_by_one_read(ledger, verdict)


@pytest.mark.parametrize(
    ("change", "what"), [(CAREFUL, "for no key update"), (COUNTS, "update once_fenced"), (LOOKS, "_effect")]
)
def test_answer_that_does_more_is_caught(ledger: Counting, change: tuple[str, str], what: str) -> None:
    with ledger.with_claim(*change), pytest.raises(AssertionError, match=what):
        duplicate_is_answered_by_one_read(ledger, "completed")


def test_first_call_of_a_key_is_no_read(ledger: Counting) -> None:
    with ledger.watched() as seen:
        ledger.hold(operation())
    assert seen.transactions == 1


def duplicate_is_answered_while_only_readers_get_in(ledger: Counting, verdict: str) -> None:
    """EXCLUSIVE conflicts with every lock of a table, and so of its rows, but that of a plain read."""
    held = FINISHED[verdict](ledger)
    with psycopg.connect(ledger.url) as other:
        other.execute(f"lock table {TABLES} in exclusive mode")
        assert ledger.claim(held.operation).verdict == verdict


@pytest.mark.parametrize("verdict", FINISHED)
def test_duplicate_is_answered_while_only_readers_get_in(ledger: Counting, verdict: str) -> None:
    duplicate_is_answered_while_only_readers_get_in(ledger, verdict)


def test_answer_that_takes_a_lock_is_caught(ledger: Counting) -> None:
    with ledger.with_claim(*CAREFUL), pytest.raises(StoreUnavailableError):
        duplicate_is_answered_while_only_readers_get_in(ledger, "completed")


# --- a worker ---------------------------------------------------------------------------------------------------------


def replay_is_one_read(ledger: Counting, posting: Posting) -> None:
    first = posting.value()
    eventually(posting.site.idle)
    with ledger.watched() as seen:
        assert posting.again().get(timeout=10) == first
        eventually(posting.site.idle)
    assert seen.transactions == 0, "it wrote, or locked a row"
    assert (len(seen.asked), seen.read) == (1, [READ])


def test_replay_is_one_read(ledger: Counting, site: ShopSite) -> None:
    posting = site.posting()
    replay_is_one_read(ledger, posting)
    assert posting.runs == 1
    has_one_effect(posting)


@pytest.mark.parametrize("change", [CAREFUL, COUNTS], ids=["locks", "writes"])
def test_replay_that_does_more_is_caught(ledger: Counting, site: ShopSite, change: tuple[str, str]) -> None:
    with ledger.with_claim(*change), pytest.raises(AssertionError, match="it wrote, or locked a row"):
        replay_is_one_read(ledger, site.posting())


def test_a_task_without_a_ledger_is_caught(ledger: Counting, site: ShopSite) -> None:
    posting: Any = site.posting(variant="unguarded")
    with pytest.raises(AssertionError):
        replay_is_one_read(ledger, posting)
