"""What a person decides, through the API and on the command line: resolve, forget, prune (L7, L14)."""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, _state
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result

from celery_once_fenced import ConfigError, RecordedError, forget, resolve, runtime
from celery_once_fenced.cli import once
from celery_once_fenced.events import Event, observing
from celery_once_fenced.keys import operation_digest
from celery_once_fenced.ledger import decode_error
from celery_once_fenced.operate import explain
from celery_once_fenced.post import CeleryPost
from celery_once_fenced.runtime import Runtime, runtime_of
from celery_once_fenced.stores import Completion, EffectStart, Held
from tests.fixtures.ledger import Ledger, fresh, ledger_at, operation

FORGOTTEN = Completion("1", None, 0)
"""A result that is kept for no time at all."""


@pytest.fixture(scope="module")
def ledger(module_postgres_url: str) -> Iterator[Ledger]:
    with ledger_at(module_postgres_url) as opened:
        yield opened


@pytest.fixture
def app(ledger: Ledger, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    monkeypatch.setattr("celery_once_fenced.runtime._database_factory", None)
    with Celery("operate", broker="memory://", set_as_current=False) as app:
        app.conf.once_fenced = {
            "redis_url": redis_url,
            "namespace": namespace,
            "postgres_url": ledger.url,
        }
        app.task(name="shop.note", shared=False)(note)
        monkeypatch.setattr(runtime, "current", lambda: runtime_of(app))
        app.control.purge()  # the broker in memory is the process's
        yield app
        runtime_of(app).close()


def note(*args: Any) -> None: ...


@pytest.fixture
def here(app: Celery) -> Runtime:
    return runtime_of(app)


@pytest.fixture
def in_doubt(app: Celery, ledger: Ledger, here: Runtime) -> Callable[..., Held]:
    """Makes an entry in doubt that has, unless it is told otherwise, a message."""

    def make(message: bool = True, **options: Any) -> Held:
        options.setdefault("namespace", here.settings.namespace)
        held = ledger.hold(operation(**options))
        ledger.store.effect_start(EffectStart(held, "gateway", "hold"))
        signature = app.signature("shop.note", (held.operation.key,)).set(task_id=held.operation.task_id)
        text = CeleryPost(app).pack(signature, "run", "d" * 32) if message else None
        assert ledger.abandon(held, message=text).state == "in_doubt"
        return held

    return make


def entry(ledger: Ledger, held: Held) -> Any:
    found = ledger.store.look(held.operation.digest)
    assert found is not None
    return found


def published(app: Celery) -> list[dict[str, Any]]:
    """What waits at the broker; it is taken away."""
    found = []
    with app.connection_for_write() as connection:
        queue = connection.SimpleQueue("celery")
        for _ in range(queue.qsize()):
            message = queue.get(timeout=1)
            message.ack()
            found.append({"id": message.headers["id"], "args": message.payload[0]})
        queue.close()
    return found


def run(app: Celery, *arguments: str) -> Result:
    before = _state._tls.current_app
    try:
        return CliRunner().invoke(once, arguments, obj=CLIContext(app=app, no_color=True, workdir=None))
    finally:
        _state._set_current_app(before)


# --- resolve ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["text", "digest"])
def test_key_is_named_by_its_text_or_its_digest(
    ledger: Ledger, in_doubt: Callable[..., Held], by: str
) -> None:
    held = in_doubt()
    key = held.operation.key if by == "text" else held.operation.digest.hex()
    assert resolve(key, "succeeded", result=[0], reason="seen")
    assert (entry(ledger, held)["state"], entry(ledger, held)["result"]) == ("succeeded", "[0]")


@pytest.mark.parametrize("result", [None, 0, "", [], {"é": "\0"}])
def test_result_is_what_later_calls_get(ledger: Ledger, in_doubt: Callable[..., Held], result: Any) -> None:
    held = in_doubt()
    resolve(held.operation.key, "succeeded", result=result, reason="seen")
    assert json.loads(ledger.claim(held.operation).result or "") == result


def test_failure_says_the_reason(ledger: Ledger, in_doubt: Callable[..., Held]) -> None:
    held = in_doubt()
    resolve(held.operation.key, "failed", reason="the customer has gone")
    error = decode_error(ledger.claim(held.operation).error, key="k", known=())
    assert isinstance(error, RecordedError)
    assert str(error) == "k ended with resolved: the customer has gone"


def test_run_again_publishes_the_stored_message_under_its_task_id(
    app: Celery, ledger: Ledger, here: Runtime, in_doubt: Callable[..., Held]
) -> None:
    held = in_doubt()
    assert resolve(held.operation.key, "again", reason="try")
    assert published(app) == [{"id": held.operation.task_id, "args": [held.operation.key]}]
    assert entry(ledger, held)["state"] == "retryable"
    assert ledger.store.outbox_take(here.settings.namespace, 0.0) == []


def test_run_again_of_another_apps_key_is_published_by_that_app(
    app: Celery, ledger: Ledger, in_doubt: Callable[..., Held]
) -> None:
    held = in_doubt(namespace="another")
    assert resolve(held.operation.key, "again", reason="try")
    assert (published(app), entry(ledger, held)["state"]) == ([], "retryable")
    (left,) = ledger.store.outbox_take("another", 0.0)
    assert left.task_id == held.operation.task_id


def test_run_again_without_a_message_is_left_to_the_next_call(
    app: Celery, ledger: Ledger, in_doubt: Callable[..., Held]
) -> None:
    held = in_doubt(message=False)
    assert resolve(held.operation.key, "again", reason="try")
    assert published(app) == []
    assert ledger.claim(held.operation).verdict == "granted"


def test_one_call_of_a_key_is_found_where_each_is_its_own(
    ledger: Ledger, here: Runtime, in_doubt: Callable[..., Held]
) -> None:
    """``replay_for=0``: the ledger's digests are not the key's, and another call of it may be running (L11)."""
    held = in_doubt()
    digest = operation_digest(uuid.uuid4().hex * 2, "another run")
    ledger.execute(
        "insert into once_fenced_ledger (key_digest, key, scope, task_name, state, attempt, holder, resource, token)"
        " values (%s, %s, 's', 't', 'running', 1, 'h', 'r', 1)",
        (digest, held.operation.key),
    )
    assert resolve(held.operation.key, "failed", reason="seen")
    assert entry(ledger, held)["state"] == "failed"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"outcome": "done", "reason": "x"}, "outcome must be one of"),
        ({"outcome": "failed", "reason": ""}, "needs a reason"),
        ({"outcome": "succeeded", "reason": "x", "result": object()}, "not_serialisable"),
        ({"outcome": "failed", "reason": "x", "keep": "soon"}, "keep"),
    ],
)
def test_decision_that_cannot_be_recorded_changes_nothing(
    ledger: Ledger, in_doubt: Callable[..., Held], options: Any, problem: str
) -> None:
    held = in_doubt()
    with pytest.raises(ConfigError, match=problem):
        resolve(held.operation.key, **options)
    assert entry(ledger, held)["state"] == "in_doubt"


