"""A call is made into a message while Redis answers whether it may be published: nothing passes without the answer."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import Enum
from functools import partial, wraps
from typing import Any

import pytest
import redis
from celery import Celery, Task, signals
from celery.backends.cache import CacheBackend
from celery.exceptions import SoftTimeLimitExceeded
from kombu.exceptions import OperationalError
from kombu.messaging import Producer

from celery_once_fenced import DuplicateError, Once, SingletonTask, StoreUnavailableError
from celery_once_fenced.bulk import BATCH
from celery_once_fenced.events import Event, observing
from celery_once_fenced.gate import Gate
from celery_once_fenced.header import HEADER
from celery_once_fenced.runtime import runtime_of
from celery_once_fenced.stores.redis_connections import Connections
from celery_once_fenced.stores.redis_conversation import Conversation
from celery_once_fenced.stores.redis_link import RedisLink
from example_project.servers import RedisServer, Servers, start_redis, wait_until

TIMEOUT = 0.5


class CopiesHeaders:
    """What instrumentation does around ``Task.apply_async``: it passes on headers of its own making."""

    def apply_async(self, *args: Any, **options: Any) -> Any:
        headers = {"traceparent": "00-1-2-01", **(options.pop("headers", None) or {})}
        return super().apply_async(*args, headers=headers, **options)  # type: ignore[misc]


class Traced(SingletonTask, CopiesHeaders, Task):
    abstract = True


@pytest.fixture
def app(servers: Servers, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    monkeypatch.setattr("celery_once_fenced.runtime._database_factory", None)
    with made(servers.redis_url, namespace) as app:
        yield app


@contextmanager
def made(
    redis_url: str,
    namespace: str,
    *,
    broker: str = "memory://",
    timeout: float = 20,
    of_app: type[Celery] = Celery,
) -> Iterator[Celery]:
    with of_app("gate", broker=broker, backend="cache+memory://", set_as_current=False) as app:
        app.conf.once_fenced = {"redis_url": redis_url, "namespace": namespace, "socket_timeout": timeout}
        app.conf.task_default_queue = f"q{uuid.uuid4().hex}"  # the memory broker is one for the whole process
        yield app
        runtime_of(app).close()


def declared(app: Celery, base: type = SingletonTask, name: str = "shop.refresh", **options: Any) -> Any:
    @app.task(name=name, base=base, shared=False, **options)
    def refresh(order_id: int) -> None: ...

    return refresh


def held(app: Celery) -> list[str]:
    return [hold.task_id for hold in runtime_of(app).leases.holds()]


def queued(app: Celery) -> list[Any]:
    """The messages in the queue, which they leave."""
    with (
        app.connection_for_read() as connection,
        connection.SimpleQueue(app.conf.task_default_queue) as queue,
    ):
        found = []
        while queue.qsize():
            found.append(queue.get(block=False))
            found[-1].ack()
        return found


@contextmanager
def told(*names: str) -> Iterator[list[str]]:
    """Which of these signals of Celery are sent, in order."""
    heard: list[str] = []
    receivers = {name: lambda name=name, **_: heard.append(name) for name in names}
    for name, receiver in receivers.items():
        getattr(signals, name).connect(receiver, weak=False)
    try:
        yield heard
    finally:
        for name, receiver in receivers.items():
            getattr(signals, name).disconnect(receiver)


def test_only_what_is_published_is_announced(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    expected: list[str] = []
    monkeypatch.setattr(CacheBackend, "on_task_call", lambda _, producer, task_id: expected.append(task_id))
    task = declared(app)
    with told("before_task_publish", "after_task_publish") as heard:
        first, second = task.delay(1), task.delay(1)
    assert (first.outcome.status, second.outcome.status) == ("enqueued", "duplicate")
    assert heard == ["before_task_publish", "after_task_publish"]
    assert expected == [first.id]
    assert len(queued(app)) == 1


def test_a_duplicate_needs_no_broker(servers: Servers, namespace: str) -> None:
    with made(servers.redis_url, namespace) as app:
        first = declared(app).delay(1)
        with made(servers.redis_url, namespace, broker="redis://127.0.0.1:1/0") as cut_off:
            cut_off.conf.task_publish_retry = False
            task = declared(cut_off)
            assert task.delay(1).id == first.id
            with pytest.raises(OperationalError):
                task.delay(2)
        assert held(app) == [first.id]  # E11


Given = tuple[dict[str, Any], Callable[[int], bool]]
"""The option, and whether so many messages, and no other, were published over it."""


@pytest.fixture(params=["producer", "publisher", "connection"])
def given(request: pytest.FixtureRequest, app: Celery, monkeypatch: pytest.MonkeyPatch) -> Iterator[Given]:
    """A producer, or a connection, of the caller's."""
    published_over: list[Any] = []
    publish = Producer.publish

    def noted(self: Any, *args: Any, **how: Any) -> Any:
        published_over.append(self.connection)
        return publish(self, *args, **how)

    monkeypatch.setattr(Producer, "publish", noted)
    with app.connection_for_write() as connection:
        option = connection if request.param == "connection" else app.amqp.Producer(connection)
        yield {request.param: option}, lambda times: published_over == [connection] * times


