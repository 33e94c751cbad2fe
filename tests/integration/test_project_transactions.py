"""Bodies in transactions that the project opens: psycopg's own, and SQLAlchemy's sessions and connections (C14)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from celery_once_fenced.errors import ConfigError, FencedOffError, GrantError
from celery_once_fenced.stores import Held
from celery_once_fenced.stores.postgres_project import ProjectDatabase, ProjectTransaction
from example_project.servers import Servers
from tests.fixtures.ledger import DONE, Ledger, fresh, ledger_at, operation
from tests.fixtures.servers import fresh_database

Maker = Callable[[], AbstractContextManager[Any]]


class Base(DeclarativeBase):
    pass


class Note(Base):
    __tablename__ = "note"
    name: Mapped[str] = mapped_column(primary_key=True)


@pytest.fixture(scope="module")
def ledger(module_postgres_url: str) -> Iterator[Ledger]:
    with ledger_at(module_postgres_url) as opened:
        opened.execute("create table note (name text primary key)")
        yield opened


@pytest.fixture(scope="module")
def engine(ledger: Ledger) -> Iterator[Engine]:
    engine = create_engine(driver_url(ledger.url))
    yield engine
    engine.dispose()


def driver_url(url: str) -> str:
    return url.replace("postgresql://", "postgresql+psycopg://")


@pytest.fixture(scope="module")
def makers(ledger: Ledger, engine: Engine) -> Mapping[str, Maker]:
    @contextmanager
    def nested() -> Iterator[Any]:
        with psycopg.connect(ledger.url, autocommit=True) as connection, connection.transaction():
            yield connection

    return {
        "psycopg": partial(psycopg.connect, ledger.url),
        "psycopg's own block": nested,
        "psycopg with other rows": partial(
            psycopg.connect, ledger.url, row_factory=dict_row, cursor_factory=psycopg.RawCursor
        ),
        "sqlalchemy session": sessionmaker(engine).begin,
        "sqlalchemy connection": engine.begin,
    }


NAMES = (
    "psycopg",
    "psycopg's own block",
    "psycopg with other rows",
    "sqlalchemy session",
    "sqlalchemy connection",
)
each = pytest.mark.parametrize("name", NAMES)


def write(given: Any, name: str) -> None:
    """As the project's own code writes."""
    if isinstance(given, psycopg.Connection):
        psycopg.Cursor(given).execute("insert into note values (%s)", (name,))
    elif isinstance(given, Session):
        given.add(Note(name=name))
    else:
        given.execute(text("insert into note values (:name)"), {"name": name})


def written(ledger: Ledger, name: str) -> bool:
    return bool(ledger.execute("select 1 from note where name = %s", (name,)))


class Work:
    """A body of the project: a grant, a note, and the ledger's entry."""

    def __init__(self, ledger: Ledger, maker: Maker, database: ProjectDatabase | None = None) -> None:
        self.ledger = ledger
        self.database = database or ProjectDatabase(maker, ledger.url)
        self.held: Held = ledger.hold(operation())
        self.name = fresh("note")

    def run(
        self, *, meanwhile: Callable[[Any], object] = bool, finally_: Callable[[Any], object] = bool
    ) -> None:
        """Begin, write, what happens ``meanwhile``, complete, ``finally_``, COMMIT."""
        with self.database.transaction(self.held) as opened:
            write(opened.connection, self.name)
            meanwhile(opened)
            opened.complete(self.held, DONE)
            finally_(opened)

    @property
    def state(self) -> str:
        entry = self.ledger.store.look(self.held.operation.digest)
        return str(entry and entry["state"])

    @property
    def found(self) -> tuple[bool, str]:
        return written(self.ledger, self.name), self.state


NOTHING = (False, "running")


# --- together or not at all -------------------------------------------------------------------------------------------


@each
def test_writes_and_outcome_are_committed_together(
    ledger: Ledger, makers: Mapping[str, Maker], name: str
) -> None:
    work = Work(ledger, makers[name])
    work.run()
    assert work.found == (True, "succeeded")
    assert ledger.claim(work.held.operation).verdict == "completed"


def body_that_fails_after_complete_leaves_nothing(work: Work) -> None:
    with pytest.raises(ZeroDivisionError):
        work.run(finally_=lambda _: 1 / 0)
    assert work.found == NOTHING


@each
def test_body_that_fails_leaves_nothing(ledger: Ledger, makers: Mapping[str, Maker], name: str) -> None:
    body_that_fails_after_complete_leaves_nothing(Work(ledger, makers[name]))


class Beside(ProjectDatabase):
    """Broken on purpose: complete has a transaction of its own, beside that of the body's writes."""

    @contextmanager
    def transaction(self, held: Held) -> Iterator[Any]:
        with self._maker() as given:
            yield BesideTransaction(given, str(self._source))


