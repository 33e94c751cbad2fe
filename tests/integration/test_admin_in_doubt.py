"""The admin page *Keys in doubt*: who may decide, what a decision needs, and that it is made once and recorded (L14)."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from django.conf import settings
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.db import connections
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils.html import escape

from celery_once_fenced import runtime
from celery_once_fenced.post import CeleryPost
from celery_once_fenced.runtime import runtime_of
from celery_once_fenced.stores import EffectStart, Held
from django_celery_once_fenced.models import Event, LedgerEntry
from tests.fixtures.ledger import Ledger, operation

PAGE = "/admin/once_fenced/indoubt/"
HOSTILE = "<script>alert(1)</script>\"'&amp; \u202eevil\u202c </td></table>"


@pytest.fixture(scope="module")
def ledger(shop: str) -> Iterator[Ledger]:
    opened = Ledger(shop)
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def app(ledger: Ledger, namespace: str, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    """The Celery app of the admin's process."""
    with Celery("admin", broker="memory://", set_as_current=False) as app:
        app.conf.once_fenced = settings.CELERY_ONCE_FENCED | {"redis_url": redis_url, "namespace": namespace}
        monkeypatch.setattr(runtime, "current", lambda: runtime_of(app))
        app.control.purge()  # the broker in memory is the process's
        yield app
        runtime_of(app).close()
    with connections["default"].cursor() as cursor:
        cursor.execute(
            "TRUNCATE once_fenced_fence, once_fenced_ledger, once_fenced_event, once_fenced_outbox, auth_user CASCADE"
        )


@pytest.fixture
def in_doubt(app: Celery, ledger: Ledger) -> Callable[..., Held]:
    def make(key: str | None = None, held: Held | None = None, **options: Any) -> Held:
        options.setdefault("namespace", app.conf.once_fenced["namespace"])
        found = held or ledger.hold(operation(key, **options))
        ledger.store.effect_start(EffectStart(found, "gateway", "hold"))
        signature = app.signature("shop.note", ()).set(task_id=found.operation.task_id)
        ledger.abandon(found, message=CeleryPost(app).pack(signature, "run", "d" * 32))
        return found

    return make


@pytest.fixture
def client_of() -> Callable[..., Client]:
    def make(*permissions: str, superuser: bool = False) -> Client:
        user = User.objects.create(username=secrets.token_hex(4), is_staff=True, is_superuser=superuser)
        user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
        client = Client()
        client.force_login(user)
        return client

    return make


@pytest.fixture
def resolver(client_of: Callable[..., Client]) -> Client:
    """Staff with just the two permissions that it takes."""
    return client_of("view_indoubt", "resolve_indoubt")


def pk(held: Held) -> str:
    return held.operation.digest.hex()


def asked(client: Client, *some: Held) -> str:
    """The page that asks what became of them."""
    response = client.post(
        PAGE, {"action": "resolve", "index": "0", "_selected_action": [pk(held) for held in some]}
    )
    assert response.status_code == 200
    return response.text


def decide(client: Client, *some: Held, page: str | None = None, **given: str) -> Any:
    """Send the form of a page that asked."""
    text = asked(client, *some) if page is None else page
    hidden: dict[str, list[str]] = {}
    for name, value in re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', text):
        hidden.setdefault(name, []).append(value)
    return client.post(PAGE, {**hidden, "resolve": "Resolve", **given}, follow=True)


def state(held: Held) -> str:
    return str(LedgerEntry.objects.get(pk=pk(held)).state)


# --- who may ----------------------------------------------------------------------------------------------------------


def test_viewer_sees_what_is_in_doubt_and_nothing_else(
    client_of: Callable[..., Client], ledger: Ledger, in_doubt: Callable[..., Held]
) -> None:
    held, running = in_doubt(), ledger.hold(operation())
    text = client_of("view_indoubt").get(PAGE).text
    assert held.operation.key in text
    assert "gateway" in text
    assert running.operation.key not in text
    assert "Resolve selected" not in text


def test_viewer_cannot_decide(client_of: Callable[..., Client], in_doubt: Callable[..., Held]) -> None:
    held = in_doubt()
    given = {"action": "resolve", "_selected_action": pk(held), "seen": held.holder, "resolve": "Resolve"}
    client_of("view_indoubt").post(PAGE, {**given, "outcome": "failed", "reason": "x"})
    assert state(held) == "in_doubt"


