"""One granted attempt over doubles: one commit, one block, and what may still happen before and after it (L8, L12, L13)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from celery_once_fenced.attempt import Attempt
from celery_once_fenced.errors import FencedOffError, GrantError
from celery_once_fenced.events import Event, observing
from celery_once_fenced.grant import Grant, current_grant
from celery_once_fenced.keepers import FenceKeeper
from celery_once_fenced.ledger import ResultOmitted
from celery_once_fenced.outbox import Outbox
from celery_once_fenced.stores import (
    Completion,
    EffectFinish,
    EffectStart,
    EffectStarted,
    Held,
    OutboxMessage,
)
from tests.fixtures.deliveries import (
    CODEC,
    Bench,
    ConnectionLostError,
    Database,
    Ledger,
    ManualClock,
    Post,
    Transaction,
    delivery,
    fenced,
)

NOT_RECORDED = ResultOmitted("not_recorded")


class Told(Ledger):
    """The bench's ledger, which also takes effects, results and messages."""

    recorded: list[Completion]
    committed: list[str]

    def effect_start(self, ask: EffectStart) -> EffectStarted:
        return EffectStarted("go", "dk", ask.held.holder)

    def effect_finish(self, ask: EffectFinish) -> bool:
        return True

    def record(self, held: Held, completion: Completion) -> bool:
        self._reached("record")
        self.recorded.append(completion)
        return True

    def outbox_mine(self, task_ids: Any) -> list[OutboxMessage]:
        return [OutboxMessage(one, one) for one in task_ids]

    def outbox_confirm(self, task_ids: Any) -> None: ...


class Watched(Transaction):
    def put(self, held: Held, task_id: str, message: str) -> None:
        self.connection.append(message)


class Connection(list[Any]):
    """As much of Django's connection as an effect is watched through."""

    @contextmanager
    def execute_wrapper(self, wrapper: Callable[..., Any]) -> Iterator[None]:
        self.wrapper = wrapper
        yield
        del self.wrapper

    def execute(self, sql: str) -> str:
        wrapper = getattr(self, "wrapper", None)
        return "done" if wrapper is None else str(wrapper(lambda *_: "done", sql, (), False, {}))


class Base(Database):
    @contextmanager
    def transaction(self, held: Held) -> Iterator[Transaction]:
        self.ledger.check(held)
        self.pending = Connection()
        transaction = Watched(self)
        yield transaction
        self.at("commit")
        transaction.commit()
        self.rows += self.pending


class Tried:
    """An attempt of a task with ``atomic=False``, and what became of it."""

    def __init__(self, **options: Any) -> None:
        self.clock = ManualClock()
        self.ledger = Told(self.clock)
        self.ledger.recorded = []
        self.database = Base(self.ledger)
        ex = delivery(policy=fenced(**{"atomic": False, **options}))
        bench = Bench()
        bench.ledger = self.ledger
        self.held: Held = bench.hold(ex, "me")
        self.keeper = FenceKeeper(self.ledger, clock=self.clock)  # type: ignore[arg-type]
        self.kept = self.keeper.granted(self.held, 60.0, sent=self.clock(), max_hold=None)
        self.events: list[Event] = []
        store: Any = self.ledger
        self.attempt = Attempt(
            ex,
            self.held,
            self.keeper,
            self.kept,
            ledger=store,
            database=self.database,  # type: ignore[arg-type]
            outbox=Outbox(store, Post()),
            codec=CODEC,
        )

    def run(self, body: Callable[[Grant], object]) -> Attempt:
        with observing(self.events.append):
            self.attempt.run(body)
        return self.attempt

    @property
    def state(self) -> str:
        return self.ledger.entry_of[self.held.operation.digest].state


def block(grant: Grant, *rows: object) -> None:
    with grant.atomic() as connection:
        connection.extend(rows)


# --- one block --------------------------------------------------------------------------------------------------------


def test_block_commits_with_the_ledger_and_the_result_is_added_after_the_body() -> None:
    tried = Tried()

    def body(grant: Grant) -> str:
        block(grant, "row")
        assert tried.state == "succeeded"
        assert tried.ledger.recorded == []
        return "receipt"

    attempt = tried.run(body)
    assert (attempt.value, tried.database.rows) == ("receipt", ["row"])
    assert [done.result for done in tried.ledger.recorded] == ['"receipt"']


def test_body_without_a_block_is_completed_after_it() -> None:
    tried = Tried()
    assert tried.run(lambda grant: "receipt").value == "receipt"
    assert (tried.state, tried.ledger.recorded) == ("succeeded", [])


def test_second_block_is_refused() -> None:
    tried = Tried()

    def body(grant: Grant) -> None:
        block(grant, "row")
        with pytest.raises(GrantError, match="commits once"):
            block(grant, "another")

    tried.run(body)
    assert tried.database.rows == ["row"]


def test_block_inside_a_block_is_refused_and_the_outer_one_goes_on() -> None:
    tried = Tried()

    def body(grant: Grant) -> None:
        with grant.atomic() as connection:
            with pytest.raises(GrantError, match="commits once"):
                block(grant, "inner")
            connection.append("outer")

    tried.run(body)
    assert tried.database.rows == ["outer"]


