"""A standby is promoted while the old primary keeps serving its clients: tokens never go back (C2, C12).

One failover for all tests.  The released rules and the naive ones are in two databases of the same cluster, so both live
through the same: some tokens that the standby has received, some that it has not, its promotion, and meanwhile and
afterwards more tokens of the old primary, whose clients have noticed nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import psycopg
import pytest

from celery_once_fenced.errors import FencedOffError
from celery_once_fenced.stores import EffectStart, Held
from celery_once_fenced.stores.postgres import schema_sql
from example_project.servers import PostgresServer, Servers, start_postgres
from tests.fixtures.ledger import Ledger, body, eventually, fresh, ledger_at, operation

EPOCH = "((e.epoch - 1) << 44) + 1"
NEVER = 3600.0


class Standby(PostgresServer):
    """Follows ``primary`` from a base backup of it, until it is promoted."""

    def __init__(self, primary: PostgresServer) -> None:
        super().__init__()
        self.primary = primary
        self.binaries = primary.binaries

    def prepare(self) -> None:
        backup = [str(self.binaries / "pg_basebackup"), "-D", str(self.data), "-d", self.primary.url]
        if self._watchdog.ask(
            "run", argv=[*backup, "-R", "-c", "fast", "-X", "stream"], log=str(self.log_path)
        ):
            raise self._failure()

    def promote(self) -> None:
        """Returns when it takes writes."""
        promote = [str(self.binaries / "pg_ctl"), "promote", "-D", str(self.data), "-w"]
        if self._watchdog.ask("run", argv=promote, log=str(self.log_path)):
            raise self._failure()


class Client:
    """A client of the old primary that takes one token after the other for a resource."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.resource = fresh("account")
        self.tokens: list[int] = []

    def take(self) -> None:
        held = self.ledger.hold(operation(resource=self.resource))
        self.ledger.run(held)
        self.tokens.append(held.token)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """It goes on taking tokens beside the block."""
        over = threading.Event()
        thread = threading.Thread(target=self._take_until, args=(over,))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _take_until(self, over: threading.Event) -> None:
        while not over.is_set():
            self.take()


@dataclass
class Side:
    """One database, as the old primary and the new one have it."""

    old: Ledger
    new: Ledger
    client: Client
    unseen: Held
    """Granted by the old primary alone, and never finished."""

    def token_on_the_new_timeline(self) -> int:
        held = self.new.hold(operation(resource=self.client.resource))
        self.new.run(held)
        return held.token


@pytest.fixture(scope="module")
def sides() -> Iterator[dict[str, Side]]:
    """Both databases after the failover."""
    with contextlib.ExitStack() as stack:
        primary = stack.enter_context(start_postgres())
        olds = {name: stack.enter_context(_database(primary, name)) for name in ("released", "naive")}
        clients = {name: Client(old) for name, old in olds.items()}
        for client in clients.values():
            client.take()
        standby = stack.enter_context(Standby(primary).open())
        _cut_off(primary, standby)
        unseen = {name: old.hold(operation(), lease=NEVER) for name, old in olds.items()}
        with clients["released"].at_work(), clients["naive"].at_work():
            standby.promote()
        for client in clients.values():
            client.take()
        yield {
            name: Side(old, stack.enter_context(_same_on(standby, name)), clients[name], unseen[name])
            for name, old in olds.items()
        }


@contextlib.contextmanager
def _database(server: PostgresServer, name: str) -> Iterator[Ledger]:
    url = Servers("", server.url).create_database(name)
    script = schema_sql()
    assert EPOCH in script
    with ledger_at(url, script if name == "released" else script.replace(EPOCH, "0")) as ledger:
        yield ledger


@contextlib.contextmanager
def _same_on(standby: Standby, name: str) -> Iterator[Ledger]:
    with contextlib.closing(Ledger(urlsplit(standby.url)._replace(path=f"/{name}").geturl())) as ledger:
        yield ledger


def _cut_off(primary: PostgresServer, standby: Standby) -> None:
    """What the primary commits from now on does not reach the standby."""
    with psycopg.connect(standby.url, autocommit=True) as connection:
        connection.execute("alter system set primary_conninfo = ''")
        connection.execute("select pg_reload_conf()")
    with psycopg.connect(primary.url, autocommit=True) as connection:
        followers = "select count(*) from pg_stat_replication"
        eventually(lambda: connection.execute(followers).fetchone() == (0,), within=10)


def test_the_two_servers_write_different_timelines(sides: dict[str, Side]) -> None:
    timeline = "select once_fenced_timeline_v1()"
    assert sides["released"].old.execute(timeline) == [(1,)]
    assert sides["released"].new.execute(timeline) == [(2,)]


def test_tokens_on_the_new_timeline_are_higher_than_all_of_the_old_primary(sides: dict[str, Side]) -> None:
    side = sides["released"]
    first, second = side.token_on_the_new_timeline(), side.token_on_the_new_timeline()
    side.client.take()
    assert second > first > max(side.client.tokens)
    assert len(side.client.tokens) > 3, "the old primary issued nothing while the standby was promoted"


def test_without_the_epoch_the_new_timeline_issues_tokens_again(sides: dict[str, Side]) -> None:
    side = sides["naive"]
    assert side.token_on_the_new_timeline() in side.client.tokens


def test_a_grant_that_only_the_old_primary_knows_neither_begins_nor_completes(sides: dict[str, Side]) -> None:
    side = sides["released"]
    with pytest.raises(psycopg.Error) as refused, body(side.new.url, side.unseen):
        """Refused before it writes."""
    assert refused.value.sqlstate == "OF001"
    with pytest.raises(FencedOffError):
        side.new.run(side.unseen)
    assert side.new.writes(side.unseen.operation) == []


def test_a_grant_that_only_the_old_primary_knows_is_not_renewed_and_starts_no_effect(
    sides: dict[str, Side],
) -> None:
    side = sides["released"]
    assert side.new.renew(side.unseen) == ["lost"]
    assert side.new.store.effect_start(EffectStart(side.unseen, "gateway", "hold", None)).verdict == "fenced"


def test_the_same_operation_is_granted_anew_and_the_old_holder_stays_out(sides: dict[str, Side]) -> None:
    side = sides["released"]
    held = side.new.hold(side.unseen.operation)
    assert held.token > side.unseen.token
    with pytest.raises(FencedOffError):
        side.new.run(side.unseen)
    side.new.run(held)
    assert side.new.writes(held.operation) == [held.token]