def test_staff_without_permission_and_strangers_see_nothing(client_of: Callable[..., Client]) -> None:
    assert client_of("resolve_indoubt").get(PAGE).status_code == 403
    assert Client().get(PAGE)["Location"].startswith("/admin/login/")


def test_nobody_adds_changes_or_deletes(
    client_of: Callable[..., Client], in_doubt: Callable[..., Held]
) -> None:
    client, held = client_of(superuser=True), in_doubt()
    assert client.get(f"{PAGE}add/").status_code == 403
    assert client.post(f"{PAGE}{pk(held)}/delete/", {"post": "yes"}).status_code == 403
    client.post(PAGE, {"action": "delete_selected", "_selected_action": pk(held), "post": "yes"})
    assert state(held) == "in_doubt"


def test_decision_takes_a_token_of_the_form(resolver: Client, in_doubt: Callable[..., Held]) -> None:
    held = in_doubt()
    strict = Client(enforce_csrf_checks=True)
    strict.cookies = resolver.cookies
    given = {"action": "resolve", "_selected_action": pk(held), "seen": held.holder, "resolve": "Resolve"}
    assert strict.post(PAGE, {**given, "outcome": "failed", "reason": "x"}).status_code == 403
    assert state(held) == "in_doubt"


# --- the decision -----------------------------------------------------------------------------------------------------


def test_page_asks_before_anything_is_done(resolver: Client, in_doubt: Callable[..., Held]) -> None:
    held = in_doubt()
    text = asked(resolver, held).replace("<wbr>", "")
    for expected in (held.operation.key, "gateway", "Downstream key", "Run again", "Reason"):
        assert expected in text
    assert state(held) == "in_doubt"


@pytest.mark.parametrize(
    ("outcome", "becomes", "result"),
    [("succeeded", "succeeded", {"id": 7}), ("failed", "failed", None), ("again", "retryable", None)],
)
def test_decision_is_recorded_with_who_and_why(
    resolver: Client, in_doubt: Callable[..., Held], outcome: str, becomes: str, result: Any
) -> None:
    held = in_doubt()
    given = {"result": json.dumps(result)} if result else {}
    page = decide(resolver, held, outcome=outcome, reason="seen in their books", **given)
    assert escape(f"{held.operation.key}") in page.text
    entry = LedgerEntry.objects.get(pk=pk(held))
    assert (entry.state, json.loads(entry.result or "null")) == (becomes, result)
    user = User.objects.get()
    event = Event.objects.get(kind="ledger.resolved")
    assert (event.actor, json.loads(event.detail or "")["reason"]) == (user.username, "seen in their books")
    log = LogEntry.objects.get(user=user)
    assert (log.object_id, log.get_change_message()) == (pk(held), f"{outcome}: seen in their books")


def test_run_again_publishes_the_message(
    app: Celery, resolver: Client, in_doubt: Callable[..., Held]
) -> None:
    held = in_doubt()
    decide(resolver, held, outcome="again", reason="try")
    with app.connection_for_write() as connection:
        message = connection.SimpleQueue("celery").get(timeout=5)
        message.ack()
    assert message.headers["id"] == held.operation.task_id


def test_several_are_decided_at_once(resolver: Client, in_doubt: Callable[..., Held]) -> None:
    some = [in_doubt(), in_doubt()]
    decide(resolver, *some, outcome="failed", reason="an outage of theirs")
    assert [state(held) for held in some] == ["failed", "failed"]
    assert LogEntry.objects.count() == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"outcome": "failed", "reason": "  "}, "This field is required"),
        ({"reason": "x"}, "This field is required"),
        ({"outcome": "deleted", "reason": "x"}, "Select a valid choice"),
        ({"outcome": "succeeded", "reason": "x", "result": "{"}, "Enter a valid JSON"),
        ({"outcome": "failed", "reason": "x", "result": "7"}, "Only what succeeded has a result"),
    ],
)
def test_incomplete_decision_is_asked_for_again(
    resolver: Client, in_doubt: Callable[..., Held], given: dict[str, str], said: str
) -> None:
    held = in_doubt()
    page = decide(resolver, held, **given)
    assert said in page.text
    assert state(held) == "in_doubt"
    decide(resolver, held, page=page.text, outcome="failed", reason="x", result="")
    assert state(held) == "failed"