def test_two_people_who_decide_at_once_decide_once(in_doubt: Callable[..., Held]) -> None:
    held, said = in_doubt(), list[bool]()
    met = threading.Barrier(4, timeout=10)

    def decide() -> None:
        met.wait()
        said.append(resolve(held.operation.key, "failed", reason="at once"))

    threads = [threading.Thread(target=decide) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(said) == [False, False, False, True]


def test_decision_is_told(in_doubt: Callable[..., Held]) -> None:
    held, seen = in_doubt(), list[Event]()
    with observing(seen.append):
        resolve(held.operation.key, "failed", reason="seen", actor="ada")
        resolve(held.operation.key, "failed", reason="late", actor="bob")
    (told,) = [event for event in seen if event.name == "ledger.resolved"]
    assert told.fields == {
        "key": held.operation.digest.hex(),
        "outcome": "failed",
        "actor": "ada",
        "why": "seen",
    }


def test_explain_knows_what_is_in_doubt(in_doubt: Callable[..., Held]) -> None:
    held = in_doubt()
    told = explain(held.operation.key)
    sentence = str(told)
    assert "recorded as in_doubt" in sentence
    assert "; step 'gateway' was started at 20" in sentence
    assert "nobody knows whether it happened" in sentence
    assert f"a person must decide: once resolve {held.operation.key} succeeded --reason" in sentence
    assert ([(one.name, one.state) for one in told.effects], told.warning) == ([("gateway", "started")], "")


def test_explain_tells_how_a_key_failed(ledger: Ledger, in_doubt: Callable[..., Held]) -> None:
    held = in_doubt()
    resolve(held.operation.key, "failed", reason="no such\ncharge")
    told = explain(held.operation.key)
    assert r": resolved: no such\ncharge;" in str(told)
    assert "gateway" not in str(told)
    again = ledger.hold(operation())
    ledger.abandon(again, error='{"type": "builtins.OSError", "message": "no route"}')
    assert "recorded as retryable" in (sentence := str(explain(again.operation.key)))
    assert ": OSError: no route" in sentence
    error = '{"type": "celery_once_fenced.errors.ExhaustedError", "message": "given up"}'
    change = "update once_fenced_ledger set error = %s, takeovers = 3 where key_digest = %s"
    ledger.execute(change, (error, held.operation.digest))
    assert ": ExhaustedError: given up (3 takeovers)" in str(explain(held.operation.key))


# --- on the command line ----------------------------------------------------------------------------------------------


def test_command_resolves_and_says_so_once(
    app: Celery, ledger: Ledger, in_doubt: Callable[..., Held]
) -> None:
    key = (held := in_doubt()).operation.key
    result = run(app, "resolve", key, "succeeded", "--result", '{"id": 7}', "--reason", "seen")
    assert (result.exit_code, result.output.strip()) == (0, f"{key} is resolved: succeeded")
    assert json.loads(entry(ledger, held)["result"]) == {"id": 7}
    late = run(app, "resolve", key, "failed", "--reason", "late")
    assert (late.exit_code, late.output.strip()) == (1, f"{key} is not in doubt")


def test_command_runs_it_again(app: Celery, in_doubt: Callable[..., Held]) -> None:
    held = in_doubt()
    assert run(app, "resolve", held.operation.key, "again", "--reason", "try").exit_code == 0
    assert [message["id"] for message in published(app)] == [held.operation.task_id]


@pytest.mark.parametrize(
    "arguments",
    [
        ["failed"],
        ["done", "--reason", "x"],
        ["succeeded", "--reason", "x", "--result", "{"],
        ["failed", "--reason", ""],
    ],
)
def test_wrong_use_of_the_command_changes_nothing(
    app: Celery, ledger: Ledger, in_doubt: Callable[..., Held], arguments: list[str]
) -> None:
    held = in_doubt()
    result = run(app, "resolve", held.operation.key, *arguments)
    assert (result.exit_code, "Traceback" in result.output) == (2, False)
    assert entry(ledger, held)["state"] == "in_doubt"


def test_command_forgets_what_has_finished_and_nothing_else(
    app: Celery, ledger: Ledger, in_doubt: Callable[..., Held]
) -> None:
    done, doubtful = ledger.hold(operation()), in_doubt()
    ledger.run(done)
    assert run(app, "forget", done.operation.key, "--reason", "wrong price").exit_code == 0
    assert ledger.store.look(done.operation.digest) is None
    refused = run(app, "forget", doubtful.operation.key, "--reason", "no")
    assert (refused.exit_code, "in doubt" in refused.output) == (1, True)


@pytest.mark.parametrize(
    ("option", "user", "actor"),
    [
        ([], "alice", "alice (command line)"),
        (["--actor", "bob"], "alice", "bob (command line)"),
        (["--actor", " "], "alice", "alice (command line)"),
        ([], None, f"user {os.getuid()} (command line)"),
    ],
)
def test_decision_on_the_command_line_names_who_made_it(
    app: Celery,
    ledger: Ledger,
    in_doubt: Callable[..., Held],
    monkeypatch: pytest.MonkeyPatch,
    option: list[str],
    user: str | None,
    actor: str,
) -> None:
    def getuser() -> str:
        if user is None:
            raise KeyError("getpwuid(): uid not found")  # as in a container under an id of its own
        return user

    monkeypatch.setattr("getpass.getuser", getuser)
    held = in_doubt()
    assert run(app, "resolve", held.operation.key, "failed", "--reason", "seen", *option).exit_code == 0
    assert run(app, "forget", held.operation.key, "--reason", "again", *option).exit_code == 0
    events = ledger.execute(
        "select kind, actor from once_fenced_event where key_digest = %s and actor is not null order by id",
        (held.operation.digest,),
    )
    assert [tuple(event) for event in events] == [("ledger.resolved", actor), ("ledger.forgotten", actor)]


def test_forgetting_needs_a_reason_and_a_key_that_is_known(ledger: Ledger, app: Celery) -> None:
    held = ledger.hold(operation())
    ledger.run(held)
    with pytest.raises(ConfigError, match="needs a reason"):
        forget(held.operation.key, reason="")
    with pytest.raises(ConfigError, match="no key"):
        forget("never used", reason="x")


# --- prune ------------------------------------------------------------------------------------------------------------


def test_prune_tells_its_progress_and_the_sum(app: Celery, ledger: Ledger) -> None:
    for _ in range(5):
        ledger.run(ledger.hold(operation()), FORGOTTEN)
    result = run(app, "prune", "--grace", "0s", "--batch", "2")
    assert result.exit_code == 0
    assert "pruning" in result.stderr
    assert fences_pruned(result) >= 5


def fences_pruned(result: Result) -> int:
    assert result.exit_code == 0, result.output
    return int(result.stdout.strip().split()[0])


def test_tokens_rise_while_prune_runs_beside_claims(app: Celery, ledger: Ledger) -> None:
    resources = [fresh("account") for _ in range(3)]
    tokens: dict[str, list[int]] = {resource: [] for resource in resources}
    over = threading.Event()

    def claims() -> None:
        for number in range(40):
            resource = resources[number % 3]
            held = ledger.hold(operation(resource=resource))
            ledger.run(held, FORGOTTEN)
            tokens[resource].append(held.token)
        over.set()

    working = threading.Thread(target=claims)
    working.start()
    pruned = 0
    while not over.is_set():
        pruned += fences_pruned(run(app, "prune", "--grace", "0s", "--batch", "10"))
    working.join(20)
    assert pruned >= 3, "prune never met a free fence"
    for found in tokens.values():
        assert found == sorted(set(found))
        assert len(found) >= 13
