"""The test kit in the correctness tier: the project's own database, inside a test's transaction and outside of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from django.db import DatabaseError, connection, transaction
from django.test import TestCase

from celery_once_fenced import (
    FencedTask,
    GrantError,
    InDoubtError,
    KeyReusedError,
    Once,
    SingletonTask,
    forget,
    resolve,
)
from celery_once_fenced.runtime import runtime_of
from celery_once_fenced.testing import (
    EagerError,
    Enforced,
    assert_free,
    assert_held,
    assert_suppressed,
    enforce_once,
)
from tests.fixtures.fenced_app.models import Plain, Vault
from tests.fixtures.fencing import sql
from tests.fixtures.ledger import eventually, ledger_at

NOWHERE = "redis://127.0.0.1:1/0"


@pytest.fixture(params=["TestCase", "committed"])
def around(request: pytest.FixtureRequest, fenced: str) -> Iterator[str]:
    """As Django's TestCase does it, in a transaction that is rolled back; or in none."""
    if request.param == "committed":
        yield request.param
        return
    atomics = TestCase._enter_atomics()
    try:
        yield request.param
    finally:
        TestCase._rollback_atomics(atomics)


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("kit", broker=NOWHERE, backend=NOWHERE)
    app.conf.once_fenced = {"redis_url": NOWHERE, "namespace": "kit", "database": "default"}
    app.set_current()
    yield app
    app.close()


@pytest.fixture
def once(app: Celery, around: str) -> Iterator[Enforced]:
    with enforce_once(app) as once:
        yield once


@pytest.fixture
def row(around: str) -> Plain:
    made: Plain = Plain.objects.create(balance=100)
    return made


@pytest.fixture
def declare(app: Celery, row: Plain) -> Callable[..., Any]:
    """Declares a task whose key is the row's, and whose body adds to its balance before it does what it is told to."""

    def declare(
        body: Callable[..., Any] = lambda self, amount: None, *, base: Any = FencedTask, **once: Any
    ) -> Any:
        def run(self: Any, row_id: int, amount: int = 1) -> Any:
            if self.blueprint.policy.atomic:
                add(row, amount)
            return body(self, amount) or balance(row)

        name = f"kit.task{len(app.tasks)}"
        options = {"key": "{row_id}", "replay_for": "1d", **once}
        if base is SingletonTask:
            options.pop("replay_for")
        task = app.task(bind=True, base=base, name=name, shared=False, lazy=False, once=Once(**options))
        return task(run)

    return declare


def add(row: Plain, amount: int) -> None:
    row.balance = balance(row) + amount
    row.save()


def balance(row: Plain) -> int:
    return int(Plain.objects.get(pk=row.pk).balance)


def entries() -> int:
    return int(sql("select count(*) from once_fenced_ledger")[0][0])


# --- the ledger -------------------------------------------------------------------------------------------------------


def test_a_finished_key_answers(once: Enforced, declare: Any, row: Plain) -> None:
    task = declare()
    results = [task.delay(row.pk) for _ in range(3)]
    assert [result.get() for result in results] == [101, 101, 101]
    assert [result.outcome.status for result in results] == ["enqueued"] * 3
    assert balance(row) == 101


def test_the_same_key_for_something_else(once: Enforced, declare: Any, row: Plain) -> None:
    task = declare()
    task.delay(row.pk, 1).get()
    with pytest.raises(KeyReusedError):
        task.delay(row.pk, 2).get()


def test_an_error_rolls_back_and_may_be_tried_again(once: Enforced, declare: Any, row: Plain) -> None:
    errors: list[Exception] = [ValueError("no")]

    def fail(self: Any, amount: int) -> None:
        if errors:
            raise errors.pop()

    task = declare(fail)
    with pytest.raises(ValueError, match="no"):
        task.delay(row.pk).get()
    assert balance(row) == 100
    assert task.delay(row.pk).get() == 101


