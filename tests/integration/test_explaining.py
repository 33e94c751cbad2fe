"""The story of two in the morning: why did this job not run, who holds it, is it safe to free it, and who freed it?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from celery import Celery, _state
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result

from celery_once_fenced import Once, SingletonTask, explain, fence, forget, release, resolve, runtime
from celery_once_fenced.cli import once
from celery_once_fenced.errors import FencedOffError, StoreUnavailableError
from celery_once_fenced.events import Event, observing
from celery_once_fenced.keys import Key, new_id, operation_digest
from celery_once_fenced.policy import SPANS
from celery_once_fenced.runtime import Runtime, runtime_of
from celery_once_fenced.stores import Defer, EffectFinish, EffectStart, Enqueue, Held, Start
from tests.fixtures.ledger import Ledger, claim_of, fresh, ledger_at, operation

SPAN = SPANS["until_executed"]


@pytest.fixture(scope="module")
def ledger(module_postgres_url: str) -> Iterator[Ledger]:
    with ledger_at(module_postgres_url) as opened:
        yield opened


def make_app(monkeypatch: pytest.MonkeyPatch, **once_fenced: Any) -> Celery:
    monkeypatch.setattr("celery_once_fenced.runtime._database_factory", None)
    app = Celery("explaining", broker="memory://", set_as_current=False)
    app.conf.once_fenced = once_fenced
    monkeypatch.setattr(runtime, "current", lambda: runtime_of(app))
    return app


@pytest.fixture
def app(ledger: Ledger, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    with make_app(monkeypatch, redis_url=redis_url, namespace=namespace, postgres_url=ledger.url) as app:
        yield app
        runtime_of(app).close()


@pytest.fixture
def here(app: Celery) -> Runtime:
    return runtime_of(app)


@pytest.fixture
def resource() -> str:
    return fresh("account")


def key(text: str = "") -> Key:
    text = text or fresh("shop.post")
    return Key(operation(text).digest.hex(), text)


def queued(here: Runtime, of: Key, task_id: str = "t2") -> None:
    assert here.leases.enqueue(Enqueue(of, "shop.post", SPAN, f"d of {task_id}", task_id, 3600.0)).granted


def running(here: Runtime, of: Key, task_id: str = "t1", *, guard: str = "") -> str:
    """Its holder.  ``guard``: the span has no r, and the start takes the slot of this delivery."""
    holder, span = new_id(), SPANS["while_executing"]
    started = here.leases.start(
        Start(
            of, "shop.post", span, guard or of.digest, guard or "d1", holder, task_id, "w1@host", 60.0, False
        )
    )
    assert started.answer == "granted"
    return holder


def fenced(here: Runtime, ledger: Ledger, of: Key, resource: str) -> Held:
    """A run with a lease and a fence of one holder."""
    op = operation(of.text, resource, task_id="t1")
    holder = running(here, of)
    claimed = ledger.store.claim(claim_of(op, holder))
    assert claimed.token is not None
    return Held(op, holder, claimed.token, claimed.attempt)


def waits(here: Runtime, of: Key, resource: str, task_id: str = "t2") -> None:
    ask = Defer(of, "shop.post", SPAN, f"d of {task_id}", 3600.0, limit=0, believed=60.0, resource=resource)
    assert not here.leases.defer(ask).overflow


def run(app: Celery, *arguments: str) -> Result:
    before = _state._tls.current_app
    try:
        return CliRunner().invoke(once, arguments, obj=CLIContext(app=app, no_color=True, workdir=None))
    finally:
        _state._set_current_app(before)


def events(ledger: Ledger, of: Key) -> list[tuple[Any, ...]]:
    found = ledger.execute(
        "select kind, task_name, old_task_id, old_holder, old_worker, actor, detail from once_fenced_event"
        " where key_digest = %s order by id",
        (bytes.fromhex(of.digest),),
    )
    return [tuple(event) for event in found]


# --- who blocks whom by a resource ------------------------------------------------------------------------------------


def test_key_that_waits_for_a_resource_names_who_has_it(here: Runtime, ledger: Ledger, resource: str) -> None:
    blocker, blocked = key(), key()
    held = fenced(here, ledger, blocker, resource)
    queued(here, blocked)
    waits(here, blocked, resource)
    told = explain(blocked.text)
    assert told.blocker is not None
    assert (told.blocker.key, told.blocker.token, told.blocker.task_id) == (blocker.text, held.token, "t1")
    sentence = str(told)
    assert "1 message waits for its turn" in sentence
    assert (
        f"it waits for {resource}, which is held by key {blocker.text}, task shop.post t1 on w1@host"
        in sentence
    )
    assert f"with token {held.token}, for 5" in sentence or f"with token {held.token}, for 60" in sentence


def test_holder_of_a_resource_tells_how_many_wait_for_it(
    here: Runtime, ledger: Ledger, resource: str
) -> None:
    blocker = key()
    fenced(here, ledger, blocker, resource)
    assert "wait" not in str(explain(blocker.text))
    for number in range(3):
        waits(here, key(), resource, f"t{number}")
    assert f"; 3 messages wait for {resource}, the first since 20" in str(explain(blocker.text))
    assert explain(resource).waiters[resource].number == 3


def test_resource_that_is_free_again_is_told(here: Runtime, ledger: Ledger, resource: str) -> None:
    blocked = key()
    held = fenced(here, ledger, key(), resource)
    queued(here, blocked)
    waits(here, blocked, resource)
    ledger.run(held)
    assert f"{resource}, which it waited for, is held by nobody now" in str(explain(blocked.text))


def test_lapsed_fence_that_is_waited_for_is_free_to_be_taken_over(
    here: Runtime, ledger: Ledger, resource: str
) -> None:
    blocked = key()
    fenced(here, ledger, key(), resource)
    waits(here, blocked, resource)
    ledger.expire(resource)
    told = str(explain(blocked.digest))
    assert "ago, free to be taken over" in told
    assert "to reach a worker" not in told


def test_fence_outside_of_tasks_is_told_and_freed(here: Runtime, ledger: Ledger, resource: str) -> None:
    blocked = key()
    with fence(resource) as grant:
        waits(here, blocked, resource)
        assert ", outside of tasks on " in str(explain(blocked.digest))
        told = explain(resource)
        assert f"fence {resource} held with token {grant.token} by" in str(told)
        assert "1 message waits for" in str(told)
        assert release(resource, told.fences[0].holder, reason="left behind", actor="alice")
        with pytest.raises(FencedOffError), grant.atomic():
            pass
    assert "no key or fence of this text is held" in str(explain(resource))


def test_blocker_and_waiters_as_json(app: Celery, here: Runtime, ledger: Ledger, resource: str) -> None:
    blocker, blocked = key(), key()
    held = fenced(here, ledger, blocker, resource)
    waits(here, blocked, resource)
    of_blocked = json.loads(run(app, "explain", blocked.digest, "--json").output)
    assert (of_blocked["blocked_by"]["key"], of_blocked["blocked_by"]["resource"]) == (blocker.text, resource)
    assert (of_blocked["blocked_by"]["token"], of_blocked["around"]["resource"]) == (held.token, resource)
    of_blocker = json.loads(run(app, "explain", blocker.text, "--json").output)
    assert (of_blocker["blocked_by"], of_blocker["waiters"][resource]["number"]) == (None, 1)


# --- a person frees exactly what explain shows ------------------------------------------------------------------------


def test_guard_of_a_twin_is_shown_and_freed(here: Runtime, ledger: Ledger) -> None:
    feed = key()
    holder = running(here, feed, guard="d" * 32)
    told = explain(feed.text)
    assert "in the way of its own redelivery alone" in str(told)
    assert [hold.holder for hold in told.holds] == [holder]
    assert release(feed.text, holder, reason="hung")
    assert explain(feed.digest).holds == ()
    assert [event[0] for event in events(ledger, feed)] == ["lease.released_by_hand"]


def test_everything_that_explain_shows_can_be_freed(
    app: Celery, here: Runtime, ledger: Ledger, resource: str
) -> None:
    feed = key()
    fenced(here, ledger, feed, resource)
    running(here, feed, guard="e" * 32)
    queued_span = replace(SPANS["until_executing"])
    here.leases.enqueue(Enqueue(feed, "shop.post", queued_span, "d9", "t9", 3600.0))
    told = explain(feed.text)
    assert (len(told.holds), len(told.fences)) == (3, 1)
    assert run(app, "release", feed.text, "--yes").exit_code == 0
    after = explain(feed.digest)
    assert (after.holds, after.fences) == ((), ())


def test_fence_of_a_call_that_has_a_digest_of_its_own_is_found_by_its_key(
    here: Runtime, ledger: Ledger, resource: str
) -> None:
    """``replay_for=0`` (L11)."""
    feed = key()
    holder = running(here, feed)
    op = replace(operation(feed.text, resource), digest=operation_digest(feed.digest, "run"))
    assert ledger.store.claim(claim_of(op, holder)).token
    told = explain(feed.text)
    assert [found.resource for found in told.fences] == [resource]
    assert told.entry is not None
    assert release(feed.text, holder)
    assert ledger.store.fence(resource) is None


def test_fences_of_a_key_are_looked_up_and_not_walked(here: Runtime, ledger: Ledger, resource: str) -> None:
    feed = key()
    fenced(here, ledger, feed, resource)
    ledger.execute(
        "insert into once_fenced_fence (resource, token, holder, expires_at)"
        " select 'bulk:' || n, 1, 'h', now() + interval '1 h' from generate_series(1, 20000) n"
    )
    ledger.execute("analyze once_fenced_fence, once_fenced_ledger")
    try:
        assert [found.resource for found in explain(feed.text).fences] == [resource]
        from celery_once_fenced.stores import postgres_operating as operating

        digest = bytes.fromhex(feed.digest)
        with_values = [digest, feed.text, digest, feed.text]
        plan = ledger.execute("explain " + operating._OF_KEY, with_values)
        assert "Seq Scan on once_fenced_fence" not in "\n".join(row[0] for row in plan)
    finally:
        ledger.execute("delete from once_fenced_fence where resource like 'bulk:%'")


# --- who freed it, when and why ---------------------------------------------------------------------------------------


def test_release_of_a_lease_is_kept_as_the_admin_keeps_it(app: Celery, here: Runtime, ledger: Ledger) -> None:
    feed = key()
    holder = running(here, feed)
    assert run(app, "release", feed.text, "--yes", "--reason", "hung", "--actor", "alice").exit_code == 0
    assert events(ledger, feed) == [
        ("lease.released_by_hand", "shop.post", "t1", holder, "w1@host", "alice (command line)", "hung")
    ]
    named = "select resource from once_fenced_event where key_digest = %s"
    assert ledger.execute(named, (bytes.fromhex(feed.digest),)) == [(feed.text,)]


def test_release_of_what_nobody_has_keeps_nothing(here: Runtime, ledger: Ledger) -> None:
    feed = key()
    running(here, feed)
    assert not release(feed.text, "somebody else", reason="hung")
    assert events(ledger, feed) == []


def test_release_is_logged_where_there_is_no_database(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Event] = []
    with make_app(monkeypatch, redis_url=redis_url, namespace=namespace) as app, observing(seen.append):
        feed = key()
        running(runtime_of(app), feed)
        assert run(app, "release", feed.text, "--yes", "--reason", "hung", "--actor", "bob").exit_code == 0
        runtime_of(app).close()
    (told,) = [event for event in seen if event.name == "lease.released_by_hand"]
    assert (told.fields["actor"], told.fields["why"]) == ("bob (command line)", "hung")
    assert not [event for event in seen if event.name == "store.failed"]


def test_lease_is_free_though_the_database_cannot_keep_who_freed_it(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = "postgresql://nobody@127.0.0.1:1/none"
    with make_app(monkeypatch, redis_url=redis_url, namespace=namespace, postgres_url=away) as app:
        feed = key()
        holder = running(runtime_of(app), feed)
        with pytest.raises(StoreUnavailableError, match=r"postgres .*the lease in Redis was freed"):
            release(feed.text, holder, reason="hung")
        with pytest.raises(StoreUnavailableError, match="postgres") as again:
            release(feed.digest, holder, reason="hung")
        assert "was freed" not in str(again.value)
        assert explain(feed.digest).holds == ()
        runtime_of(app).close()


@pytest.mark.parametrize("by", ["text", "digest"])
def test_release_is_told_until_the_next_run(here: Runtime, ledger: Ledger, resource: str, by: str) -> None:
    feed = key()
    held = fenced(here, ledger, feed, resource)
    assert release(feed.text, held.holder, reason="hung", actor="alice")
    queued(here, feed, "t9")  # which is no run yet
    told = str(explain(getattr(feed, by)))
    assert f"its fence was released by hand, the token raised to {held.token + 1}, at 20" in told
    assert "it was released by hand at 20" in told
    assert told.endswith("UTC by alice: hung.")
    fenced(here, ledger, feed, resource)
    assert "by hand" not in str(explain(getattr(feed, by)))


def test_release_of_a_lease_is_told_until_it_is_taken_again(here: Runtime) -> None:
    feed = key()
    assert release(feed.text, running(here, feed), reason="hung", actor="alice")
    assert str(explain(feed.digest)).endswith("UTC by alice: hung.")
    running(here, feed)
    assert "by hand" not in str(explain(feed.digest))


def test_resolved_and_forgotten_keys_say_so(here: Runtime, ledger: Ledger, resource: str) -> None:
    held = ledger.hold(operation(resource=resource))
    ledger.store.effect_start(EffectStart(held, "gateway", "hold"))
    ledger.abandon(held)
    name = held.operation.digest.hex()
    assert resolve(name, "failed", reason="no such charge", actor="ada")
    assert "it was resolved by hand as failed at 20" in str(explain(name))
    assert forget(name, reason="pay again", actor="bob")
    told = explain(name)
    assert "it was forgotten by hand, being failed, at 20" in str(told)
    assert [(one.kind, one.actor, one.reason) for one in told.decisions] == [
        ("ledger.resolved", "ada", "no such charge"),
        ("ledger.forgotten", "bob", "pay again"),
    ]


def test_decisions_as_json(app: Celery, here: Runtime) -> None:
    feed = key()
    release(feed.text, running(here, feed), reason="hung", actor="alice")
    (told,) = json.loads(run(app, "explain", feed.digest, "--json").output)["decisions"]
    assert (told["kind"], told["actor"], told["reason"]) == ("lease.released_by_hand", "alice", "hung")
    assert told["at"].startswith("20")


# --- steps of an execution --------------------------------------------------------------------------------------------


def test_step_that_is_under_way_is_told_and_a_release_warns_of_it(
    app: Celery, here: Runtime, ledger: Ledger, resource: str
) -> None:
    held = fenced(here, ledger, key(), resource)
    of = held.operation.key
    assert run(app, "explain", of).output.count("step") == 0
    ledger.store.effect_start(EffectStart(held, "gateway", "hold"))
    assert "; step 'gateway' is under way since 20" in str(explain(of))
    (told,) = json.loads(run(app, "explain", of, "--json").output)["effects"]
    assert (told["name"], told["state"], told["since"][:2]) == ("gateway", "started", "20")
    asked = run(app, "release", of)
    assert asked.output.count("step 'gateway' is under way since 20") == 2, "once in the explanation"
    assert "once freed, what becomes of it may stay unknown, and the key may end in doubt" in asked.output
    ledger.store.effect_finish(EffectFinish(held.operation.digest, "gateway", held.holder, "done", "1", None))
    assert ("gateway" in str(explain(of)), explain(of).warning) == (False, "")


# --- a window ---------------------------------------------------------------------------------------------------------


def test_window_is_told_as_one_before_and_after_the_run(app: Celery) -> None:
    @app.task(
        base=SingletonTask, once=Once(unique="until_expired", window="30s"), name="shop.digest", shared=False
    )
    def digest(user: int) -> None: ...

    called = digest.delay(7)
    sentence = str(explain(called.outcome.key))
    assert ": called at 20" in sentence
    assert f"by task {called.id}, further calls are duplicates until 20" in sentence
    assert sentence.endswith("UTC (window).")
    assert "unless it runs" not in sentence


# --- a text that nobody knows -----------------------------------------------------------------------------------------


def test_mistyped_key_gets_a_hint(app: Celery, here: Runtime) -> None:
    @app.task(base=SingletonTask, once=Once(key="charge:{order}"), name="shop.tasks.charge", shared=False)
    def charge(order: str) -> None: ...

    called = charge.delay("a|b\nc")
    assert called.outcome.key == r"shop.tasks.charge:charge:a\x7cb\nc"
    assert not (wrong := explain("shop.task.charge:charge:1")).known
    assert "no registered task has the scope 'shop.task.charge'; did you mean 'shop.tasks.charge'?" in str(
        wrong
    )
    assert [explain(free).hint for free in ("shop.tasks.charge:charge:1", "lease:report")] == ["", ""]
    without = explain("charge:a|b\nc")
    assert f"did you mean {called.outcome.key!r}, which begins with its scope?" in str(without)
    assert explain("shop.tasks.charge:charge:a|b\nc").holds[0].task_id == called.id
