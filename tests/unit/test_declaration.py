"""Declaring and binding tasks: what is refused, when, and with which words; what importing the package costs (W7, W11)."""

from __future__ import annotations

import functools
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery, shared_task
from celery.app.task import Context

from celery_once_fenced import (
    ConfigError,
    FencedTask,
    GrantError,
    KeyDerivationError,
    Once,
    SingletonTask,
    delivery,
    worker,
)
from celery_once_fenced.delays import delay_of
from celery_once_fenced.grant import Grant, granted
from celery_once_fenced.header import HEADER, Header
from celery_once_fenced.runtime import runtime_of
from celery_once_fenced.stores import Hold
from celery_once_fenced.stores.memory import MemoryLeaseStore

REDIS = {"redis_url": "redis://127.0.0.1:1/0"}
POSTGRES = {**REDIS, "postgres_url": "postgresql://127.0.0.1:1/none"}


@pytest.fixture(autouse=True)
def no_django_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether Django was set up by another test is no matter here."""
    monkeypatch.setattr("celery_once_fenced.runtime._database_factory", None)


def make_app(**once_fenced: Any) -> Celery:
    app = Celery("declaration", broker="memory://", set_as_current=False)
    app.conf.once_fenced = {**REDIS, **once_fenced}
    return app


@pytest.fixture
def app() -> Celery:
    return make_app()


@pytest.fixture
def fenced_app() -> Celery:
    return make_app(**POSTGRES)


def declared(app: Celery, once: Any = None, base: type = SingletonTask, **options: Any) -> Any:
    """A task of two arguments, bound at once."""

    def post(order_id: int, amount: int = 1) -> None: ...

    given = {} if once is None else {"once": once}
    how = {"base": base, "name": "shop.post", "lazy": False, "shared": False}
    return app.task(**how, **given, **options)(post)


# --- wrong names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("once", "option"),
    [
        (Once(key="order:{ordr_id}"), "key"),
        (Once(key=("ordr_id",)), "key"),
        (Once(resource="order:{ordr_id}"), "resource"),
        (Once(fingerprint=("ordr_id",)), "fingerprint"),
    ],
)
def test_wrong_argument_name_is_refused_with_the_right_one(app: Celery, once: Once, option: str) -> None:
    with pytest.raises(ConfigError) as raised:
        declared(app, once)
    assert f"{option} of shop.post names 'ordr_id'" in str(raised.value)
    assert "did you mean 'order_id'?" in str(raised.value)


def test_wrong_argument_name_is_refused_before_there_are_settings() -> None:
    class Post(SingletonTask):
        name = "shop.post"
        once = Once(key="order:{ordr_id}")

        def run(self, order_id: int) -> None: ...

    with pytest.raises(ConfigError, match="did you mean 'order_id'"):
        Post()


def test_key_of_a_base_that_the_task_overrides_is_none_of_its_names(app: Celery) -> None:
    class OfOrders(SingletonTask):
        once = Once(key="order:{order_number}", lease=30)

    task = declared(app, Once(key="{order_id}"), base=OfOrders)
    assert (task.blueprint.policy.key, task.blueprint.policy.lease) == ("{order_id}", 30)


def test_key_of_a_base_that_the_task_inherits_must_fit(app: Celery) -> None:
    class OfOrders(SingletonTask):
        once = Once(key="order:{order_number}")

    with pytest.raises(ConfigError, match="order_number"):
        declared(app, Once(lease=30), base=OfOrders)


@pytest.mark.parametrize("once", [{"lease": 30}, True, False, "order_id", 30])
def test_what_is_no_once_is_refused(app: Celery, once: object) -> None:
    with pytest.raises(ConfigError, match=r"once=.* must be Once\(…\)"):
        declared(app, once)


def test_wrong_setting_of_a_task_is_refused_when_it_is_bound() -> None:
    app = make_app(tasks={"shop.post": {"key": "{ordr_id}"}})
    with pytest.raises(ConfigError, match="order_id"):
        declared(app)


def test_app_without_settings_is_told_what_is_missing_at_the_first_use() -> None:
    task = declared(Celery("bare", broker="memory://", set_as_current=False))
    with pytest.raises(ConfigError, match="redis_url is not set"):
        task.delay(1)


def nothing() -> None: ...


def test_shared_task_does_not_break_an_app_that_never_uses_it() -> None:
    task = make_app().task(base=SingletonTask, name="shop.shared_once", lazy=False)(nothing)
    Celery("another", broker="memory://", set_as_current=False).finalize()
    assert task.blueprint.policy.tier == "efficiency"


# --- layers -----------------------------------------------------------------------------------------------------------


def test_layers_of_subclasses_are_merged_the_nearest_first() -> None:
    class Quick(SingletonTask):
        once = Once(lease=5, queue_hold=50)

    class Quicker(Quick):
        once = Once(lease=4)

    app = make_app(defaults={"lease": 60, "max_deferred": 7}, tasks={"shop.post": {"queue_hold": 10}})
    policy = declared(app, Once(key="{order_id}"), base=Quicker).blueprint.policy
    assert (policy.key, policy.lease, policy.queue_hold, policy.max_deferred) == ("{order_id}", 4, 10, 7)


def test_without_once_the_key_is_all_arguments(app: Celery) -> None:
    recipe = declared(app).blueprint.recipe
    assert recipe.derive((1,), {}) == recipe.derive((), {"amount": 1, "order_id": 1})


def test_self_is_no_argument_of_a_key(app: Celery) -> None:
    @app.task(base=SingletonTask, bind=True, name="shop.bound", shared=False)
    def bound(self: Any, order_id: int) -> None: ...

    assert bound.blueprint.recipe.plan.names == ("order_id",)


def test_once_of_a_call_is_yes_or_no(app: Celery) -> None:
    with pytest.raises(TypeError, match="once=True or once=False, not None"):
        declared(app).apply_async((1,), once=None)


def test_many_eager_calls_have_a_result_each(app: Celery) -> None:
    app.conf.task_always_eager = True
    results = declared(app).apply_many([((1,), {}), (1,), ((2,), None)])
    assert [result.error is None for result in results] == [True, False, True]
    assert isinstance(results[1].error, TypeError)


# --- kinds of tasks ---------------------------------------------------------------------------------------------------


def test_class_based_task_without_a_name_is_keyed_by_the_name_it_gets(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery._state._on_app_finalizers", set())  # no shared tasks of other tests

    class Refresh(SingletonTask):
        def run(self, feed_id: int) -> None: ...

    task = app.register_task(Refresh())
    assert task.name == f"{__name__}.Refresh"
    assert task.blueprint.recipe.scope == task.name
    assert task.blueprint.recipe.plan.names == ("feed_id",)


def test_shared_task_is_guarded_by_the_settings_of_each_app(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery._state._on_app_finalizers", set())  # not into the apps of other tests

    @shared_task(base=SingletonTask, name="shop.shared")
    def shared(order_id: int) -> None: ...

    for lease in (5, 6):
        app = make_app(defaults={"lease": lease})
        assert app.tasks["shop.shared"].blueprint.policy.lease == lease


def test_several_apps_guard_a_task_of_the_same_name_apart() -> None:
    one, other = (make_app(namespace=name) for name in ("one", "other"))
    runtimes = [declared(app).blueprint.runtime for app in (one, other)]
    assert [runtime.settings.namespace for runtime in runtimes] == ["one", "other"]


def test_lazy_task_is_bound_when_first_used(app: Celery) -> None:
    @app.task(base=SingletonTask, name="shop.lazy", shared=False)
    def lazy(order_id: int) -> None: ...

    assert lazy.blueprint.policy.tier == "efficiency"


def test_binding_twice_changes_nothing(fenced_app: Celery) -> None:
    task = declared(fenced_app, Once(replay_for=60), base=FencedTask, track_started=True)
    before = type(task)._blueprint.policy
    type(task).bind(fenced_app)
    assert type(task)._blueprint.policy == before
    assert (task.acks_late, task.track_started, type(task)._track_started) == (True, False, True)


def test_wrapped_function_is_keyed_by_its_own_arguments(app: Celery) -> None:
    """What ``pydantic=True`` makes of a task, and decorators of one's own."""

    def post(order_id: int, amount: int = 1) -> None: ...

    @functools.wraps(post)
    def wrapper(*args: Any, **kwargs: Any) -> None: ...

    task = app.task(base=SingletonTask, name="shop.wrapped", lazy=False, shared=False)(wrapper)
    assert task.blueprint.recipe.plan.names == ("order_id", "amount")