def test_an_error_of_the_database_leaves_the_transaction_of_the_test_usable(
    once: Enforced, declare: Any, row: Plain
) -> None:
    task = declare(lambda self, amount: sql("select 1 / 0"))
    with pytest.raises(DatabaseError):
        task.delay(row.pk).get()
    assert balance(row) == 100


def test_a_final_error_is_raised_for_duplicates(once: Enforced, declare: Any, row: Plain) -> None:
    ran = []

    def refuse(self: Any, amount: int) -> None:
        ran.append(amount)
        raise LookupError("no such customer")

    task = declare(refuse, final_errors=(LookupError,))
    for _ in range(2):
        with pytest.raises(LookupError):
            task.delay(row.pk).get()
    assert ran == [1]


def test_replay_for_zero_runs_again(once: Enforced, declare: Any, row: Plain) -> None:
    task = declare(replay_for=0)
    assert [task.delay(row.pk).get() for _ in range(3)] == [101, 102, 103]


def test_the_clock_moves_the_ledger(once: Enforced, declare: Any, row: Plain) -> None:
    task = declare(replay_for="12h")
    task.delay(row.pk).get()
    once.clock.advance("11h")
    assert task.delay(row.pk).get() == 101
    once.clock.advance("1h")
    assert task.delay(row.pk).get() == 102


def test_a_retry_is_the_same_attempt_of_the_same_key(once: Enforced, declare: Any, row: Plain) -> None:
    attempts = []

    def retry(self: Any, amount: int) -> None:
        attempts.append(self.grant.attempt)
        if len(attempts) < 3:
            raise self.retry(countdown=1)

    task = declare(retry)
    assert (task.delay(row.pk).get(), attempts) == (101, [1, 2, 3])


def test_a_held_key_is_a_duplicate_here_too(once: Enforced, declare: Any, row: Plain) -> None:
    task = declare()
    with once.hold(task.s(row.pk)):
        assert_suppressed(task.delay(row.pk))
    with once.queueing():
        first = task.delay(row.pk)
        assert_suppressed(task.delay(row.pk), by=first)
        assert_held(task.s(row.pk), slot="q")
    assert (first.get(), balance(row)) == (101, 101)


def test_a_key_that_was_forgotten_runs_again(once: Enforced, declare: Any, row: Plain) -> None:
    task = declare()
    result = task.delay(row.pk)
    assert forget(result.outcome.key, reason="a test")
    assert task.delay(row.pk).get() == 102


# --- effects and messages ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("atomic", [True, False])
def test_an_effect_is_taken_once_over_all_attempts(
    once: Enforced, declare: Any, row: Plain, atomic: bool
) -> None:
    calls: list[str] = []
    errors: list[Exception] = [ValueError("no")]

    def charge(self: Any, amount: int) -> Any:
        receipt = self.grant.effect("gateway", lambda key: calls.append(key) or f"receipt {len(calls)}")
        if atomic:
            fail_once()
            return receipt
        with self.grant.atomic():
            add(row, amount)
            fail_once()
        return receipt

    def fail_once() -> None:
        if errors:
            raise errors.pop()

    task = declare(charge, atomic=atomic)
    with pytest.raises(ValueError, match="no"):
        task.delay(row.pk).get()
    assert (task.delay(row.pk).get(), len(calls), balance(row)) == ("receipt 1", 1, 101)


def test_an_effect_that_is_tried_again_keeps_its_key(once: Enforced, declare: Any, row: Plain) -> None:
    keys: list[str] = []

    def charge(self: Any, amount: int) -> Any:
        def time_out_once(key: str) -> str:
            keys.append(key)
            if len(keys) == 1:
                raise TimeoutError
            return "receipt"

        return self.grant.effect("gateway", time_out_once, on_unknown="rerun")

    task = declare(charge)
    with pytest.raises(TimeoutError):
        task.delay(row.pk).get()
    assert task.delay(row.pk).get() == "receipt"
    assert len(keys) == 2
    assert len(set(keys)) == 1


