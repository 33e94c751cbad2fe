"""What a person does in the admin: who may, what is asked first, what happens, and that it is written down."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from datetime import timedelta
from html import unescape
from typing import Any

import pytest
from celery import Celery
from django.conf import settings
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission, User
from django.db import connections
from django.test import Client
from django.utils import timezone

from celery_once_fenced import runtime
from celery_once_fenced.keys import Key
from celery_once_fenced.policy import SPANS
from celery_once_fenced.stores import EffectFinish, EffectStart, Enqueue, Start
from django_celery_once_fenced.lock_list import LockQuery, lock_page
from django_celery_once_fenced.models import Event, Fence, LedgerEntry
from example_project.shop.models import Account, Order
from tests.fixtures.ledger import Ledger, operation

LOCKS, RECORDS = "/admin/once_fenced/heldlock/", "/admin/once_fenced/ledgerentry/"
VIEWS = ("view_heldlock", "view_ledgerentry", "view_order", "change_order", "view_overview")
TASK = "shop.feed"


# --- release ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot", ["q", "r"])
def test_a_lease_is_released_with_a_reason_and_written_down(releaser: Client, leases: Any, slot: str) -> None:
    digest = queued(leases, "feed:1") if slot == "q" else running(leases, "feed:1").key.digest
    asked = ask(releaser, "release", *shown(releaser))
    assert "feed:<wbr>1" in asked
    assert "What will happen" in asked
    assert [hold.slot for hold in leases.look(digest)] == [slot]  # asked, and not done
    answer = confirm(releaser, asked, reason="stuck since noon")
    assert ": released." in answer.text
    assert leases.look(digest) == []
    event = Event.objects.get(kind="lease.released_by_hand")
    assert (event.key_digest, event.detail) == (digest, "stuck since noon")
    logged = LogEntry.objects.get()
    assert (logged.object_repr, logged.change_message) == ("feed:1", "release: stuck since noon")
    assert event.actor == logged.user.username


def test_without_a_reason_nothing_is_released(releaser: Client, leases: Any) -> None:
    digest = queued(leases, "feed:1")
    answer = confirm(releaser, ask(releaser, "release", *shown(releaser)), reason=" ")
    assert "Please correct the errors below." in answer.text
    assert leases.look(digest)
    assert (LogEntry.objects.count(), Event.objects.count()) == (0, 0)


def test_another_holder_than_the_page_showed_is_left_alone(releaser: Client, leases: Any) -> None:
    """Two pages were open: the list, and the question.  The holder changed after either of them."""
    old = running(leases, "feed:1")
    seen = shown(releaser)
    asked = ask(releaser, "release", *seen)
    release_by_its_holder(leases, old)
    new = running(leases, "feed:1", key=old)
    assert "is no longer the one that the page showed" in confirm(releaser, asked).text
    assert "another holds it by now than the page showed" in ask(releaser, "release", *seen)
    assert [hold.holder for hold in leases.look(old.key.digest)] == [new.holder]
    assert LogEntry.objects.count() == 0


def test_the_holder_that_is_compared_decides(releaser: Client, leases: Any) -> None:
    """The control: the same question with the present holder does release."""
    old = running(leases, "feed:1")
    release_by_its_holder(leases, old)
    running(leases, "feed:1", key=old)
    assert ": released." in confirm(releaser, ask(releaser, "release", *shown(releaser))).text
    assert leases.look(old.key.digest) == []


def test_a_fence_that_is_bumped_shuts_its_holder_out(releaser: Client, ledger: Ledger, leases: Any) -> None:
    held = ledger.hold(operation("post:1", "account:7"))
    lease = running(leases, "post:1", holder=held.holder)
    answer = confirm(releaser, ask(releaser, "bump", *shown(releaser)), reason="frozen")
    assert "released, and its fence bumped" in answer.text
    fence = Fence.objects.get(resource="account:7")
    assert (fence.expires_at, fence.token > held.token) == (None, True)
    assert leases.look(lease.key.digest) == []
    assert ledger.renew(held) == ["lost"]
    assert Event.objects.get(kind="fence.force_released").detail == "frozen"
    assert ledger.hold(operation("post:1", "account:7")).token > fence.token


def test_a_fence_that_is_only_released_keeps_its_holder_in(
    releaser: Client, ledger: Ledger, leases: Any
) -> None:
    """The control of the one above, and what the page says before: the fence is not freed."""
    held = ledger.hold(operation("post:1", "account:7"))
    lease = running(leases, "post:1", holder=held.holder)
    asked = ask(releaser, "release", *shown(releaser))
    assert "may still commit with token" in asked
    confirm(releaser, asked)
    assert leases.look(lease.key.digest) == []
    assert ledger.renew(held) == ["renewed"]


@pytest.mark.parametrize("name", ["release", "bump"])
def test_a_step_under_way_is_told_before_its_run_is_released(
    releaser: Client, ledger: Ledger, leases: Any, name: str
) -> None:
    held = ledger.hold(operation("post:1", "account:7"))
    warned = "Its step “gateway” was started at"
    page = f"{LOCKS}{quote('f:account:7')}/change/"
    assert warned not in ask(releaser, name, *shown(releaser)) + releaser.get(page).text
    ledger.store.effect_start(EffectStart(held, "gateway", "hold"))
    for text in (ask(releaser, name, *shown(releaser)), releaser.get(page).text):
        assert warned in text
        assert "the key may end in doubt" in text
    ledger.store.effect_finish(EffectFinish(held.operation.digest, "gateway", held.holder, "done", "1"))
    assert warned not in ask(releaser, name, *shown(releaser)) + releaser.get(page).text


def test_a_fence_with_another_holder_than_the_page_showed_is_left_alone(
    releaser: Client, ledger: Ledger
) -> None:
    ledger.lapsed(operation("post:1", "account:7"))
    asked = ask(releaser, "bump", *shown(releaser))
    heir = ledger.hold(operation("post:1", "account:7"))
    assert "is no longer the one that the page showed" in confirm(releaser, asked).text
    assert ledger.renew(heir) == ["renewed"]


@pytest.mark.parametrize(
    ("slot", "why"),
    [("q", "a fence is taken when a run begins"), ("r", "after a release two runs may overlap")],
)
def test_a_lease_without_a_fence_is_not_bumped_and_the_page_says_why(
    releaser: Client, leases: Any, slot: str, why: str
) -> None:
    digest = queued(leases, "feed:1") if slot == "q" else running(leases, "feed:1").key.digest
    page = releaser.get(f"{LOCKS}{quote(f'{slot}:{digest}')}/change/").text
    assert re.findall(r'name="action" value="(\w+)"', page) == ["release"]
    assert why in page
    asked = ask(releaser, "bump", *shown(releaser))
    assert why in asked
    assert 'name="confirmed"' not in asked
    forced = {"_selected_action": shown(releaser), "confirmed": "1", "reason": "because"}
    assert why in releaser.post(f"{LOCKS}ask/bump/", forced, follow=True).text
    assert [hold.slot for hold in leases.look(digest)] == [slot]
    assert LogEntry.objects.count() == 0


def test_a_fence_has_both_actions(releaser: Client, ledger: Ledger) -> None:
    """The control of the one above."""
    ledger.hold(operation("post:1", "account:7"))
    page = releaser.get(f"{LOCKS}{quote('f:account:7')}/change/").text
    assert re.findall(r'name="action" value="(\w+)"', page) == ["release", "bump"]
    assert "no fence to bump" not in page


def test_what_nobody_holds_any_more_is_named_by_its_key(releaser: Client, leases: Any) -> None:
    old = running(leases, "feed:1")
    asked = ask(releaser, "release", *shown(releaser))
    release_by_its_holder(leases, old)
    for text in (confirm(releaser, asked).text, ask(releaser, "release", *seen_in(asked))):
        assert re.search(r"feed:(<wbr>)?1", text)
        assert old.key.digest not in re.sub(r'value="[^"]*"', "", text)


def test_an_event_of_a_lease_is_named_by_its_key(
    client_of: Callable[..., Client], releaser: Client, leases: Any
) -> None:
    digest = queued(leases, "feed:1")
    confirm(releaser, ask(releaser, "release", *shown(releaser)))
    events = client_of("view_event").get("/admin/once_fenced/event/").text
    assert "feed:<wbr>1" in events
    assert digest not in events


def test_a_twin_guard_is_released_by_its_own_name(releaser: Client, leases: Any) -> None:
    running(leases, "feed:1", slot="d" * 32)
    confirm(releaser, ask(releaser, "release", *shown(releaser)))
    assert list(leases.holds()) == []


def test_several_are_released_at_once_and_each_is_written_down(releaser: Client, leases: Any) -> None:
    for number in range(3):
        queued(leases, f"feed:{number}")
    confirm(releaser, ask(releaser, "release", *shown(releaser)))
    assert list(leases.holds()) == []
    assert LogEntry.objects.count() == Event.objects.count() == 3


def test_the_page_of_a_lock_asks_too(releaser: Client, leases: Any) -> None:
    digest = queued(leases, "feed:1")
    text = releaser.get(f"{LOCKS}{quote('q:' + digest)}/change/").text
    (seen,) = re.findall(r'name="_selected_action" value="([^"]*)"', text)
    assert unescape(seen) == shown(releaser)[0]


@pytest.mark.parametrize("action", ["", "delete_selected", "purge"])
def test_no_other_action_does_anything(releaser: Client, leases: Any, action: str) -> None:
    digest = queued(leases, "feed:1")
    answer = releaser.post(LOCKS, {"action": action, "_selected_action": shown(releaser)}, follow=True)
    assert "No action selected." in answer.text
    assert leases.look(digest)


@pytest.mark.parametrize("seen", ["", "|", "x", "|q%3A", "h|r%3Azz", "h|f%3A", "%|q%3A%00", "a|b|c"])
def test_nonsense_is_nobodys_lock(releaser: Client, leases: Any, seen: str) -> None:
    asked = ask(releaser, "release", seen)
    assert "nobody holds it any more" in asked
    assert 'name="confirmed"' not in asked


# --- who may ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["release", "bump"])
def test_who_may_only_look_is_offered_nothing_and_can_do_nothing(
    client_of: Callable[..., Client], releaser: Client, leases: Any, action: str
) -> None:
    digest = queued(leases, "feed:1")
    seen = shown(releaser)
    viewer = client_of(*VIEWS)
    page = viewer.get(LOCKS).text
    assert "feed:" in page
    assert "action-select" not in page
    assert "of-actions" not in viewer.get(f"{LOCKS}{quote('q:' + digest)}/change/").text
    for address in (LOCKS, f"{LOCKS}ask/{action}/"):
        data = {"action": action, "_selected_action": seen, "confirmed": "1", "reason": "because"}
        assert viewer.post(address, data).status_code == 403
    assert leases.look(digest)
    assert LogEntry.objects.count() == 0


EVENTS, DOUBTS, OVERVIEW = (f"/admin/once_fenced/{page}/" for page in ("event", "indoubt", "overview"))
DONE = {
    "confirmed": "1",
    "forget": "1",
    "resolve": "1",
    "outcome": "failed",
    "reason": "because",
    "grace": "1",
}
"""What answers every question, whichever it is."""


@pytest.fixture
def posts(leases: Any, ledger: Ledger) -> dict[str, tuple[str, dict[str, Any]]]:
    """Everything that can be posted to the pages, as the pages themselves would post it; the first five do something."""
    digest = queued(leases, "feed:1")
    held, done, doubtful = operation("post:1", "account:7"), operation("post:2"), operation("post:3")
    ledger.hold(held)
    ledger.run(ledger.hold(done))
    ledger.run(ledger.hold(operation("post:4")))
    ledger.hold(doubtful)
    LedgerEntry.objects.filter(pk=doubtful.digest.hex()).update(state="in_doubt")
    LedgerEntry.objects.filter(key__startswith="post:4").update(
        retain_until=timezone.now() - timedelta(days=9)
    )
    seen = [lock.seen for lock in lock_page(LockQuery()).locks]
    rows = {op: LedgerEntry.objects.get(pk=op.digest.hex()) for op in (done, doubtful)}
    chosen = {op: {"_selected_action": [row.pk], "seen": [row.holder]} for op, row in rows.items()}
    event = Event.objects.create(at=timezone.now(), kind="x")
    pages = {f"{LOCKS}{quote('q:' + digest)}/", f"{LOCKS}{quote('f:account:7')}/", f"{EVENTS}{event.pk}/"}
    pages |= {f"{RECORDS}{rows[done].pk}/", f"{DOUBTS}{rows[doubtful].pk}/"}
    return {
        "release": (f"{LOCKS}ask/release/", {"_selected_action": seen}),
        "bump": (f"{LOCKS}ask/bump/", {"_selected_action": seen}),
        "forget": (RECORDS, {"action": "forget", **chosen[done]}),
        "resolve": (DOUBTS, {"action": "resolve", **chosen[doubtful]}),
        "prune": (f"{RECORDS}prune/", {}),
        "release from the list": (LOCKS, {"action": "release", "_selected_action": seen}),
        "bump from the list": (LOCKS, {"action": "bump", "_selected_action": seen}),
        "forget what is in doubt": (DOUBTS, {"action": "forget", **chosen[doubtful]}),
        "resolve among the records": (RECORDS, {"action": "resolve", **chosen[doubtful]}),
        "prune what is in doubt": (f"{DOUBTS}prune/", {}),
        "overview": (OVERVIEW, {"action": "prune"}),
        **{
            f"{verb} {page}": (f"{page}{verb}/", {"post": "yes", "state": "succeeded", "token": "99"})
            for page in pages
            for verb in ("change", "delete")
        },
        **{f"add to {page}": (f"{page}add/", {}) for page in (LOCKS, RECORDS, DOUBTS, EVENTS, OVERVIEW)},
    }


def everything(leases: Any) -> Any:
    rows = [list(model.objects.order_by("pk").values()) for model in (LedgerEntry, Fence, Event, LogEntry)]
    return rows, sorted(hold.holder for hold in leases.holds())


ALL_VIEWS = ("view_overview", "view_heldlock", "view_ledgerentry", "view_indoubt", "view_event", "view_fence")


@pytest.mark.parametrize("permissions", [ALL_VIEWS, ()], ids=["may look", "may nothing"])
def test_nothing_can_be_done_by_a_post_without_its_permission(
    client_of: Callable[..., Client],
    posts: dict[str, tuple[str, dict[str, Any]]],
    leases: Any,
    permissions: tuple[str, ...],
) -> None:
    before = everything(leases)
    for client in (client_of(*permissions), Client()):
        for name, (address, given) in posts.items():
            answer = client.post(address, {**DONE, **given})
            assert answer.status_code in (200, 302, 403, 404), name
            assert everything(leases) == before, name


@pytest.mark.parametrize("name", ["release", "bump", "forget", "resolve", "prune"])
def test_the_same_post_with_the_permission_does_it(
    client_of: Callable[..., Client], posts: dict[str, tuple[str, dict[str, Any]]], leases: Any, name: str
) -> None:
    """The control of the one above."""
    before = everything(leases)
    address, given = posts[name]
    client_of(superuser=True).post(address, {**DONE, **given})
    assert everything(leases) != before


def test_each_action_has_a_permission_of_its_own(client_of: Callable[..., Client], leases: Any) -> None:
    queued(leases, "feed:1")
    client = client_of(*VIEWS, "release_heldlock")
    seen = shown(client)
    assert "What will happen" in ask(client, "release", *seen)
    assert client.post(f"{LOCKS}ask/bump/", {"_selected_action": seen}).status_code == 403


def test_without_the_view_permission_no_action_is_taken(
    client_of: Callable[..., Client], releaser: Client, leases: Any
) -> None:
    queued(leases, "feed:1")
    data = {"_selected_action": shown(releaser), "confirmed": "1", "reason": "because"}
    assert client_of("release_heldlock").post(f"{LOCKS}ask/release/", data).status_code == 403


def test_nothing_is_done_by_a_link(releaser: Client, leases: Any) -> None:
    queued(leases, "feed:1")
    (seen,) = shown(releaser)
    for address in (LOCKS, f"{LOCKS}ask/release/"):
        answer = releaser.get(
            address, {"action": "release", "_selected_action": seen, "confirmed": "1", "reason": "x"}
        )
        assert answer.status_code in (200, 405)
    assert len(list(leases.holds())) == 1


def test_a_form_of_another_site_is_refused(releaser: Client, leases: Any) -> None:
    queued(leases, "feed:1")
    strict = Client(enforce_csrf_checks=True)
    strict.cookies = releaser.cookies
    data = {"_selected_action": shown(releaser), "confirmed": "1", "reason": "x"}
    assert strict.post(f"{LOCKS}ask/release/", data).status_code == 403
    assert len(list(leases.holds())) == 1


# --- forget and prune -------------------------------------------------------------------------------------------------


def test_a_key_that_is_forgotten_may_run_again(keeper: Client, ledger: Ledger) -> None:
    op = operation("post:1")
    ledger.run(ledger.hold(op))
    asked = keeper.post(RECORDS, {"action": "forget", "_selected_action": [op.digest.hex()]}).text
    assert "runs from the start" in asked
    assert ledger.claim(op).verdict == "completed"
    answer = keeper.post(RECORDS, {**hidden(asked), "forget": "1", "reason": "wrong amount"}, follow=True)
    assert "forgotten, and may run again" in answer.text
    assert ledger.claim(op).verdict == "granted"
    assert "wrong amount" in str(Event.objects.get(kind="ledger.forgotten").detail)
    assert LogEntry.objects.get().change_message == "forget: wrong amount"


def test_a_running_key_is_not_forgotten(keeper: Client, ledger: Ledger) -> None:
    held = ledger.hold(operation("post:1"))
    asked = keeper.post(RECORDS, {"action": "forget", "_selected_action": [held.operation.digest.hex()]}).text
    assert "Nothing: it is running." in asked
    answer = keeper.post(RECORDS, {**hidden(asked), "forget": "1", "reason": "x"}, follow=True)
    assert ": not forgotten." in answer.text
    assert LedgerEntry.objects.count() == 1


def test_another_attempt_than_the_page_showed_is_not_forgotten(keeper: Client, ledger: Ledger) -> None:
    op = operation("post:1")
    held = ledger.hold(op)
    ledger.abandon(held)
    asked = keeper.post(RECORDS, {"action": "forget", "_selected_action": [op.digest.hex()]}).text
    ledger.run(ledger.hold(op))
    answer = keeper.post(RECORDS, {**hidden(asked), "forget": "1", "reason": "x"}, follow=True)
    assert ": not forgotten." in answer.text
    assert LedgerEntry.objects.count() == 1


def test_a_key_that_somebody_has_forgotten_is_named_and_said_to_be_gone(
    keeper: Client, ledger: Ledger
) -> None:
    op = operation("post:1")
    ledger.run(ledger.hold(op))
    chosen = {"action": "forget", "_selected_action": [op.digest.hex()]}
    asked = keeper.post(RECORDS, chosen).text
    confirmed = {**hidden(asked), "forget": "1", "reason": "twice"}
    keeper.post(RECORDS, confirmed)
    for late in (confirmed, chosen):  # the question was open twice, and so was the list
        answer = keeper.post(RECORDS, late, follow=True).text
        assert "post:1</bdi>: nothing was done. It is gone already" in answer
        assert op.digest.hex() not in answer
    LogEntry.objects.all().delete()
    assert (
        "post:1</bdi>: nothing was done." in keeper.post(RECORDS, chosen, follow=True).text
    )  # from its event


def test_prune_says_how_much_is_due_and_deletes_only_that(keeper: Client, ledger: Ledger) -> None:
    for number in range(3):
        ledger.run(ledger.hold(operation(f"old:{number}")))
    ledger.run(ledger.hold(operation("kept")))
    LedgerEntry.objects.filter(key__startswith="old").update(retain_until=timezone.now() - timedelta(days=1))
    page = keeper.get(f"{RECORDS}prune/").text
    assert "About 3 rows are due" in page
    assert LedgerEntry.objects.count() == 4
    answer = keeper.post(f"{RECORDS}prune/", {"grace": "1"}, follow=True)
    assert "Pruned: 3 dedup records" in answer.text
    assert [entry.key for entry in LedgerEntry.objects.all()] == ["kept"]
    assert Event.objects.get(kind="ledger.pruned").actor == LogEntry.objects.get().user.username


def test_the_page_of_a_record_offers_to_forget_it_unless_it_runs(keeper: Client, ledger: Ledger) -> None:
    done, held = operation("post:1"), operation("post:2")
    ledger.run(ledger.hold(done))
    ledger.hold(held)
    offers = [
        re.findall(r'name="action" value="(\w+)"', keeper.get(f"{RECORDS}{op.digest.hex()}/change/").text)
        for op in (done, held)
    ]
    assert offers == [["forget"], []]


def test_who_may_only_look_forgets_and_prunes_nothing(
    client_of: Callable[..., Client], ledger: Ledger
) -> None:
    op = operation("post:1")
    ledger.run(ledger.hold(op))
    viewer = client_of(*VIEWS)
    page = viewer.get(RECORDS).text
    assert "post:" in page
    assert "prune/" not in page
    assert "action-select" not in page
    assert viewer.get(f"{RECORDS}prune/").status_code == 403
    assert viewer.post(f"{RECORDS}prune/", {"grace": "1"}).status_code == 403
    data = {
        "action": "forget",
        "_selected_action": [op.digest.hex()],
        "seen": ["x"],
        "forget": "1",
        "reason": "x",
    }
    viewer.post(RECORDS, data)
    assert LedgerEntry.objects.count() == 1


# --- locks of an object -----------------------------------------------------------------------------------------------


@pytest.fixture
def order(shop: str) -> Order:
    account = Account.objects.create(name="Ada")
    return Order.objects.create(account=account, amount=1)


def test_an_object_shows_its_locks_with_the_same_actions(releaser: Client, leases: Any, order: Order) -> None:
    digest = queued(leases, f"shop.tasks.charge:charge:{order.pk}")
    queued(leases, f"shop.tasks.charge:charge:{order.pk}1")
    page = releaser.get(f"/admin/shop/order/{order.pk}/change/").text
    assert f"heldlock/{quote('q:' + digest)}/change/" in page
    assert page.count("formaction=") == 1  # one lock, and no fence to bump
    (address, seen) = re.findall(
        r'formaction="([^"]*release/)" name="_selected_action" value="([^"]*)"', page
    )[0]
    asked = releaser.post(address, {"amount": "1", "_selected_action": unescape(seen)}).text
    confirm(releaser, asked)
    assert leases.look(digest) == []


def test_an_object_shows_its_fences_while_redis_is_away(
    releaser: Client, ledger: Ledger, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.hold(operation(f"charge:{order.pk}"))
    with Celery("away", broker="memory://", set_as_current=False) as away:
        away.conf.once_fenced = settings.CELERY_ONCE_FENCED | {"redis_url": "redis://127.0.0.1:1"}
        here = runtime.runtime_of(away)
        monkeypatch.setattr(runtime, "current", lambda: here)
        page = releaser.get(f"/admin/shop/order/{order.pk}/change/").text
        here.close()
    assert "unavailable" in page
    assert f"may write to charge:{order.pk} with token" in page
    assert "Nothing of it is held." not in page


def test_a_lock_leads_to_its_object_for_those_who_may_see_it(
    client_of: Callable[..., Client], leases: Any, order: Order
) -> None:
    digest = queued(leases, f"shop.tasks.charge:charge:{order.pk}")
    address, link = f"{LOCKS}{quote('q:' + digest)}/change/", f"/admin/shop/order/{order.pk}/change/"
    assert link in client_of(superuser=True).get(address).text
    assert link not in client_of("view_heldlock").get(address).text


@pytest.mark.parametrize(
    "key", ["charge:999999", "charge:x", "charge:99999999999999999999", "charge:", "charge:%00"]
)
def test_a_key_of_no_object_leads_nowhere(releaser: Client, leases: Any, key: str) -> None:
    digest = queued(leases, key)
    assert releaser.get(f"{LOCKS}{quote('q:' + digest)}/change/").status_code == 200


def test_who_may_not_see_locks_sees_none_on_an_object(
    client_of: Callable[..., Client], leases: Any, order: Order
) -> None:
    queued(leases, f"charge:{order.pk}")
    page = client_of("view_order", "change_order").get(f"/admin/shop/order/{order.pk}/change/").text
    assert "Locks of this object" not in page
    assert "Locks of this object" not in client_of(superuser=True).get("/admin/shop/order/add/").text


# --- shorthand --------------------------------------------------------------------------------------------------------


def shown(client: Client) -> list[str]:
    """What the checkboxes of the list stand for."""
    text = client.get(LOCKS).text
    return [unescape(value) for value in re.findall(r'value="([^"]*)" class="action-select"', text)]


def ask(client: Client, action: str, *seen: str) -> str:
    response = client.post(LOCKS, {"action": action, "_selected_action": seen})
    assert response.status_code == 200
    return response.text


def hidden(page: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', page):
        found.setdefault(name, []).append(unescape(value))
    return found


def seen_in(page: str) -> list[str]:
    return hidden(page)["_selected_action"]


def confirm(client: Client, page: str, reason: str = "because") -> Any:
    (address,) = re.findall(r'<form method="post" action="([^"]*ask/\w+/)"', page)
    return client.post(address, {**hidden(page), "confirmed": "1", "reason": reason}, follow=True)


def queued(leases: Any, text: str) -> str:
    key = Key(secrets.token_hex(32), text)
    ask = Enqueue(key, TASK, SPANS["until_executed"], secrets.token_hex(16), secrets.token_hex(16), 3600)
    assert leases.enqueue(ask).granted
    return key.digest


def running(leases: Any, text: str, *, holder: str = "", key: Start | None = None, slot: str = "") -> Start:
    found = key.key if key is not None else Key(secrets.token_hex(32), text)
    ask = Start(
        found,
        TASK,
        SPANS["while_executing"],
        slot or found.digest,
        secrets.token_hex(16),
        holder or secrets.token_hex(16),
        secrets.token_hex(16),
        "a@host",
        60,
        redelivery=False,
    )
    assert leases.start(ask).answer == "granted"
    return ask


def release_by_its_holder(leases: Any, ask: Start) -> None:
    assert leases.release(ask.key.digest, "r", ask.holder)


# --- fixtures ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ledger(shop: str) -> Iterator[Ledger]:
    opened = Ledger(shop)
    opened.execute(
        "create table if not exists writes (resource text, token bigint, key_digest bytea, holder text)"
    )
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def app(ledger: Ledger, namespace: str, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    """The Celery app of the admin's process."""
    with Celery("admin", broker="memory://", set_as_current=False) as app:
        app.conf.once_fenced = settings.CELERY_ONCE_FENCED | {"redis_url": redis_url, "namespace": namespace}
        here = runtime.runtime_of(app)
        monkeypatch.setattr(runtime, "current", lambda: here)
        yield app
        here.close()
    with connections["default"].cursor() as cursor:
        cursor.execute(
            "TRUNCATE once_fenced_fence, once_fenced_ledger, once_fenced_event, auth_user, shop_account, django_admin_log CASCADE"
        )


@pytest.fixture
def leases(app: Celery) -> Any:
    return runtime.runtime_of(app).leases


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
def releaser(client_of: Callable[..., Client]) -> Client:
    """Staff with the permissions that it takes, and no more."""
    return client_of(*VIEWS, "release_heldlock", "bump_heldlock")


@pytest.fixture
def keeper(client_of: Callable[..., Client]) -> Client:
    return client_of(*VIEWS, "forget_ledgerentry", "prune_ledgerentry")