class BesideTransaction(ProjectTransaction):
    def __init__(self, given: Any, url: str) -> None:
        super().__init__(given)
        self._url = url

    def complete(self, held: Held, completion: Any) -> None:
        with psycopg.connect(self._url) as connection:
            beside = ProjectTransaction(connection)
            beside.begin(held)
            beside.complete(held, completion)


def test_an_outcome_that_commits_beside_the_writes_is_caught(
    ledger: Ledger, makers: Mapping[str, Maker]
) -> None:
    maker = makers["sqlalchemy session"]
    with pytest.raises(AssertionError, match="succeeded"):
        body_that_fails_after_complete_leaves_nothing(Work(ledger, maker, Beside(maker, ledger.url)))


@each
def test_zombie_commits_nothing(ledger: Ledger, makers: Mapping[str, Maker], name: str) -> None:
    work = Work(ledger, makers[name])

    def taken_over(_: Any) -> None:
        ledger.expire(work.held.operation.resource)
        ledger.hold(work.held.operation)

    with pytest.raises(Exception) as refused:  # noqa: PT011  # each library has its own around the driver's
        work.run(meanwhile=taken_over)
    # Evicted in the middle, it has lost its connection: infrastructure, so the ledger is asked (C13).
    assert work.database.connection_lost(refused.value)
    assert work.found == NOTHING


@each
def test_zombie_does_not_even_begin(ledger: Ledger, makers: Mapping[str, Maker], name: str) -> None:
    work = Work(ledger, makers[name])
    ledger.expire(work.held.operation.resource)
    ledger.hold(work.held.operation)
    with pytest.raises(FencedOffError):
        work.run()
    assert work.found == NOTHING


def test_what_a_session_has_yet_to_write_is_written_before_complete(
    ledger: Ledger, makers: Mapping[str, Maker]
) -> None:
    taken, work = fresh("note"), Work(ledger, makers["sqlalchemy session"])
    ledger.execute("insert into note values (%s)", (taken,))
    work.name = taken
    completed: list[Any] = []
    with pytest.raises(IntegrityError):
        work.run(finally_=completed.append)
    assert (completed, work.state) == ([], "running")


@each
def test_message_is_there_if_and_only_if_the_body_commits(
    ledger: Ledger, makers: Mapping[str, Maker], name: str
) -> None:
    kept, lost = Work(ledger, makers[name]), Work(ledger, makers[name])
    kept.run(meanwhile=lambda opened: opened.put(kept.held, kept.name, "message"))
    with pytest.raises(ZeroDivisionError):
        lost.run(meanwhile=lambda opened: opened.put(lost.held, lost.name, "message") or 1 / 0)
    assert [one.task_id for one in ledger.store.outbox_mine([kept.name, lost.name])] == [kept.name]


def test_message_of_a_savepoint_that_is_rolled_back_is_not_sent(
    ledger: Ledger, makers: Mapping[str, Maker]
) -> None:
    work = Work(ledger, makers["sqlalchemy session"])

    def in_a_savepoint(opened: Any) -> None:
        with opened.connection.begin_nested() as savepoint:
            opened.put(work.held, work.name, "message")
            savepoint.rollback()

    work.run(meanwhile=in_a_savepoint)
    assert ledger.store.outbox_mine([work.name]) == []
    assert work.found == (True, "succeeded")


# --- the body ends the transaction ------------------------------------------------------------------------------------


@contextmanager
def as_you_go(engine: Engine) -> Iterator[Session]:
    """A session that begins another transaction when one is over."""
    with sessionmaker(engine)() as session:
        yield session
        session.commit()


@pytest.mark.parametrize("ends", ["commit", "rollback"])
@pytest.mark.parametrize("name", ["psycopg", "sqlalchemy session", "sqlalchemy connection", "as you go"])
def test_body_that_ends_its_transaction_is_refused(
    ledger: Ledger, engine: Engine, makers: Mapping[str, Maker], name: str, ends: str
) -> None:
    maker = partial(as_you_go, engine) if name == "as you go" else makers[name]
    work = Work(ledger, maker)
    with pytest.raises(GrantError, match="ended the transaction"):
        work.run(meanwhile=lambda opened: getattr(opened.connection, ends)())
    assert work.state == "running"


def test_connection_that_went_back_to_the_pool_is_not_touched(ledger: Ledger, engine: Engine) -> None:
    """Another thread has it by now, in a transaction of its own."""
    work, other = Work(ledger, partial(as_you_go, engine)), engine.connect()

    def lent(opened: Any) -> None:
        opened.connection.commit()
        nonlocal other
        other.close()
        other = engine.connect()
        other.execute(text("select 1"))

    with contextlib.closing(other), pytest.raises(GrantError):
        work.run(meanwhile=lent)
    other.close()
    assert work.state == "running"