def test_an_unknown_outcome_is_in_doubt_until_somebody_decides(
    once: Enforced, declare: Any, row: Plain
) -> None:
    calls: list[str] = []

    def charge(self: Any, amount: int) -> Any:
        def time_out(key: str) -> None:
            calls.append(key)
            raise TimeoutError

        return self.grant.effect("gateway", time_out)

    task = declare(charge)
    for _ in range(2):
        result = task.delay(row.pk)
        with pytest.raises(InDoubtError):
            result.get()
    assert (len(calls), balance(row)) == (1, 100)
    assert resolve(result.outcome.key, "succeeded", result="by hand", reason="a test")
    assert task.delay(row.pk).get() == "by hand"


def test_what_a_body_sends_runs_after_it(once: Enforced, declare: Any, row: Plain) -> None:
    order = []
    last = declare(lambda self, amount: order.append("last"), key="last:{row_id}")

    def send(self: Any, amount: int) -> None:
        self.grant.send(last.s(row.pk))
        order.append("body")

    task = declare(send)
    assert (task.delay(row.pk).get(), balance(row)) == (101, 102)
    task.delay(row.pk)
    assert (order, once.waiting) == (["body", "last"], [])
    assert sql("select count(*) from once_fenced_outbox where confirmed_at is null") == [(0,)]


def test_what_a_body_sends_is_rolled_back_with_it(once: Enforced, declare: Any, row: Plain) -> None:
    last = declare(key="last:{row_id}")

    def send(self: Any, amount: int) -> None:
        self.grant.send(last.s(row.pk))
        raise ValueError

    assert declare(send).delay(row.pk).state == "FAILURE"
    assert balance(row) == 100


@pytest.mark.parametrize("base", [FencedTask, SingletonTask])
def test_what_a_body_calls_runs_after_it(once: Enforced, declare: Any, row: Plain, base: Any) -> None:
    inner = declare(key="inner:{row_id}", base=base)
    seen = []

    def call(self: Any, amount: int) -> None:
        result = inner.delay(row.pk)
        seen.extend([result.ready(), balance(row)])

    assert declare(call).delay(row.pk).get() == 101
    assert (seen, balance(row)) == ([False, 101], 102)


# --- transactions -----------------------------------------------------------------------------------------------------


def test_a_call_inside_a_transaction_is_an_error(once: Enforced, declare: Any, row: Plain) -> None:
    task = declare()
    with transaction.atomic():
        result = task.delay(row.pk)
    with pytest.raises(EagerError, match="delay_on_commit"):
        result.get()
    assert_free(task.s(row.pk))
    assert task.delay(row.pk).get() == 101


def test_on_commit_it_runs(once: Enforced, declare: Any, row: Plain, around: str) -> None:
    task = declare()
    with TestCase.captureOnCommitCallbacks(execute=around == "TestCase"), transaction.atomic():
        task.delay_on_commit(row.pk)
        assert balance(row) == 100
    assert balance(row) == 101


def test_a_body_that_manages_a_transaction_of_its_own_is_found(
    once: Enforced, declare: Any, row: Plain
) -> None:
    def commit(self: Any, amount: int) -> None:
        with transaction.atomic(durable=True):
            pass

    with pytest.raises(GrantError, match="atomic=False"):
        declare(commit).delay(row.pk).get()


def test_the_token_ends_with_the_body(once: Enforced, app: Celery, row: Plain) -> None:
    """Or a test could write nothing more to a fenced table: its token would be that of another row."""
    vaults = [Vault(pk=number) for number in (1001, 1002)]
    sql("delete from once_fenced_event")

    def fill(self: Any, number: int) -> str:
        Vault.objects.create(pk=number, content="gold")
        return "filled"

    once_ = Once(key="vault:{number}", resource="vault:{number}", replay_for="1d")
    task = app.task(bind=True, base=FencedTask, name="kit.fill", shared=False, lazy=False, once=once_)(fill)
    assert [task.delay(vault.pk).get() for vault in vaults] == ["filled", "filled"]
    with pytest.raises(GrantError, match="without"), transaction.atomic():
        Vault.objects.filter(pk=1001).update(content="air")
    assert sql("select current_setting('application_name') like 'once_fenced:%%'") == [(False,)]