def test_falsy_result_is_a_result(resolver: Client, in_doubt: Callable[..., Held]) -> None:
    held = in_doubt()
    decide(resolver, held, outcome="succeeded", reason="x", result="0")
    assert LedgerEntry.objects.get(pk=pk(held)).result == "0"


def test_the_page_of_a_record_leads_to_the_question(resolver: Client, in_doubt: Callable[..., Held]) -> None:
    held = in_doubt()
    page = resolver.get(f"{PAGE}{pk(held)}/change/").text
    (address,) = re.findall(r'<form method="post" action="([^"]*)" class="of-actions">', page)
    (action,) = re.findall(r'name="action" value="(\w+)"', page)
    asked_for = resolver.post(address, {"action": action, "_selected_action": pk(held)}).text
    assert "What nobody knows" in asked_for
    assert state(held) == "in_doubt"


# --- too late ---------------------------------------------------------------------------------------------------------


def test_second_decision_is_refused_and_said_so(resolver: Client, in_doubt: Callable[..., Held]) -> None:
    held = in_doubt()
    page = asked(resolver, held)
    decide(resolver, held, outcome="failed", reason="first")
    late = decide(resolver, held, page=page, outcome="again", reason="second")
    assert f"{held.operation.key}</bdi>: not resolved. It is in doubt no more" in late.text
    assert state(held) == "failed"
    assert LogEntry.objects.count() == 1


def test_decision_about_an_earlier_attempt_is_refused(
    resolver: Client, ledger: Ledger, in_doubt: Callable[..., Held]
) -> None:
    held = in_doubt()
    page = asked(resolver, held)
    decide(resolver, held, outcome="again", reason="try")
    in_doubt(held=ledger.hold(held.operation))
    late = decide(resolver, held, page=page, outcome="failed", reason="of the first attempt")
    assert "another attempt than the page showed" in late.text
    assert state(held) == "in_doubt"


@pytest.mark.parametrize("selected", ["00", "ab" * 32])
def test_what_was_never_in_doubt_is_not_decided(resolver: Client, selected: str) -> None:
    given = {"action": "resolve", "_selected_action": selected, "seen": "x", "resolve": "Resolve"}
    page = resolver.post(PAGE, {**given, "outcome": "failed", "reason": "x"}, follow=True)
    assert ": nothing was done." in page.text


def test_database_that_is_away_is_said_so(
    resolver: Client, in_doubt: Callable[..., Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    from celery_once_fenced.errors import StoreUnavailableError

    def away(*_: object) -> None:
        raise StoreUnavailableError("postgres", "away")

    held = in_doubt()
    page = asked(resolver, held)
    ledger: Any = runtime.current().ledger
    monkeypatch.setattr(ledger, "resolve", away)
    said = decide(resolver, held, page=page, outcome="failed", reason="x").text
    assert "Postgres is unavailable" in said
    assert "not resolved" not in said


# --- harmless ---------------------------------------------------------------------------------------------------------


def test_what_a_key_holds_is_shown_and_does_nothing(resolver: Client, in_doubt: Callable[..., Held]) -> None:
    held = in_doubt(HOSTILE, resource="account:1")
    texts = [resolver.get(PAGE).text, asked(resolver, held), resolver.get(f"{PAGE}{pk(held)}/change/").text]
    texts.append(decide(resolver, held, outcome="failed", reason=HOSTILE).text)
    for text in texts:
        assert "<script>alert" not in text
        assert f"<bdi>{escape(HOSTILE)}"[:40] in text
        assert len(re.findall("<table", text)) == len(re.findall("</table>", text))
        assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", text)


def test_number_of_queries_does_not_grow_with_the_rows(
    resolver: Client, in_doubt: Callable[..., Held]
) -> None:
    def queries() -> int:
        with CaptureQueriesContext(connections["default"]) as found:
            resolver.get(PAGE)
        return len(found)

    in_doubt()
    before = queries()
    for _ in range(5):
        in_doubt()
    assert queries() == before <= 12