def test_the_producer_of_the_caller_publishes_what_is_admitted(app: Celery, given: Given) -> None:
    (options, published), task = given, declared(app)
    results = [task.apply_async((1,), **options) for _ in range(3)]
    assert published(1)
    assert [result.outcome.status for result in results] == ["enqueued", "duplicate", "duplicate"]
    assert [message.headers["id"] for message in queued(app)] == [results[0].id]


def test_an_option_that_celery_refuses_leaves_no_hold(app: Celery) -> None:
    app.conf.task_create_missing_queues = False
    task = declared(app)
    with pytest.raises(Exception, match="nowhere"):
        task.apply_async((1,), queue="nowhere")
    assert held(app) == []
    assert task.delay(1).outcome.status == "enqueued"


def test_a_refused_call_with_such_an_option_leaves_the_holder_alone(app: Celery) -> None:
    app.conf.task_create_missing_queues = False
    task = declared(app)
    first = task.delay(1)
    with pytest.raises(Exception, match="nowhere"):
        task.apply_async((1,), queue="nowhere")
    assert held(app) == [first.id]


@pytest.mark.parametrize("base", [SingletonTask, Traced])
def test_what_the_answer_says_is_in_the_message(app: Celery, base: type) -> None:
    """Under ``replace`` the call gets its number from Redis (E13), whatever stands between the task and Celery."""
    task = declared(app, base, once=Once(on_duplicate="replace"))
    for _ in range(2):
        task.delay(1)
    first, second = (message.headers[HEADER]["seq"] for message in queued(app))
    assert 0 < first < second


def test_an_awaited_duplicate_says_whose_answer_it_wants(app: Celery) -> None:
    task = declared(app)
    first = task.delay(1)
    awaiting = task.apply_async((1,), link=task.si(2))
    assert awaiting.outcome.status == "awaiting"
    assert [message.headers[HEADER].get("from") for message in queued(app)] == [None, first.id]


def test_events_carry_no_header_of_a_call(app: Celery) -> None:
    """The dispatcher has one dictionary of headers for all events of the process."""
    app.conf.task_send_sent_event = True
    task = declared(app, once=Once(on_duplicate="replace"))
    task.delay(1)
    assert HEADER not in app.amqp._event_dispatcher.headers
    assert all(message.headers[HEADER]["seq"] for message in queued(app))


class OutboxApp(Celery):
    """What it is asked to send it sends later, so it takes no producer."""

    def send_task(self, name: str, *args: Any, task_id: str = "", **options: Any) -> Any:
        self.__dict__.setdefault("kept", []).append(task_id)
        return self.AsyncResult(task_id)


class OutboxTask(Task):
    abstract = True

    def apply_async(self, *args: Any, task_id: str = "", **options: Any) -> Any:
        self.app.__dict__.setdefault("kept", []).append(task_id)
        return self.AsyncResult(task_id)


class OutboxSingletonTask(SingletonTask, OutboxTask):
    abstract = True


@pytest.mark.parametrize("on_duplicate", ["return_existing", "raise"])
@pytest.mark.parametrize(("of_app", "base"), [(OutboxApp, SingletonTask), (Celery, OutboxSingletonTask)])
def test_what_publishes_in_celerys_place_is_asked_only_with_a_permit(
    servers: Servers, namespace: str, of_app: type[Celery], base: type, on_duplicate: Any
) -> None:
    with made(servers.redis_url, namespace, of_app=of_app) as app:
        task = declared(app, base, once=Once(on_duplicate=on_duplicate))
        first = task.delay(1)
        assert status_of(task) == "duplicate"
        assert app.__dict__["kept"] == [first.id]