def test_autoretry_wraps_the_run_and_not_the_signature(app: Celery) -> None:
    task = declared(app, Once(key="{order_id}"), autoretry_for=(ValueError,))
    assert task.blueprint.recipe.plan.names == ("order_id", "amount")


def test_wrong_call_is_a_type_error_even_without_typing(app: Celery) -> None:
    task = declared(app, typing=False)
    with pytest.raises(KeyDerivationError, match="order_id"):
        task.delay()
    assert issubclass(KeyDerivationError, TypeError)


# --- the correctness tier ---------------------------------------------------------------------------------------------


def test_fenced_task_survives_the_death_of_its_worker(fenced_app: Celery) -> None:
    task = declared(fenced_app, Once(replay_for=60), base=FencedTask)
    assert (task.acks_late, task.reject_on_worker_lost) == (True, True)


def test_tier_set_by_settings_is_as_durable() -> None:
    app = make_app(**POSTGRES, tasks={"shop.post": {"tier": "correctness", "replay_for": 0}})
    task = declared(app)
    assert (task.acks_late, task.reject_on_worker_lost) == (True, True)


def test_efficiency_tier_leaves_acks_late_alone(app: Celery) -> None:
    assert not declared(app).acks_late


def test_missing_replay_for_is_refused_with_both_answers(fenced_app: Celery) -> None:
    with pytest.raises(ConfigError, match=r"needs replay_for.*replay_for=0.*replay_for='30d'"):
        declared(fenced_app, Once(key="{order_id}"), base=FencedTask)