# --- the connection is lost -------------------------------------------------------------------------------------------


@each
def test_loss_of_the_bodys_connection_is_known_as_such(
    ledger: Ledger, makers: Mapping[str, Maker], name: str
) -> None:
    work = Work(ledger, makers[name])

    def end_the_session(opened: Any) -> None:
        ledger.execute("select pg_terminate_backend(%s, 5000)", (opened.driver.info.backend_pid,))

    with pytest.raises(Exception) as lost:  # noqa: PT011  # each library has its own around the driver's
        work.run(meanwhile=end_the_session)
    assert work.database.connection_lost(lost.value)
    assert work.found == NOTHING


def test_loss_of_another_connection_is_not_the_bodys(ledger: Ledger, makers: Mapping[str, Maker]) -> None:
    work = Work(ledger, makers["sqlalchemy session"])

    def lose_another(_: Any) -> None:
        other = psycopg.connect(ledger.url)
        ledger.execute("select pg_terminate_backend(%s, 5000)", (other.info.backend_pid,))
        with contextlib.closing(other):
            other.execute("select 1")

    with pytest.raises(psycopg.OperationalError) as lost:
        work.run(meanwhile=lose_another)
    assert not work.database.connection_lost(lost.value)


def test_sessions_of_several_threads_are_their_own(ledger: Ledger, makers: Mapping[str, Maker]) -> None:
    database = ProjectDatabase(makers["sqlalchemy session"], ledger.url)
    works = [Work(ledger, makers["sqlalchemy session"], database) for _ in range(4)]
    met = threading.Barrier(len(works), timeout=10)
    threads = [
        threading.Thread(target=work.run, kwargs={"meanwhile": lambda _: met.wait()}) for work in works
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [work.found for work in works] == [(True, "succeeded")] * len(works)


# --- what cannot keep the promise -------------------------------------------------------------------------------------


def refused(ledger: Ledger, maker: Maker, said: str) -> None:
    work = Work(ledger, maker)
    with pytest.raises(ConfigError, match=said):
        work.run()
    assert work.state == "running"


def test_block_that_does_not_commit_is_refused(ledger: Ledger, engine: Engine) -> None:
    refused(ledger, sessionmaker(engine), "does not commit at the end of its block")


def test_autocommit_is_refused(ledger: Ledger, engine: Engine) -> None:
    refused(ledger, partial(psycopg.connect, ledger.url, autocommit=True), "in autocommit")
    refused(ledger, engine.execution_options(isolation_level="AUTOCOMMIT").begin, "in autocommit")


def test_another_isolation_level_is_refused(ledger: Ledger, engine: Engine) -> None:
    work = Work(ledger, engine.execution_options(isolation_level="REPEATABLE READ").begin)
    with pytest.raises(GrantError, match="READ COMMITTED"):
        work.run()


def test_another_database_is_refused(ledger: Ledger, servers: Servers) -> None:
    with fresh_database(servers) as url, ledger_at(url) as other:
        # It knows a grant of this name, too.
        work = Work(ledger, partial(psycopg.connect, other.url))
        other.execute(
            "insert into once_fenced_fence (resource, token, holder) values (%s, %s, %s)",
            (work.held.operation.resource, work.held.token, work.held.holder),
        )
        with pytest.raises(ConfigError, match="both must lead to the same tables"):
            work.run()


def test_another_driver_is_refused(ledger: Ledger) -> None:
    engine = create_engine("sqlite://")
    refused(ledger, engine.begin, "no connection of psycopg 3 is behind it")
    engine.dispose()


def test_block_that_swallows_errors_does_not_swallow_ours(ledger: Ledger) -> None:
    @contextmanager
    def swallowing() -> Iterator[Any]:
        with ExitStack() as stack, psycopg.connect(ledger.url) as connection:
            stack.callback(lambda: None)
            with contextlib.suppress(Exception), connection.transaction():
                yield connection

    work = Work(ledger, swallowing)
    with pytest.raises(ZeroDivisionError):
        work.run(meanwhile=lambda _: 1 / 0)
    assert work.found == NOTHING


# --- without a grant --------------------------------------------------------------------------------------------------


@each
def test_detached_block_is_the_projects_own(ledger: Ledger, makers: Mapping[str, Maker], name: str) -> None:
    database, note = ProjectDatabase(makers[name], ledger.url), fresh("note")

    def note_and(name: str, end: Callable[[], object]) -> None:
        with database.detached() as given:
            write(given, name)
            end()

    note_and(note, bool)
    with pytest.raises(ZeroDivisionError):
        note_and(f"{note} too", lambda: 1 / 0)
    assert (written(ledger, note), written(ledger, f"{note} too")) == (True, False)