def test_block_that_rolled_back_is_not_opened_again() -> None:
    tried = Tried()

    def body(grant: Grant) -> None:
        with suppress(ZeroDivisionError), grant.atomic():
            raise ZeroDivisionError
        with pytest.raises(GrantError, match="commits once"):
            block(grant)

    tried.run(body)
    assert tried.database.rows == []


def test_body_that_decides_what_its_error_means_ends_as_it_says() -> None:
    tried = Tried()

    def body(grant: Grant) -> str:
        with suppress(ZeroDivisionError), grant.atomic():
            raise ZeroDivisionError
        return "sold out"

    assert tried.run(body).value == "sold out"
    assert tried.state == "succeeded"


@pytest.mark.parametrize("error", [ConnectionLostError(), FencedOffError("account:1", 1)])
def test_body_that_swallows_the_loss_of_its_block_is_not_done(error: Exception) -> None:
    tried = Tried()
    tried.database.fails["commit"] = error

    def body(grant: Grant) -> str:
        with suppress(type(error)):
            block(grant, "row")
        return "done"

    with pytest.raises(type(error)):
        tried.run(body)
    assert (tried.state, tried.database.rows) == ("running", [])


def test_block_is_refused_where_the_body_is_one_transaction() -> None:
    with pytest.raises(GrantError, match="atomic=False"):
        Tried(atomic=True).run(block)


def test_connection_of_the_block_is_the_grants() -> None:
    def body(grant: Grant) -> None:
        assert current_grant() is grant
        with grant.atomic() as connection:
            assert grant.connection is connection

    Tried().run(body)


# --- after the commit -------------------------------------------------------------------------------------------------


def test_error_after_the_block_leaves_a_marker_for_its_value() -> None:
    tried = Tried()

    def body(grant: Grant) -> None:
        block(grant, "row")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tried.run(body)
    assert (tried.attempt.committed, tried.attempt.value) == (True, NOT_RECORDED)


def test_result_that_cannot_be_added_is_still_returned_by_the_first_run() -> None:
    tried = Tried()
    tried.ledger.away.add("record")
    assert tried.run(lambda grant: block(grant) or "receipt").value == "receipt"
    assert [event.fields["operation"] for event in tried.events if event.name == "store.failed"] == ["record"]


def test_step_after_the_commit_is_refused_and_not_taken() -> None:
    def body(grant: Grant) -> None:
        block(grant)
        with pytest.raises(GrantError, match="after the commit"):
            grant.effect("gateway", lambda key: pytest.fail("it was taken"))

    Tried().run(body)


def test_fence_given_back_by_the_commit_is_not_lost() -> None:
    tried = Tried()

    def body(grant: Grant) -> None:
        block(grant)
        tried.kept.answered("lost", tried.clock())
        assert not grant.lost
        grant.check()
        assert tried.kept.over(tried.clock())
        tried.kept.gone()

    tried.run(body)
    assert [event.name for event in tried.events if event.name.startswith("fence.")] == []


def test_retry_after_the_commit_is_refused() -> None:
    def body(grant: Grant) -> None:
        grant._confirm()
        block(grant)
        with pytest.raises(GrantError, match="has committed"):
            grant._confirm()

    Tried().run(body)


# --- what is sent -----------------------------------------------------------------------------------------------------


def test_message_goes_out_with_the_commit() -> None:
    tried = Tried()

    def body(grant: Grant) -> str:
        with grant.atomic():
            sent = grant.send("signature")
            assert [event for event in tried.events if event.name == "message.published"] == []
        return sent

    attempt = tried.run(body)
    published = [event.fields["task_id"] for event in tried.events if event.name == "message.published"]
    assert published == [attempt.value]


def test_message_of_a_block_that_did_not_commit_stays() -> None:
    tried = Tried()

    def body(grant: Grant) -> None:
        with grant.atomic():
            grant.send("signature")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tried.run(body)
    assert [event for event in tried.events if event.name == "message.published"] == []


def test_sending_where_nothing_will_commit_is_refused() -> None:
    def body(grant: Grant) -> None:
        for _ in range(2):
            with pytest.raises(GrantError, match=r"with grant.atomic\(\)"):
                grant.send("signature")
            with suppress(GrantError):
                block(grant)

    Tried().run(body)


# --- the connection during a step (L13) -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sql", ["INSERT INTO t", "  update t set x = 1", "DELETE\nFROM t", "(insert into t)", "MERGE INTO t"]
)
def test_write_in_the_bodys_transaction_is_refused_during_a_step(sql: str) -> None:
    def body(grant: Grant) -> None:
        with pytest.raises(GrantError, match="'gateway' writes in the body's transaction"):
            grant.effect("gateway", lambda key: grant.connection.execute(sql))

    Tried(atomic=True).run(body)


def test_reading_there_is_allowed_and_writing_before_and_after() -> None:
    def body(grant: Grant) -> None:
        assert grant.connection.execute("insert into t") == "done"
        assert grant.effect("gateway", lambda key: grant.connection.execute("select 1")) == "done"
        assert grant.connection.execute("insert into t") == "done"

    Tried(atomic=True).run(body)


def test_step_outside_the_block_may_write_what_commits_by_itself() -> None:
    def body(grant: Grant) -> object:
        grant.connection = Connection()
        return grant.effect("gateway", lambda key: grant.connection.execute("insert into t"))

    assert Tried().run(body).value == "done"