def test_nothing_is_left_of_a_test_case(app: Celery, fenced: str) -> None:
    sql("truncate once_fenced_ledger, once_fenced_fence cascade")
    atomics = TestCase._enter_atomics()
    task = app.task(
        base=FencedTask, name="kit.one", shared=False, lazy=False, once=Once(key=(), replay_for=60)
    )(one)
    with enforce_once(app):
        assert task.delay().get() == 1
        assert entries() == 1
    TestCase._rollback_atomics(atomics)
    assert (entries(), sql("select count(*) from once_fenced_fence")) == (0, [(0,)])


def one() -> int:
    return 1


def test_no_connection_is_left(app: Celery, fenced: str) -> None:
    task = app.task(
        base=FencedTask, name="kit.one", shared=False, lazy=False, once=Once(key=(), replay_for=0)
    )(one)
    with enforce_once(app):
        task.delay().get()
    others = (
        "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    )
    # The server takes a moment to notice that one was closed.
    eventually(lambda: sql(others + " and application_name = 'celery_once_fenced'") == [(0,)])


def test_a_clock_that_moves_asks_no_database_that_was_not_used(app: Celery, fenced: str) -> None:
    with enforce_once(app) as once, connection.execute_wrapper(_refuse):
        once.clock.advance(60)


def _refuse(*_: Any) -> Any:
    raise AssertionError("this test uses no database")


def test_without_django(postgres_url: str) -> None:
    """The body writes through psycopg; fence and ledger are committed."""
    app = Celery("kit", broker=NOWHERE, set_as_current=False)
    app.conf.once_fenced = {"redis_url": NOWHERE, "postgres_url": postgres_url}

    def post(self: Any, number: int) -> str:
        self.grant.connection.execute("insert into writes (token) values (%s)", (self.grant.token,))
        return f"posted {number}"

    once_ = Once(key="{number}", replay_for="12h")
    task = app.task(bind=True, base=FencedTask, name="kit.post", shared=False, lazy=False, once=once_)(post)
    with ledger_at(postgres_url) as ledger, enforce_once(app) as once:
        assert [task.delay(1).get() for _ in range(2)] == ["posted 1"] * 2
        once.clock.advance("12h")
        task.delay(1)
        assert ledger.execute("select count(*) from writes") == [(2,)]
    runtime_of(app).close()
    app.close()


# --- negative controls ------------------------------------------------------------------------------------------------


def test_an_unfenced_task_runs_as_often_as_it_is_called(once: Enforced, declare: Any, row: Plain) -> None:
    task = declare(base=SingletonTask)
    assert [task.delay(row.pk).get() for _ in range(2)] == [101, 102]


def test_outside_the_block_nothing_is_recorded(app: Celery, declare: Any, row: Plain, around: str) -> None:
    app.conf.task_always_eager = True
    task = declare()
    assert [task.delay(row.pk).get() for _ in range(2)] == [101, 102]


def test_a_ledger_on_connections_of_its_own_sees_no_replay_in_a_test_case(app: Celery, fenced: str) -> None:
    """Why the kit asks through the test's connection: the claim is committed, what completes it is not."""
    atomics = TestCase._enter_atomics()
    task = app.task(
        base=FencedTask, name="kit.one", shared=False, lazy=False, once=Once(key=(), replay_for=60)
    )(one)
    try:
        with enforce_once(app) as once:
            once._ledger._claims = once._ledger._claims._own
            assert task.delay().get() == 1
            again = task.delay()
            assert (again.state, len(once.waiting)) == (
                "PENDING",
                1,
            )  # busy: for others the first one still runs
    finally:
        TestCase._rollback_atomics(atomics)
    assert sql("select state from once_fenced_ledger where task_name = 'kit.one'")[-1] == ("running",)