def test_what_an_app_is_given_to_send_with_is_asked_only_with_a_permit(app: Celery) -> None:
    task, kept = declared(app), []

    def send(name: str, *args: Any, task_id: str = "", **options: Any) -> Any:
        kept.append((task_id, options.get("producer")))
        return app.AsyncResult(task_id)

    assert task.blueprint  # bound
    app.send_task = send
    first = task.delay(1)
    assert [task.delay(1).outcome.status for _ in range(2)] == ["duplicate"] * 2
    assert kept == [(first.id, None)]


@pytest.mark.parametrize("on_duplicate", ["return_existing", "raise"])
def test_the_outcome_is_known_where_celery_was_replaced_by_a_mock(
    app: Celery, on_duplicate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Celery, "send_task", lambda app, *_, task_id, **__: app.AsyncResult(task_id))
    task = declared(app, once=Once(on_duplicate=on_duplicate))
    assert (task.delay(1).outcome.status, status_of(task)) == ("enqueued", "duplicate")


@pytest.mark.parametrize(("of", "method"), [(Task, "apply_async"), (Celery, "send_task")])
@pytest.mark.parametrize("on_duplicate", ["return_existing", "raise"])
def test_what_is_wrapped_around_celery_sees_what_is_published_and_no_error(
    app: Celery, of: Any, method: str, on_duplicate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instrumentation that takes what passes through it for an error of the caller's."""
    do, seen = getattr(of, method), []

    @wraps(do)
    def watched(*args: Any, **options: Any) -> Any:
        try:
            result = do(*args, **options)
        except BaseException as error:
            seen.append(type(error).__name__)
            raise
        seen.append(result.id)
        return result

    task = declared(app, once=Once(on_duplicate=on_duplicate))
    monkeypatch.setattr(of, method, watched)
    first = task.delay(1)
    assert [status_of(task) for _ in range(2)] == ["duplicate"] * 2
    assert seen == [first.id]


def status_of(task: Any) -> str:
    try:
        return str(task.delay(1).outcome.status)
    except DuplicateError:
        return "duplicate"


def test_an_error_that_the_policy_asks_for_is_raised(app: Celery) -> None:
    task = declared(app, once=Once(on_duplicate="raise"))
    first = task.delay(1)
    with pytest.raises(DuplicateError, match=first.id):
        task.delay(1)
    assert (held(app), len(queued(app))) == ([first.id], 1)


def slow_to_make(seconds: float) -> type[SingletonTask]:
    class Slow(SingletonTask):
        abstract = True

        def shadow_name(self, args: Any, kwargs: Any, options: Any) -> None:
            time.sleep(seconds)

    return Slow


def test_the_time_that_the_message_takes_is_not_the_servers(servers: Servers, namespace: str) -> None:
    with made(servers.redis_url, namespace, timeout=TIMEOUT) as app:
        task = declared(app, slow_to_make(2 * TIMEOUT))
        assert [task.delay(1).outcome.status for _ in range(2)] == ["enqueued", "duplicate"]


@contextmanager
def hung(server: RedisServer) -> Iterator[None]:
    server.pause()
    try:
        yield
    finally:
        server.resume()


def test_a_server_that_hangs_meanwhile_is_waited_for_no_longer(namespace: str) -> None:
    with start_redis() as server, made(server.url, namespace, timeout=TIMEOUT) as app:
        task = declared(app)
        task.delay(1)
        with hung(server):
            began = time.monotonic()
            assert task.delay(2).outcome.status == "unguarded"
            assert time.monotonic() - began < 3 * TIMEOUT


def test_no_store_no_call_where_the_policy_says_so(namespace: str) -> None:
    with start_redis() as server, made(server.url, namespace, timeout=TIMEOUT) as app:
        task = declared(app, once=Once(on_store_error="raise"))
        task.delay(1)
        with hung(server), pytest.raises(StoreUnavailableError):
            task.delay(2)
        assert len(queued(app)) == 1


# --- interrupted ------------------------------------------------------------------------------------------------------


def test_after_a_refusal_no_message_is_made_for_nothing(app: Celery) -> None:
    """A storm of duplicates costs their questions; the first call that is admitted ends it."""
    made_for: list[int] = []

    class Watched(SingletonTask):
        abstract = True

        def shadow_name(self, args: Any, kwargs: Any, options: Any) -> None:
            made_for.append(args[0])

    task = declared(app, Watched)
    for number in (1, 1, 1, 1, 2, 2, 2):
        task.delay(number)
    assert made_for == [1, 1, 2, 2]
    assert len(queued(app)) == 2


class Interrupted(BaseException):
    """As Ctrl-C, or a time limit."""


def interrupting() -> type[SingletonTask]:
    class Interrupting(SingletonTask):
        abstract = True

        def shadow_name(self, args: Any, kwargs: Any, options: Any) -> None:
            if args[0] < 0:
                raise Interrupted

    return Interrupting


def test_an_interruption_between_question_and_answer_leaves_no_hold(app: Celery) -> None:
    task = declared(app, interrupting())
    with pytest.raises(Interrupted):
        task.delay(-1)
    assert held(app) == []
    assert [task.delay(1).outcome.status for _ in range(2)] == ["enqueued", "duplicate"]


@contextmanager
def interrupted(method: str) -> Iterator[None]:
    """Interrupted in the next conversation with Redis, when the server has done what it was asked to, and nobody knows."""
    do = getattr(Conversation, method)

    def interrupting(self: Conversation, *about: Any) -> Any:
        patched.undo()
        do(self, *about)
        if method == "begin":
            self.end()
        raise Interrupted

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Conversation, method, interrupting)
        with pytest.raises(Interrupted):
            yield