@pytest.mark.parametrize("attribute", ["acks_late", "reject_on_worker_lost"])
def test_explicit_false_is_refused(fenced_app: Celery, attribute: str) -> None:
    with pytest.raises(ConfigError, match=f"sets {attribute}=False"):
        declared(fenced_app, Once(replay_for=60), base=FencedTask, **{attribute: False})


def test_explicit_false_is_refused_in_a_subclass_of_a_bound_task(fenced_app: Celery) -> None:
    class Post(FencedTask):
        name = "shop.post"
        once = Once(replay_for=60)

        def run(self, order_id: int) -> None: ...

    class Careless(Post):
        name = "shop.careless"
        acks_late = False

    fenced_app.register_task(Post())
    with pytest.raises(ConfigError, match="sets acks_late=False"):
        fenced_app.register_task(Careless())


def test_subclass_of_a_bound_task_does_not_inherit_what_the_configuration_said(fenced_app: Celery) -> None:
    class Refresh(SingletonTask):
        name = "shop.refresh"

        def run(self, order_id: int) -> None: ...

    class Post(Refresh):
        name = "shop.post"
        once = Once(tier="correctness", replay_for=60)

    fenced_app.register_task(Refresh())
    task = fenced_app.register_task(Post())
    assert (task.acks_late, task.reject_on_worker_lost) == (True, True)


def test_without_a_database_the_tier_is_refused(app: Celery) -> None:
    with pytest.raises(ConfigError, match=r"needs a database.*postgres_url"):
        declared(app, Once(replay_for=60), base=FencedTask)


def test_unguarded_call_is_refused(fenced_app: Celery) -> None:
    task = declared(fenced_app, Once(replay_for=60), base=FencedTask)
    with pytest.raises(GrantError, match="once=False is refused"):
        task.apply_async((1,), once=False)


def test_replace_is_refused(fenced_app: Celery) -> None:
    task = declared(fenced_app, Once(replay_for=60), base=FencedTask)
    with pytest.raises(GrantError, match=r"replace\(\) is refused"):
        task.replace(task.s(2))


def test_key_function_must_answer(fenced_app: Celery) -> None:
    task = declared(fenced_app, Once(replay_for=60, key=lambda arguments: None), base=FencedTask)
    with pytest.raises(KeyDerivationError, match="never runs unguarded"):
        task.delay(1)


# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def leases(app: Celery) -> MemoryLeaseStore:
    runtime_of(app).__dict__["leases"] = store = MemoryLeaseStore()
    return store


def holds(leases: MemoryLeaseStore) -> list[Hold]:
    return list(leases.holds())


def test_call_takes_its_key_and_says_so(app: Celery, leases: MemoryLeaseStore) -> None:
    result = declared(app).delay(1)
    (hold,) = holds(leases)
    assert (result.outcome.status, hold.task_id) == ("enqueued", result.id)


