"""Messages of one attempt, and of those that died: who is told what, over an outbox in memory (L9)."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from kombu.utils import json

from celery_once_fenced.errors import GrantError, StoreUnavailableError
from celery_once_fenced.events import Event, observing
from celery_once_fenced.header import HEADER, Header
from celery_once_fenced.outbox import Outbox, sweep
from celery_once_fenced.post import CeleryPost
from celery_once_fenced.stores import Held, Operation, OutboxMessage

NAMESPACE = "shop"
HELD = Held(Operation(b"d" * 32, "charge:42", "shop", "shop.charge", "t1", None, "account:7"), "me", 7, 1)


@dataclass
class Ledger:
    """What is committed, taken and confirmed."""

    committed: dict[str, str] = field(default_factory=dict)
    confirmed: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    away: set[str] = field(default_factory=set)

    def _reached(self, name: str) -> None:
        self.asked.append(name)
        if name in self.away:
            raise StoreUnavailableError("postgres", "away")

    def outbox_mine(self, task_ids: Sequence[str]) -> list[OutboxMessage]:
        self._reached("mine")
        return [OutboxMessage(one, self.committed[one]) for one in task_ids if one in self.committed]

    def outbox_take(self, namespace: str, age: float, limit: int = 100) -> list[OutboxMessage]:
        self._reached("take")
        assert namespace == NAMESPACE
        return [OutboxMessage(*one) for one in self.committed.items() if one[0] not in self.confirmed]

    def outbox_confirm(self, task_ids: Sequence[str]) -> None:
        self._reached("confirm")
        self.confirmed += task_ids


@dataclass
class Post:
    published: list[tuple[str, str]] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)

    def pack(self, signature: Any, task_id: str, delivery: str) -> str:
        return f"{signature} as {delivery}"

    def publish(self, task_id: str, message: str) -> None:
        if message.split(maxsplit=1)[0] in self.broken:
            raise OSError("no broker")
        self.published.append((task_id, message))


class Transaction:
    """What it was given is committed when a test says so."""

    def __init__(self) -> None:
        self.put_: dict[str, str] = {}

    def put(self, held: Held, task_id: str, message: str) -> None:
        self.put_[task_id] = message


class Bench:
    def __init__(self) -> None:
        self.ledger, self.post = Ledger(), Post()

    def attempt(self, *signatures: str, rolled_back: Sequence[str] = (), held: Held = HELD) -> list[str]:
        store: Any = self.ledger
        outbox, transaction = Outbox(store, self.post), Transaction()
        made: Any = transaction
        ids = [outbox.put(made, held, signature) for signature in signatures]
        assert self.post.published == []
        self.ledger.committed.update(
            {key: text for key, text in transaction.put_.items() if text.split()[0] not in rolled_back}
        )
        outbox.publish()
        return ids

    def sweep(self) -> int:
        store: Any = self.ledger
        return sweep(store, self.post, NAMESPACE, age=0.0)

    @property
    def names(self) -> list[str]:
        return [message.split()[0] for _, message in self.post.published]


def test_messages_are_published_after_the_commit_and_confirmed() -> None:
    bench = Bench()
    ids = bench.attempt("a", "b")
    assert ([task_id for task_id, _ in bench.post.published], bench.ledger.confirmed) == (ids, ids)


def test_attempt_that_sends_nothing_asks_nothing() -> None:
    bench = Bench()
    bench.attempt()
    assert bench.ledger.asked == []


def test_message_of_a_rolled_back_savepoint_is_not_published() -> None:
    bench = Bench()
    bench.attempt("a", "b", rolled_back=["a"])
    assert bench.names == ["b"]


def test_same_attempt_gives_the_same_ids_and_another_token_others() -> None:
    first, again = Bench().attempt("a", "b"), Bench().attempt("a", "b")
    later = Bench().attempt("a", "b", held=Held(HELD.operation, "me", 8, 2))
    assert first == again
    assert len({*first, *later}) == 4


def test_what_the_broker_refuses_is_left_to_a_sweep_and_the_others_go_out() -> None:
    bench, seen = Bench(), list[Event]()
    bench.post.broken = {"a"}
    with observing(seen.append):
        bench.attempt("a", "b")
    assert (bench.names, len(bench.ledger.confirmed)) == (["b"], 1)
    assert [event.fields["why"] for event in seen if event.name == "message.delayed"] == ["OSError"]
    bench.post.broken = set()
    assert (bench.sweep(), bench.names) == (1, ["b", "a"])


@pytest.mark.parametrize("operation", ["mine", "confirm"])
def test_committed_body_does_not_fail_for_want_of_the_database(operation: str) -> None:
    bench, seen = Bench(), list[Event]()
    bench.ledger.away = {operation}
    with observing(seen.append):
        bench.attempt("a")
    assert [event.name for event in seen if event.name == "store.failed"] == ["store.failed"]
    bench.ledger.away = set()
    assert bench.sweep() == 1


def test_second_publishing_has_the_same_ids() -> None:
    bench = Bench()
    bench.ledger.away = {"confirm"}
    bench.attempt("a")
    bench.ledger.away = set()
    bench.sweep()
    first, second = bench.post.published
    assert first == second


def test_sweep_that_finds_nothing_confirms_nothing() -> None:
    bench = Bench()
    assert (bench.sweep(), bench.ledger.asked) == (0, ["take"])


# --- signatures as text -----------------------------------------------------------------------------------------------


@pytest.fixture
def app() -> Celery:
    app = Celery("post", broker="memory://", set_as_current=False)
    app.conf.task_default_queue = uuid.uuid4().hex  # the memory broker is one for the whole process
    app.task(name="shop.note", shared=False)(noted)
    return app


def noted(*args: Any) -> None: ...


def note(app: Celery, *args: Any) -> Any:
    return app.signature("shop.note", args, immutable=True)


def headers(packed: str) -> list[Header]:
    """The headers of all steps that have one, in order."""
    found: list[Header] = []

    def look(value: Any) -> None:
        if isinstance(value, dict):
            header = Header.parse((value.get("headers") or {}).get(HEADER)) if "headers" in value else None
            found.extend([header] if header else [])
            for one in value.values():
                look(one)
        elif isinstance(value, list | tuple):
            for one in value:
                look(one)

    look(json.loads(packed))  # type: ignore[no-untyped-call]
    return found


def pack(app: Celery, signature: Any) -> list[Header]:
    return headers(CeleryPost(app).pack(signature, "task", "d"))


def test_packed_message_names_its_delivery_and_run(app: Celery) -> None:
    assert pack(app, note(app, 1)) == [Header(delivery="d0", run="task", packed=True)]


def test_only_the_first_steps_of_a_canvas_are_named(app: Celery) -> None:
    first_two = [
        Header(delivery="d0", run="task", packed=True),
        Header(delivery="d1", run="task.1", packed=True),
    ]
    assert pack(app, chain(note(app, 1), note(app, 2), app=app)) == first_two[:1]
    assert pack(app, group(note(app, 1), note(app, 2), app=app)) == first_two
    assert pack(app, chord([note(app, 1), note(app, 2)], note(app, 3), app=app)) == first_two


def test_packing_leaves_the_callers_signature_alone(app: Celery) -> None:
    step = note(app, 1)
    for signature in (
        step,
        group(step, step, app=app),
        chord([step], step, app=app),
        chain(step, step, app=app),
    ):
        before = json.dumps(signature)  # type: ignore[no-untyped-call]
        pack(app, signature)
        assert json.dumps(signature) == before  # type: ignore[no-untyped-call]
    assert "headers" not in step.options


def test_group_of_a_generator_is_packed_as_a_whole(app: Celery) -> None:
    assert len(pack(app, group((note(app, number) for number in range(3)), app=app))) == 3


def test_header_of_a_message_that_runs_again_keeps_key_and_run(app: Celery) -> None:
    step = note(app, 1).set(headers={HEADER: Header(run="first", once_key="k").dump(), "own": 1})
    assert pack(app, step) == [Header(delivery="d0", run="first", packed=True, once_key="k")]


@pytest.mark.parametrize("what", ["shop.note", None, {"task": "shop.note"}])
def test_what_is_no_signature_is_refused(app: Celery, what: Any) -> None:
    with pytest.raises(GrantError, match="takes a signature"):
        CeleryPost(app).pack(what, "task", "d")


def test_arguments_that_json_cannot_hold_are_refused(app: Celery) -> None:
    with pytest.raises(GrantError, match="as JSON"):
        CeleryPost(app).pack(note(app, object()), "task", "d")


def test_published_message_is_the_signature_under_its_task_id(app: Celery) -> None:
    post = CeleryPost(app)
    with app.connection_for_write() as connection:
        post.publish("task", post.pack(note(app, 1, "é\0"), "task", "d"))
        message = connection.SimpleQueue(app.conf.task_default_queue).get(timeout=5)
    assert message.headers["id"] == "task"
    assert Header.parse(message.headers[HEADER]) == Header(delivery="d0", run="task", packed=True)
    assert message.payload[0] == [1, "é\0"]