SENT_OR_READ = pytest.mark.parametrize("method", ["begin", "end"])


@SENT_OR_READ
@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("once", [Once(), Once(on_duplicate="replace")], ids=["once", "replace"])
def test_an_interruption_while_a_call_is_asked_for_leaves_no_hold(
    app: Celery, once: Once, refused: bool, method: str
) -> None:
    task = declared(app, once=once)
    task.delay(1)
    before, task.blueprint.refused = held(app), refused
    with interrupted(method):
        task.delay(1 if once.given() else 2)  # which displaces the first
    assert held(app) == before


@SENT_OR_READ
def test_an_interruption_where_another_publishes_leaves_no_hold(
    servers: Servers, namespace: str, method: str
) -> None:
    with made(servers.redis_url, namespace, of_app=OutboxApp) as app:
        with interrupted(method):
            declared(app).delay(1)
        assert held(app) == []


@SENT_OR_READ
@pytest.mark.parametrize("plenty", [False, True])
def test_an_interruption_while_many_are_asked_for_leaves_no_hold(
    app: Celery, method: str, plenty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where few connections are left, the answers are read when the questions are sent."""
    task = declared(app)
    task.delay(0)
    before = held(app)
    monkeypatch.setattr(Connections, "plenty", plenty)
    with interrupted(method):
        task.apply_many(((number,), {}) for number in range(2 * BATCH))
    assert held(app) == before


@SENT_OR_READ
def test_an_interruption_while_a_retry_is_asked_for_leaves_no_hold(app: Celery, method: str) -> None:
    task = declared(app)
    first = task.delay(1)
    (message,) = queued(app)
    runtime_of(app).leases.release(digest_of(app), "q", message.headers[HEADER]["id"])  # as its start does
    with interrupted(method):
        task.apply_async((1,), task_id=first.id, retries=1, headers={HEADER: message.headers[HEADER]})
    assert (held(app), queued(app)) == ([], [])


def digest_of(app: Celery) -> str:
    (hold,) = runtime_of(app).leases.holds()
    return hold.digest


@contextmanager
def interrupted_after_publish() -> Iterator[None]:
    def interrupt(**_: Any) -> None:
        raise Interrupted

    signals.after_task_publish.connect(interrupt)
    try:
        with pytest.raises(Interrupted):
            yield
    finally:
        signals.after_task_publish.disconnect(interrupt)


@pytest.mark.parametrize("refused", [False, True])
def test_an_interruption_after_the_publish_leaves_the_hold_to_the_message(app: Celery, refused: bool) -> None:
    task = declared(app)
    task.blueprint.refused = refused
    with interrupted_after_publish():
        task.delay(1)
    assert held(app) == [message.headers["id"] for message in queued(app)] != []


def test_many_calls_interrupted_after_a_publish_leave_its_hold_to_the_message(app: Celery) -> None:
    task = declared(app)
    with interrupted_after_publish():
        task.apply_many(((number,), {}) for number in range(2 * BATCH))
    assert held(app) == [message.headers["id"] for message in queued(app)] != []


@pytest.mark.parametrize("refused", [False, True])
def test_an_interruption_before_the_gate_is_open_leaves_no_hold(
    app: Celery, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: Gate) -> None:
        raise Interrupted

    task = declared(app)
    task.blueprint.refused = refused
    monkeypatch.setattr(Gate, "__enter__", interrupt)
    for call in (lambda: task.delay(1), lambda: task.apply_many([((2,), {}), ((3,), {})])):
        with pytest.raises(Interrupted):
            call()
        assert held(app) == []


def test_an_unguarded_call_that_is_not_published_leaves_no_window(namespace: str) -> None:
    """A server that hung does what it was asked when it wakes."""
    with (
        start_redis() as server,
        made(server.url, namespace, broker="redis://127.0.0.1:1/0", timeout=TIMEOUT) as app,
    ):
        app.conf.task_publish_retry = False
        task = declared(app, once=Once(unique="until_expired", window="1h"))
        with pytest.raises(OperationalError):
            task.delay(0)  # which connects
        with hung(server), pytest.raises(OperationalError):
            task.delay(1)
        wait_until(lambda: paid(app), 10, lambda: AssertionError("what is owed was not paid"))
        assert held(app) == []


def paid(app: Celery) -> bool:
    """What is owed is paid by the next who asks."""
    try:
        runtime_of(app).arrears.pay()
    except StoreUnavailableError:
        return False
    return True


def test_a_time_limit_that_strikes_in_an_observer_is_the_callers(app: Celery) -> None:
    def strike(_: Event) -> None:
        raise SoftTimeLimitExceeded

    task = declared(app)
    task.delay(1)
    with observing(strike), pytest.raises(SoftTimeLimitExceeded):
        task.delay(1)


@pytest.mark.parametrize("refused", [False, True])
def test_the_refusal_of_a_call_that_celery_makes_meanwhile_is_not_this_calls(
    app: Celery, refused: bool
) -> None:
    """A router, or a handler of before_task_publish, may call another task, and what that raises goes through."""

    class Calling(SingletonTask):
        abstract = True

        def shadow_name(self, args: Any, kwargs: Any, options: Any) -> None:
            inner.delay(1)

    inner = declared(app, name="shop.inner", once=Once(on_duplicate="raise"))
    holder = inner.delay(1)
    task = declared(app, Calling)
    task.blueprint.refused = refused
    with pytest.raises(DuplicateError, match=holder.id):
        task.delay(1)
    assert held(app) == [holder.id]
    assert not task.blueprint.refused


class Ids(str, Enum):  # noqa: UP042  # whose str() is its text
    NIGHTLY = "nightly-1"


def test_a_task_id_of_another_kind_of_text_is_what_celery_makes_of_it(app: Celery) -> None:
    task = declared(app)
    result = task.apply_async((1,), task_id=Ids.NIGHTLY)
    (message,) = queued(app)
    assert [message.headers["id"], *held(app), str(result.id)] == ["nightly-1"] * 3
    assert task.delay(1).id == "nightly-1"


def test_a_refusal_that_is_raised_is_remembered_too(app: Celery) -> None:
    task = declared(app, once=Once(on_duplicate="raise"))
    task.delay(1)
    for _ in range(2):
        with pytest.raises(DuplicateError):
            task.delay(1)
        assert task.blueprint.refused


LIMITS = [Interrupted, SoftTimeLimitExceeded]
"""What may end a body that makes many calls, at any moment."""


@pytest.mark.parametrize("limit", LIMITS)
def test_many_calls_that_are_interrupted_hold_what_they_published(
    app: Celery, limit: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = declared(app)
    publish, published = task.publish, []

    def interrupted(*call: Any) -> Any:
        if len(published) == BATCH + 10:
            raise limit
        published.append(publish(*call))
        return published[-1]

    monkeypatch.setattr(task, "publish", interrupted, raising=False)
    with pytest.raises(limit):
        task.apply_many(((number,), {}) for number in range(4 * BATCH))
    assert sorted(held(app)) == sorted(result.id for result in published)


def test_many_calls_go_through_the_producer_of_the_caller(app: Celery, given: Given) -> None:
    (options, published), task = given, declared(app)
    task.apply_many([((1,), {}), ((1,), {}), ((2,), {})], **options)
    assert published(2)


def test_an_answer_that_nobody_read_is_not_the_answer_to_the_next_question(app: Celery) -> None:
    store = runtime_of(app).leases
    task = declared(app)
    task.delay(1)
    for _ in range(100):  # twice as many as there are connections
        store._link.send(("ECHO", "of another"))  # type: ignore[attr-defined]
    assert task.delay(1).outcome.status == "duplicate"
    assert store._link.ask(("ECHO", "mine")) == ["mine"]  # type: ignore[attr-defined]


def test_questions_that_are_under_way_at_once_keep_their_answers(app: Celery) -> None:
    link = runtime_of(app).leases._link  # type: ignore[attr-defined]
    asked = [link.send(("ECHO", str(number))) for number in range(10)]
    assert [answer() for answer in reversed(asked)] == [[str(number)] for number in reversed(range(10))]


def test_many_threads_and_few_connections(servers: Servers, namespace: str) -> None:
    """A question that is under way keeps its connection until Celery has made the message: nobody starves for it."""
    with made(servers.redis_url, namespace) as app:
        task = declared(app, slow_to_make(0.01))
        statuses: list[str] = []

        def call() -> None:
            statuses.extend(task.delay(number).outcome.status for number in range(10))

        threads = [threading.Thread(target=call) for _ in range(100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(statuses) == ["duplicate"] * 990 + ["enqueued"] * 10


def test_a_call_that_calls_another_meanwhile_finds_a_connection(servers: Servers, namespace: str) -> None:
    """Also where more threads do it at once than there are connections."""
    together, inner_statuses = threading.Barrier(60), []

    class Calling(SingletonTask):
        abstract = True

        def shadow_name(self, args: Any, kwargs: Any, options: Any) -> None:
            together.wait(60)
            inner_statuses.append(inner.delay(1).outcome.status)

    with made(servers.redis_url, namespace) as app:
        task, inner = declared(app, Calling), declared(app, name="shop.inner")
        assert inner.delay(1).outcome.status == "enqueued"
        with ThreadPoolExecutor(60) as pool:
            statuses = list(pool.map(lambda number: task.delay(number).outcome.status, range(60)))
        assert statuses == ["enqueued"] * 60
        assert inner_statuses == ["duplicate"] * 60


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_child_forked_meanwhile_leaves_the_answer_to_its_parent(servers: Servers) -> None:
    link = RedisLink(servers.redis_url, timeout=20, connect_timeout=1, max_connections=4)
    with link_closed(link):
        number = link.ask(("CLIENT", "ID"))
        answer = link.send(("CLIENT", "ID"))
        pid = os.fork()
        if pid == 0:
            os._exit(0 if answer() != number else 1)  # it asked again, over a connection of its own
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert answer() == number


@pytest.mark.parametrize("parser", [redis._parsers._RESP2Parser, redis.connection.DefaultParser])
def test_an_answer_is_asked_for_again_where_all_connections_were_closed_meanwhile(
    servers: Servers, parser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis, "Connection", partial(redis.Connection, parser_class=parser))
    link = RedisLink(servers.redis_url, timeout=20, connect_timeout=1, max_connections=4)
    with link_closed(link):
        answer = link.send(("ECHO", "mine"))
        link.close()
        assert answer() == ["mine"]


@contextmanager
def link_closed(link: RedisLink) -> Iterator[None]:
    try:
        yield
    finally:
        link.close()


# --- a connection that was closed -------------------------------------------------------------------------------------


def dropped(server: RedisServer) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.client_kill_filter(_type="normal", skipme=True)


def test_a_connection_that_the_server_closed(namespace: str) -> None:
    with start_redis() as server, made(server.url, namespace) as app:
        task = declared(app)
        task.delay(1)
        dropped(server)
        assert task.delay(1).outcome.status == "duplicate"


def test_answers_are_read_once(app: Celery) -> None:
    """By the second time the connection may be another's, and so the answer."""
    answers = runtime_of(app).leases._link.send(("ECHO", "mine"))  # type: ignore[attr-defined]
    assert answers() == ["mine"]
    with pytest.raises(RuntimeError, match="read before"):
        answers()