def test_duplicate_is_answered_with_the_holder_even_without_a_result_backend(
    app: Celery, leases: MemoryLeaseStore
) -> None:
    task = declared(app)
    first, second = task.delay(1), task.apply_async((), {"order_id": 1})
    assert (second.id, second.outcome.status, second.outcome.task_id) == (first.id, "duplicate", first.id)


def test_duplicate_result_is_of_the_class_of_the_app(leases: MemoryLeaseStore, app: Celery) -> None:
    task = declared(app)
    first = task.delay(1)
    assert type(task.delay(1)) is type(first) is app.AsyncResult


def test_positional_options_are_those_of_celery(app: Celery, leases: MemoryLeaseStore) -> None:
    task = declared(app)
    task.delay(1)
    awaiting = task.apply_async((1,), {}, None, None, [task.s(2)])
    assert awaiting.outcome.status == "awaiting"
    with pytest.raises(TypeError, match="positional"):
        task.apply_async((1,), {}, None, None, None, None, None, "too many")


def test_failed_publish_holds_nothing(app: Celery, leases: MemoryLeaseStore) -> None:
    task = declared(app)
    task.publish = unplugged
    with pytest.raises(OSError, match="no broker"):
        task.delay(1)
    assert holds(leases) == []


def unplugged(*_: object) -> None:
    raise OSError("no broker")


def test_header_of_the_user_stays_and_ours_is_ours(app: Celery, leases: MemoryLeaseStore) -> None:
    sent: list[Any] = []
    task = declared(app)
    task.publish = lambda args, kwargs, task_id, options: sent.append(options["headers"]) or Dummy()
    task.apply_async((1,), headers={"x": 1, HEADER: {"id": "forged"}})
    assert sent[0]["x"] == 1
    assert sent[0][HEADER]["id"] != "forged"


class Dummy:
    outcome: Any = None


def aware(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


def naive(seconds: float) -> datetime:
    return aware(seconds).replace(tzinfo=None)


def written(seconds: float) -> str:
    return aware(seconds).isoformat()


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({}, 0.0),
        ({"countdown": 0}, 0.0),
        ({"countdown": 60}, 60.0),
        ({"eta": aware}, 3600.0),
        ({"eta": written}, 3600.0),
        ({"eta": naive}, 3600.0),
        ({"eta": aware, "countdown": 60}, 60.0),
        ({"eta": aware, "countdown": 0}, 3600.0),
    ],
)
def test_delay_is_what_celery_makes_of_the_options(app: Celery, options: Any, seconds: float) -> None:
    made = {name: value(3600) if callable(value) else value for name, value in options.items()}
    assert delay_of(declared(app), made) == pytest.approx(seconds, abs=30)


@pytest.mark.parametrize("expires", [float, aware, written])
def test_hold_ends_with_the_expiry_however_it_is_written(
    app: Celery, leases: MemoryLeaseStore, expires: Any
) -> None:
    declared(app).apply_async((1,), expires=expires(90))
    (hold,) = holds(leases)
    assert hold.left == pytest.approx(90, abs=30)


def test_expiry_of_the_task_counts_too(app: Celery, leases: MemoryLeaseStore) -> None:
    declared(app, expires=90).delay(1)
    (hold,) = holds(leases)
    assert hold.left <= 90


def test_retry_takes_the_key_on_whatever_its_new_arguments(app: Celery, leases: MemoryLeaseStore) -> None:
    task = declared(app, Once(key="{order_id}"))
    first = task.delay(1)
    (before,) = holds(leases)
    header = Header.parse({"key": before.digest, "text": before.text, "id": before.delivery})
    assert header is not None
    task.apply_async((99,), task_id=first.id, retries=1, headers={HEADER: header.dump()})
    (after,) = holds(leases)
    assert (after.digest, after.task_id) == (before.digest, first.id)
    assert after.delivery != before.delivery


def test_eager_call_shares_nothing(app: Celery, leases: MemoryLeaseStore) -> None:
    app.conf.task_always_eager = True
    result = declared(app).apply_async((1,), once=False)
    assert (result.outcome.status, result.outcome.reason, holds(leases)) == ("unguarded", "eager", [])


def test_direct_call_is_a_function_call(app: Celery) -> None:
    @app.task(base=SingletonTask, bind=True, name="shop.direct", lazy=False, shared=False)
    def direct(self: Any) -> Any:
        return self.grant.token, self.grant.lost

    assert direct() == (None, False)


def test_grant_of_a_running_task_is_the_current_one(app: Celery) -> None:
    task = declared(app)
    with granted(Grant("k", token=7)) as grant:
        assert task.grant is grant


# --- imports ----------------------------------------------------------------------------------------------------------

W11 = """
import socket, sys
def refuse(*args, **kwargs): raise SystemExit("connected")
socket.socket.connect = refuse
import celery_once_fenced
from celery_once_fenced import Once
loaded = {"celery", "kombu", "redis", "django", "psycopg"} & set(sys.modules)
assert not loaded, loaded
from celery_once_fenced import FencedTask, SingletonTask, lease, explain, current_grant
loaded = {"redis.client", "django.conf", "django.db", "psycopg"} & set(sys.modules)
assert not loaded, loaded
from celery import _state
assert _state.default_app is None and _state._tls.current_app is None, "touched current_app"
class Post(FencedTask):
    name = "shop.post"
    once = Once(replay_for=60)
    def run(self, order_id): ...
assert _state.default_app is None, "touched current_app"
"""


def test_import_touches_no_connection_no_setting_and_no_app() -> None:
    done = run_alone(W11)
    assert done.returncode == 0, done.stderr


def test_public_names_are_what_they_say() -> None:
    script = (
        "import celery_once_fenced as o\n"
        "from celery_once_fenced import *\n"
        "from celery_once_fenced import lease\n"
        "from celery_once_fenced.tasks import SingletonTask\n"
        "assert all(hasattr(o, name) for name in o.__all__)\n"
        "assert callable(lease) and callable(o.lease) and o.lease is lease\n"
    )
    done = run_alone(script)
    assert done.returncode == 0, done.stderr


def test_unknown_name_is_an_attribute_error() -> None:
    import celery_once_fenced

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = celery_once_fenced.nothing


def run_alone(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


# --- messages ---------------------------------------------------------------------------------------------------------


def message(**fields: Any) -> Context:
    return Context({"id": "t1", "retries": 0, "args": (1,), "kwargs": {}, **fields})


def test_message_sent_by_name_may_bypass_the_efficiency_tier(app: Celery) -> None:
    assert delivery.execution_of(declared(app), message(once_fenced={"bypass": True}), (1,), {}) is None


def test_message_sent_by_name_cannot_bypass_the_correctness_tier(fenced_app: Celery) -> None:
    task = declared(fenced_app, Once(replay_for=60), base=FencedTask)
    execution = delivery.execution_of(task, message(once_fenced={"bypass": True}), (1,), {})
    assert execution is not None
    assert execution.key == task.blueprint.recipe.derive((1,), {})


def test_message_without_header_is_known_by_task_id_retries_and_nesting(app: Celery) -> None:
    execution = delivery.execution_of(declared(app), message(retries=2), (1,), {})
    assert execution is not None
    assert (execution.delivery, execution.run, execution.seen_before) == ("t1.2.0", "t1", True)


@pytest.mark.parametrize(
    ("of_task", "of_call", "ignored"),
    [(False, None, False), (True, None, True), (True, False, False), (False, True, True)],
)
def test_result_is_ignored_where_the_call_or_else_the_task_says_so(
    app: Celery, of_task: bool, of_call: bool | None, ignored: bool
) -> None:
    """A skipped call whose caller waits must end, whatever the task's default is (E14)."""
    said = {} if of_call is None else {"ignore_result": of_call}
    assert worker._ignores_result(declared(app, ignore_result=of_task), message(**said)) is ignored


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({"broker_url": "redis://a"}, 3600.0),
        ({"broker_url": ["redis://a", "redis://b"]}, 3600.0),
        ({"broker_url": "redis://a;redis://b"}, 3600.0),
        ({"broker_url": "amqp://a", "broker_read_url": "redis://a"}, 3600.0),
        ({"broker_url": "redis://a", "broker_transport_options": {"visibility_timeout": 60}}, 60.0),
        ({"broker_url": "amqp://a", "broker_transport_options": {"visibility_timeout": 60}}, None),
        ({"broker_url": "memory://"}, None),
    ],
)
def test_visibility_timeout_is_that_of_the_broker_that_delivers(settings: Any, seconds: float | None) -> None:
    app = Celery("broker", set_as_current=False)
    app.conf.update(settings, once_fenced=REDIS)
    assert runtime_of(app).visibility_timeout == seconds
