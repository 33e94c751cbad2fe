"""The admin pages, as a browser gets them: who may look, what they show, and that nothing shown can harm."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from html import unescape
from typing import Any

import pytest
from celery import Celery
from django.conf import settings
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission, User
from django.db import connections
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from django.utils.html import escape

from celery_once_fenced import runtime
from celery_once_fenced.keys import Key
from celery_once_fenced.policy import SPANS, span_of
from celery_once_fenced.stores import Cursor, Defer, Enqueue, Hold, HoldPage, Listed, Start
from django_celery_once_fenced import estimates, fences, tiers
from django_celery_once_fenced.admin import EventAdmin, LedgerEntryAdmin
from django_celery_once_fenced.models import Effect, Event, Fence, LedgerEntry
from example_project.shop.tasks import rebuild_catalogue, refresh_feed

NAMES = ("overview", "heldlock", "ledgerentry", "indoubt", "event")
PAGES = {page: f"/admin/once_fenced/{page}/" for page in NAMES}
HOSTILE = "<script>alert(1)</script>\"'&amp; \u202eevil\u202c العربية 🔒 </td></table>"
UNKNOWN = "\u2013"

pytestmark = pytest.mark.usefixtures("shop", "empty")


# --- who may look ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_a_superuser_and_a_viewer_see_every_page(client_of: Callable[..., Client], page: str) -> None:
    for client in (client_of(superuser=True), client_of(*(f"view_{name}" for name in NAMES))):
        assert client.get(page).status_code == 200


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_staff_without_the_permission_see_nothing(client_of: Callable[..., Client], page: str) -> None:
    assert client_of().get(page).status_code == 403


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_strangers_are_sent_to_the_log_in(page: str) -> None:
    assert Client().get(page)["Location"].startswith("/admin/login/")


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_nobody_adds_changes_or_deletes(client_of: Callable[..., Client], page: str) -> None:
    client = client_of(superuser=True)
    rows = (fence(), entry(state="in_doubt"), Event.objects.create(at=timezone.now(), kind="x"))
    pks = {PAGES["overview"]: rows[0].pk, PAGES["heldlock"]: "f:account:7", PAGES["event"]: rows[2].pk}
    pk = pks.get(page, rows[1].pk)
    assert client.get(f"{page}add/").status_code == 403
    assert client.post(f"{page}{pk}/delete/", {"post": "yes"}).status_code == 403
    assert client.post(f"{page}{pk}/change/", {"token": "99"}).status_code == 403
    answer = client.post(page, {"action": "delete_selected", "_selected_action": [pk]})
    assert answer.status_code in (200, 302, 403, 405)
    assert (Fence.objects.count(), LedgerEntry.objects.count(), Event.objects.count()) == (1, 1, 1)


# --- held locks ------------------------------------------------------------------------------------------------------


def test_held_locks_come_from_both_stores_with_an_explanation(admin: Client, leases: Any) -> None:
    queue(leases, "feed:1", "task-q")
    run(leases, "feed:2", "task-r")
    fence(token=8, key="post:3", resource="account:7")
    text = shown(admin, "heldlock")
    expected = (
        "feed:1",
        "task-q",
        "queued",
        "feed:2",
        "task-r",
        "running",
        "post:3",
        'of-token">8<',
        "3 held locks",
    )
    for part in expected:
        assert part in text
    assert "may write to account:7 with token 8" in lock_page(admin, "f:account:7")


def test_the_tier_of_a_lease_is_that_of_its_task_by_the_settings(admin: Client, leases: Any) -> None:
    queue(leases, "catalogue", "task-1", task=rebuild_catalogue.name)
    assert 'of-tier-correctness">correctness<' in shown(admin, "heldlock")
    queue(leases, "feed:1", "task-2", task=refresh_feed.name)
    assert 'of-tier-efficiency">efficiency<' in shown(admin, "heldlock")


def test_a_lease_and_a_fence_of_one_holder_are_one_lock(admin: Client, leases: Any) -> None:
    holder = run(leases, "feed:2", "task-r")
    fence(holder=holder, key="feed:2")
    text = shown(admin, "heldlock")
    assert "1 held lock" in text
    assert "of-slot-fence" in text


@pytest.mark.parametrize("since", [1e300, -1e300, float("nan")])
def test_what_is_not_a_time_is_not_shown_as_one(
    admin: Client, leases: Any, monkeypatch: pytest.MonkeyPatch, since: float
) -> None:
    hold = Hold("q", "0" * 64, "?", "", "", since, 60.0, text="feed:9")
    page = HoldPage([Listed(hold, Cursor(0, "m"))], 1)
    monkeypatch.setattr(type(leases), "page", lambda *_args, **_options: page)
    assert "feed:9" in shown(admin, "heldlock")


def test_a_lapsed_fence_says_that_it_may_be_taken_over(admin: Client) -> None:
    fence(expires_at=timezone.now() - timedelta(seconds=90))
    assert "of-lapsed" in shown(admin, "heldlock")
    text = lock_page(admin, "f:account:7")
    assert "lapsed 1.5 min ago" in text
    assert "takes over" in text


def test_a_lock_that_nobody_has_any_more_says_so(admin: Client, leases: Any) -> None:
    for gone in ("f:account:7", f"q:{'0' * 64}", f"r:{'0' * 64}:name", "r:", "q:<b>"):
        assert "Nobody holds it any more" in lock_page(admin, gone)
    assert admin.get(f"{PAGES['heldlock']}nothing/change/").status_code == 404


def test_a_free_fence_is_no_lock(admin: Client) -> None:
    fence(holder=None, expires_at=None)
    assert "Nothing is held." in shown(admin, "heldlock")


def test_held_locks_are_searched_and_paged(admin: Client, leases: Any) -> None:
    for number in range(120):
        queue(leases, f"feed:{number}", f"task-{number}")
    first = shown(admin, "heldlock")
    assert "120 held locks" in first
    assert (first.count("of-key-cell"), "Previous" in first) == (100, False)
    second = admin.get(PAGES["heldlock"] + link(first, "next")).text
    assert (second.count("of-key-cell"), 'rel="next"' in second) == (20, False)
    assert not keys_of(first) & keys_of(second)
    assert keys_of(admin.get(PAGES["heldlock"] + link(second, "prev")).text) == keys_of(first)
    found = shown(admin, "heldlock", q="FEED:77")
    assert "1 held lock" in found
    assert "task-77" in found
    assert "No held lock matches." in shown(admin, "heldlock", q="nothing like it")


FILTERS: dict[str, set[str]] = {
    "slot=queued": {"feed:1"},
    "slot=running": {"feed:2", "post:3", "post:4"},
    "slot=fence": {"post:3", "post:4"},
    "state=held": {"feed:1", "feed:2", "post:3"},
    "state=lapsed": {"post:4"},
    "state=waiting": set(),
    "worker=b%40host": {"post:3", "post:4"},
    "worker=a%40host": {"feed:2"},
    "task=shop.feed": {"feed:1", "feed:2"},
    "tier=correctness": {"post:3", "post:4"},
    "tier=efficiency": set(),  # this process does not know the task
    "q=post&slot=running": {"post:3", "post:4"},
    "q=account:8": {"post:4"},
    "q=feed&state=lapsed": set(),
    "slot=nonsense&state=nonsense&tier=nonsense&after=nonsense": {"feed:1", "feed:2", "post:3", "post:4"},
}


@pytest.mark.parametrize("address", FILTERS)
def test_held_locks_are_filtered(admin: Client, leases: Any, address: str) -> None:
    queue(leases, "feed:1", "task-q")
    run(leases, "feed:2", "task-r")
    fence(key="post:3", task_name="shop.post")
    fence(
        key="post:4",
        resource="account:8",
        task_name="shop.post",
        expires_at=timezone.now() - timedelta(seconds=9),
    )
    assert keys_of(admin.get(f"{PAGES['heldlock']}?{address}").text) == FILTERS[address]


def test_fences_and_leases_are_paged_in_one_order(admin: Client, leases: Any) -> None:
    for number in range(60):
        run(leases, f"feed:{number}", f"task-{number}", lease=1000 + 2 * number)
        until = timezone.now() + timedelta(seconds=1001 + 2 * number)
        fence(resource=f"account:{number}", key=f"post:{number}", expires_at=until)
    first = shown(admin, "heldlock")
    second = admin.get(PAGES["heldlock"] + link(first, "next")).text
    assert (len(keys_of(first)), len(keys_of(second))) == (100, 20)
    assert keys_of(second) == {f"{kind}:{number}" for kind in ("feed", "post") for number in range(50, 60)}
    assert keys_of(admin.get(PAGES["heldlock"] + link(second, "prev")).text) == keys_of(first)


def wait_for(leases: Any, digest: str, delivery: str, resource: str = "") -> None:
    key, span = Key(digest, "post"), SPANS["until_executed"]
    leases.defer(Defer(key, "shop.post", span, delivery, 3600, 0, 0, 60, resource))


def test_a_fence_shows_who_waits_for_its_resource_and_for_its_key(admin: Client, leases: Any) -> None:
    """Also where its lease has gone, and is not listed."""
    own = secrets.token_hex(32)
    fence(key="post:3", key_digest=own)
    fence(key="post:4", resource="account:8")
    queue(leases, "feed:1", "task-1")
    wait_for(leases, own, "d1")
    for number in range(2):
        wait_for(leases, secrets.token_hex(32), f"d{number}", "account:7")
    assert keys_of(shown(admin, "heldlock", state="waiting")) == {"post:3"}
    assert re.findall(r'data-label="Waiting"[^>]*>(\d+)<', shown(admin, "heldlock")).count("3") == 1
    assert "3 other calls wait for it." in lock_page(admin, "f:account:7")
    assert "wait for it." not in lock_page(admin, "f:account:8")


def test_a_queued_call_says_whose_fence_it_waits_for(admin: Client, leases: Any) -> None:
    """Its message came, found the resource held by another key, and stepped aside: it does not wait for itself."""
    fence(key="post:301", resource="account:4", worker="C@shop", token=2)
    digest, delivery = secrets.token_hex(32), secrets.token_hex(16)
    leases.enqueue(
        Enqueue(Key(digest, "post:302"), "shop.post", SPANS["until_executed"], delivery, "task-2", 3600)
    )
    wait_for(leases, digest, delivery, "account:4")
    page = unescape(lock_page(admin, f"q:{digest}"))
    assert "It waits for account:4, which post:301 holds on C@shop with token 2." in page
    assert "it waits for account:4, which is held by key post:301" in page  # as explain() says
    assert f'href="{PAGES["heldlock"]}{quote("f:account:4")}/change/"' in page
    assert "other call" not in page
    assert re.findall(r'data-label="Waiting"[^>]*>(\d+)<', shown(admin, "heldlock", slot="queued")) == ["0"]
    Fence.objects.update(holder=None, expires_at=None)
    assert "It waited for account:4, which nobody holds now" in lock_page(admin, f"q:{digest}")


def test_a_lock_is_explained_as_far_as_redis_answers(admin: Client, use_redis: Callable[[str], Any]) -> None:
    use_redis("redis://127.0.0.1:1")
    fence()
    page = lock_page(admin, "f:account:7")
    assert "may write to account:7" in page
    assert "unavailable" in page
    assert "In full" not in page
    assert 'Waiting:</label><div class="readonly">not known<' in page


PROMISES = {
    ("until_executed", "return_existing"): "another call is a duplicate until it has run",
    ("until_executed", "raise"): "another call is a duplicate until it has run",
    ("until_executing", "return_existing"): "another call is a duplicate until it begins",
    ("until_and_while_executing", "return_existing"): "another call is a duplicate until it begins",
    ("until_expired", "return_existing"): "more, whether this one has run or not",
    ("until_executed", "replace"): "a newer call takes its place",
    ("until_executed", "keep_last"): "it runs with the arguments of the newest call",
}


@pytest.mark.parametrize(("unique", "on_duplicate"), PROMISES)
def test_a_queued_call_promises_what_its_task_does(
    admin: Client, leases: Any, monkeypatch: pytest.MonkeyPatch, unique: str, on_duplicate: str
) -> None:
    known = tiers.policy_of(refresh_feed.name)
    assert known is not None
    options: Any = {"unique": unique, "on_duplicate": on_duplicate, "span": span_of(unique, on_duplicate)}
    monkeypatch.setattr(tiers, "policy_of", lambda _task: replace(known, **options))
    queue(leases, "feed:1", "task-1", task=refresh_feed.name)
    (hold,) = leases.holds()
    page = lock_page(admin, f"q:{hold.digest}")
    assert {promise for promise in PROMISES.values() if promise in page} == {PROMISES[unique, on_duplicate]}


def test_a_queued_call_of_a_task_that_is_not_known_promises_nothing(admin: Client, leases: Any) -> None:
    queue(leases, "feed:1", "task-1")
    (hold,) = leases.holds()
    assert "holds the place of the next run for" in lock_page(admin, f"q:{hold.digest}")


def test_with_redis_down_the_page_says_so_and_shows_the_fences(
    admin: Client, use_redis: Callable[[str], Any]
) -> None:
    use_redis("redis://127.0.0.1:1")
    fence()
    text = shown(admin, "heldlock")
    assert "unavailable" in text
    assert "account:7" in text


def test_with_redis_down_nothing_is_shown_as_zero_that_is_not_known(
    admin: Client, leases: Any, use_redis: Callable[[str], Any]
) -> None:
    fence()
    number = r'data-label="([^"]+)"[^>]*>(?:<a [^>]*>)?([^<]+)<'
    columns = ("Held", "Started", "Lost", "Taken over", "In doubt")
    for expected, waiting in (("0", "0"), (UNKNOWN, UNKNOWN)):
        text = shown(admin, "overview")
        row = dict(re.findall(number, text[text.index(f'id="of-task-{refresh_feed.name}"') :]))
        assert [row[name] for name in columns] == [expected] * 3 + ["0", "0"]
        assert re.findall(r'of-card-number">([^<]+)<', text) == ["0", "0", *[expected] * 4]
        assert ("no run measured" in text, "not known" in text) == (expected == "0", expected != "0")
        assert re.findall(r'data-label="Waiting"[^>]*>([^<]+)<', shown(admin, "heldlock")) == [waiting]
        use_redis("redis://127.0.0.1:1")


def test_without_tables_the_page_says_so_and_shows_the_leases(admin: Client, leases: Any) -> None:
    queue(leases, "feed:1", "task-q")
    with connections["default"].cursor() as cursor:
        cursor.execute("ALTER TABLE once_fenced_fence RENAME TO elsewhere")
        try:
            text = shown(admin, "heldlock")
        finally:
            cursor.execute("ALTER TABLE elsewhere RENAME TO once_fenced_fence")
    assert "once_fenced_fence" in text
    assert "feed:1" in text


# --- dedup records and events ----------------------------------------------------------------------------------------


def test_dedup_records_are_found_by_key_task_id_state_and_task(admin: Client) -> None:
    entry(key="post:1", task_id="id-1", task_name="shop.post")
    entry(key="charge:2", task_id="id-2", task_name="shop.charge", state="in_doubt")
    assert one_of(shown(admin, "ledgerentry", q="post:1")) == "post:1"
    assert one_of(shown(admin, "ledgerentry", q="id-2")) == "charge:2"
    assert one_of(shown(admin, "ledgerentry", state__exact="in_doubt")) == "charge:2"
    assert one_of(shown(admin, "ledgerentry", task_name="shop.post")) == "post:1"


def test_a_long_result_is_shortened_in_the_list_and_whole_in_the_record(admin: Client) -> None:
    row = entry(result="x" * 1000)
    assert "x" * 100 not in shown(admin, "ledgerentry")
    assert "x" * 1000 in admin.get(f"{PAGES['ledgerentry']}{row.pk}/change/").text


def test_a_record_shows_its_effects_and_its_events_with_those_it_lost(admin: Client) -> None:
    row = entry()
    Effect.objects.create(
        entry=row, name="gateway", state="done", generation=1, downstream_key="dk-1", holder="h", token=8,
        result='{"id": 5}', started_at=timezone.now(),
    )  # fmt: skip
    Event.objects.create(at=timezone.now(), kind="fence.taken_over", key_digest=row.pk, token=8, old_token=7)
    Event.objects.create(
        at=timezone.now(), kind="fence.released", old_key_digest=row.pk, actor="ada", detail="stuck"
    )
    page = admin.get(f"{PAGES['ledgerentry']}{row.pk}/change/").text
    for expected in (
        "gateway",
        "dk-1",
        escape('{"id": 5}'),
        "fence.taken_over",
        "fence.released",
        "ada",
        "stuck",
    ):
        assert expected in page


@pytest.mark.parametrize(
    ("columns", "until"),
    [
        ({"state": "failed", "retain_until": "2026-12-31T10:20:30+00:00"}, "2026-12-31 10:20:30"),
        (
            {"replay_until": "2026-12-30T09:08:07+00:00", "retain_until": "2026-12-31T10:20:30+00:00"},
            "2026-12-30 09:08:07",
        ),
        ({"state": "retryable", "retain_until": "2026-12-31T10:20:30+00:00"}, "-"),
    ],
)
def test_a_record_says_until_when_later_calls_get_its_outcome(
    admin: Client, columns: dict[str, str], until: str
) -> None:
    row = entry(**columns)
    page = admin.get(f"{PAGES['ledgerentry']}{row.pk}/change/").text
    answers = re.findall(
        r'class="form-row field-replay_until">.*?class="readonly">(.*?)</div>', page, re.DOTALL
    )
    assert re.sub(r"<[^>]*>", "", answers[0]) == until
    assert "Until then it answers later calls" in page
    assert "p.m." not in page
    assert "a.m." not in page


@pytest.mark.parametrize("pk", ["zz", "00", "ab" * 32, "%00", "1' OR '1'='1"])
def test_a_digest_that_is_none_is_not_found(admin: Client, pk: str) -> None:
    assert admin.get(f"{PAGES['ledgerentry']}{pk}/change/").status_code in (302, 404)


def test_an_event_shows_both_sides_of_a_takeover(admin: Client) -> None:
    row = Event.objects.create(
        at=timezone.now(),
        kind="fence.taken_over",
        resource="account:7",
        token=8,
        old_token=7,
        old_worker="a@host",
    )
    assert "account:<wbr>7" in shown(admin, "event")
    assert "a@host" in admin.get(f"{PAGES['event']}{row.pk}/change/").text


QUERIES = {"overview": 14, "heldlock": 10, "ledgerentry": 10, "indoubt": 10, "event": 9}


@pytest.mark.parametrize("page", QUERIES)
def test_the_number_of_queries_does_not_grow_with_the_rows(admin: Client, leases: Any, page: str) -> None:
    def rows(count: int) -> int:
        for number in range(count):
            found = entry(state="in_doubt")
            fence(resource=secrets.token_hex(8))
            queue(leases, f"feed:{number}", f"task-{number}")
            Event.objects.create(at=timezone.now(), kind="fence.taken_over", key_digest=found.pk)
        with CaptureQueriesContext(connections["default"]) as queries:
            shown(admin, page)
        return len(queries)

    assert rows(1) == rows(50) <= QUERIES[page]


RECORD_QUERIES = {"heldlock": 10, "ledgerentry": 8, "indoubt": 8, "event": 6, "prune": 10}


@pytest.mark.parametrize("page", RECORD_QUERIES)
def test_the_page_of_one_row_takes_a_fixed_number_of_queries(admin: Client, leases: Any, page: str) -> None:
    row = entry(state="in_doubt")
    fence(key_digest=row.pk)

    def rows(count: int) -> int:
        for _number in range(count):
            event = Event.objects.create(at=timezone.now(), kind="fence.taken_over", key_digest=row.pk)
            Effect.objects.create(
                entry=row, name=f"step {secrets.token_hex(4)}", state="done", generation=1, downstream_key="dk", holder="h",
                token=8, started_at=timezone.now(),
            )  # fmt: skip
        of_one = {"heldlock": quote("f:account:7"), "event": event.pk}.get(page, row.pk)
        address = f"{PAGES['ledgerentry']}prune/" if page == "prune" else f"{PAGES[page]}{of_one}/change/"
        with CaptureQueriesContext(connections["default"]) as queries:
            assert admin.get(address).status_code == 200
        return len(queries)

    rows(1)  # content types are known from here on
    assert rows(1) == rows(30) <= RECORD_QUERIES[page]


# --- the cards of the overview ----------------------------------------------------------------------------------------


def cards(text: str) -> dict[str, tuple[int, str]]:
    """Number and address by title."""
    found = re.findall(
        r'<(?:a href="([^"]*)"|div) class="of-card[^>]*>\s*<span[^>]*>(\d+)</span>\s*<strong>(.*?)</strong>',
        text,
    )
    return {title: (int(number), unescape(address)) for address, number, title in found}


def test_a_card_leads_to_exactly_the_rows_it_counts(admin: Client) -> None:
    for number in range(2):
        entry(key=f"charge:{number + 1}", state="in_doubt")
    entry(key="post:1")
    exhausted = {"kind": "ledger.exhausted", "task_name": "shop.post"}
    for age in (1, 2, 3, 8):
        Event.objects.create(at=timezone.now() - timedelta(days=age), **exhausted)
    Event.objects.create(at=timezone.now(), kind="fence.taken_over")
    shown_cards = cards(shown(admin, "overview"))
    for title, expected in (("In doubt", 2), ("Parked", 3)):
        number, address = shown_cards[title]
        rows = re.findall(r'name="_selected_action"|class="field-when"', admin.get(address).text)
        assert (number, len(rows)) == (expected, expected)


def test_a_card_names_the_tasks_that_its_number_is_made_of(admin: Client, leases: Any) -> None:
    for task, times in (("shop.feed", 2), ("shop.post", 3)):
        leases.count(key_of("feed:1").digest, task, "repeated", times)
        leases.count(key_of("feed:1").digest, task, "fenced_off", times)
    text = shown(admin, "overview")
    for part in ("<bdi>feed</bdi> <b>2</b>", "<bdi>post</bdi> <b>3</b>"):
        assert part in text
    number, address = cards(text)["Suppressed again and again"]
    assert (number, address.partition("?")[2]) == (5, "task=shop.feed&task=shop.post")
    queue(leases, "feed:1", "task-1")
    queue(leases, "other:1", "task-2", task="shop.other")
    assert keys_of(admin.get(address).text) == {"feed:1"}
    number, address = cards(text)["Fenced off"]
    assert f'id="{address.removeprefix("#")}"' in text


def test_numbers_of_a_task_lead_to_its_rows_for_those_who_may_see_them(
    client_of: Callable[..., Client], leases: Any
) -> None:
    queue(leases, "feed:1", "task-1")
    queue(leases, "other:1", "task-2", task="shop.other")
    may, may_not = client_of("view_overview", "view_heldlock"), client_of("view_overview")
    address = "/admin/once_fenced/heldlock/?task=shop.feed&amp;slot=queued"
    assert address in may.get(PAGES["overview"]).text
    assert "heldlock/?" not in may_not.get(PAGES["overview"]).text
    assert keys_of(may.get(unescape(address)).text) == {"feed:1"}


@pytest.mark.parametrize(("unique", "begun"), [("until_executed", "0"), ("until_expired", UNKNOWN)])
def test_what_a_span_does_not_count_is_not_shown_as_zero(
    admin: Client, leases: Any, monkeypatch: pytest.MonkeyPatch, unique: str, begun: str
) -> None:
    known = tiers.policy_of(refresh_feed.name)
    assert known is not None
    policy = replace(known, span=span_of(unique, "return_existing"))
    monkeypatch.setattr(tiers, "policies", lambda: {refresh_feed.name: policy})
    text = shown(admin, "overview")
    assert re.findall(r'data-label="Started"[^>]*>([^<]+)<', text) == [begun]
    assert ("runs are not measured under its span" in text) == (begun != "0")
    assert ("no run measured" in text) == (begun == "0")


# --- what is read by people -------------------------------------------------------------------------------------------


def test_events_and_records_are_read_without_digests_and_json(admin: Client) -> None:
    own = "post:9#" + "ab" * 32
    error = '{"type": "shop.errors.CardDeclined", "message": "no f\\u00fcnds"}'
    row = entry(key="post:9", resource=own, error=error, result=None, state="failed")
    detail = '{"effect": "gateway", "state": "done", "result": "\\"re_1\\"", "error": null}'
    Event.objects.create(at=timezone.now(), kind="effect.late_outcome", key_digest=row.pk, detail=detail)
    resolved = '{"state": "succeeded", "reason": "in the books"}'
    Event.objects.create(at=timezone.now(), kind="ledger.resolved", resource=own, detail=resolved)
    events, records = shown(admin, "event"), shown(admin, "ledgerentry")
    assert events.count("post:<wbr>9</bdi>") == 2
    for part in (escape('gateway: done, "re_1"'), "succeeded: in the books"):
        assert part in events
    assert "CardDeclined: no fünds" in records
    for text in (events, records, admin.get(f"{PAGES['ledgerentry']}{row.pk}/change/").text):
        assert "&quot;type&quot;" not in text
        assert "&quot;state&quot;" not in text
    assert "ab" * 32 not in events
    late = Event.objects.get(kind="effect.late_outcome")
    assert "<bdi>post:9</bdi>" in admin.get(f"{PAGES['event']}{late.pk}/change/").text


def test_a_fence_is_read_without_the_digest_of_its_key(admin: Client) -> None:
    resource = "post:9#" + "ab" * 32
    fence(resource=resource, key="post:9")
    text = lock_page(admin, f"f:{resource}")
    assert "may write to post:9 with token 7" in text


# --- large tables ----------------------------------------------------------------------------------------------------


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is large begins at ten rows, so that the test can fill it."""
    monkeypatch.setattr(estimates, "EXACT", 10)
    monkeypatch.setattr(fences, "LARGE", 10)
    monkeypatch.setattr(LedgerEntryAdmin, "window", 10)
    monkeypatch.setattr(EventAdmin, "window", 10)
    monkeypatch.setattr(LedgerEntryAdmin, "list_per_page", 5)
    monkeypatch.setattr(estimates, "PAGES", 2)


def many(number: int, **columns: Any) -> None:
    for place in range(number):
        entry(started_at=timezone.now() - timedelta(hours=place), **{"key": f"post:{place}", **columns})
    with connections["default"].cursor() as cursor:
        cursor.execute("analyze once_fenced_ledger, once_fenced_event, once_fenced_fence")


@pytest.mark.usefixtures("large")
def test_a_large_table_is_estimated_and_turned_only_so_far(admin: Client) -> None:
    many(40)
    text = shown(admin, "ledgerentry")
    assert "about 40 dedup records" in text
    assert re.findall(r'href="\?p=(\d)"', text) == ["2"]


@pytest.mark.usefixtures("large")
def test_a_search_looks_among_the_newest_and_says_so(admin: Client) -> None:
    many(40)
    text = shown(admin, "ledgerentry", q="ost:3")
    assert "Looked among the newest 10." in text
    assert (">3</bdi>" in text, ">33</bdi>" in text) == (True, False)


@pytest.mark.usefixtures("large")
def test_a_whole_key_a_digest_and_a_date_are_found_at_any_age(admin: Client) -> None:
    many(40)
    old = LedgerEntry.objects.get(key="post:39")
    for text in (shown(admin, "ledgerentry", q="post:39"), shown(admin, "ledgerentry", q=str(old.pk))):
        assert "1 dedup record" in text
        assert "Looked among" not in text
    assert ">30</bdi>" in shown(admin, "ledgerentry", q="ost:30", when="week")


@pytest.mark.usefixtures("large")
def test_events_of_a_kind_are_looked_for_among_the_newest(admin: Client) -> None:
    for number in range(40):
        kind = "ledger.exhausted" if number in (3, 38) else "fence.taken_over"
        Event.objects.create(at=timezone.now(), kind=kind, resource=f"account:{number}")
    text = shown(admin, "event", kind="ledger.exhausted")
    assert "1 event" in text
    assert "Looked among the newest 10." in text


@pytest.mark.usefixtures("large")
def test_of_a_large_table_of_fences_those_of_running_entries_are_listed(admin: Client) -> None:
    for number in range(20):
        fence(resource=f"free:{number}", holder=None, expires_at=None)
    fence(resource="account:1", key="post:1")
    fence(resource="outside", key="outside")
    many(1, resource="account:1", state="running")
    text = shown(admin, "heldlock")
    assert keys_of(text) == {"post:1"}
    assert "outside of tasks are not listed" in text
    assert "errornote" not in text


# --- harmless --------------------------------------------------------------------------------------------------------


def test_what_a_key_or_a_result_holds_is_shown_and_does_nothing(admin: Client, leases: Any) -> None:
    queue(leases, HOSTILE, HOSTILE[:30])
    fence(key=HOSTILE, task_name=HOSTILE, worker=HOSTILE)
    row = entry(key=HOSTILE, result=HOSTILE, error=HOSTILE, resource=HOSTILE)
    event = Event.objects.create(
        at=timezone.now(),
        kind="fence.taken_over",
        key_digest=row.pk,
        resource=HOSTILE,
        detail=HOSTILE,
        worker=HOSTILE,
    )
    pages = [
        *PAGES.values(),
        f"{PAGES['ledgerentry']}{row.pk}/change/",
        f"{PAGES['event']}{event.pk}/change/",
    ]
    pages += [f"{PAGES['heldlock']}{quote(address)}/change/" for address in ("f:account:7", "f:" + HOSTILE)]
    for page in pages:
        text = admin.get(page).text
        assert "<script>alert" not in text
        assert page == PAGES["indoubt"] or "&lt;script&gt;alert" in text
        assert len(re.findall("<table", text)) == len(re.findall("</table>", text))


def test_a_search_is_shown_harmlessly(admin: Client) -> None:
    assert "<script>alert" not in shown(admin, "heldlock", q=HOSTILE)


@pytest.mark.parametrize("page", PAGES)
def test_a_strict_content_security_policy_has_nothing_to_refuse(
    admin: Client, leases: Any, page: str
) -> None:
    queue(leases, "feed:1", "task")
    fence()
    entry()
    text = shown(admin, page)
    assert not re.search(
        r"<script(?![^>]*\ssrc=)(?![^>]*application/json)|<style|\sstyle=|\son\w+=|javascript:", text
    )


# --- fixtures --------------------------------------------------------------------------------------------------------


def shown(client: Client, page: str, **query: str) -> str:
    response = client.get(PAGES[page], query)
    assert response.status_code == 200
    return response.text


def lock_page(client: Client, lock: str) -> str:
    response = client.get(f"{PAGES['heldlock']}{quote(lock)}/change/")
    assert response.status_code == 200
    return response.text


def link(text: str, rel: str) -> str:
    (address,) = re.findall(rf'rel="{rel}" href="([^"]*)"', text)
    return unescape(address)


def keys_of(text: str) -> set[str]:
    """The keys in a list of locks."""
    cells = re.findall(r'class="of-key-cell"><a [^>]*><bdi>(.*?)</bdi>', text)
    return {unescape(cell.replace("<wbr>", "")) for cell in cells}


def one_of(text: str) -> str:
    (key,) = re.findall(r"<bdi>((?:post|charge):(?:<wbr>)?[12])</bdi>", text)
    return str(key.replace("<wbr>", ""))


def fence(**columns: Any) -> Fence:
    given = {
        "resource": "account:7",
        "token": 7,
        "holder": secrets.token_hex(16),
        "task_id": "task-1",
        "task_name": "shop.post",
        "key": "account:7",
        "worker": "b@host",
        "acquired_at": timezone.now(),
        "expires_at": timezone.now() + timedelta(seconds=60),
    }
    return Fence.objects.create(**given | columns)


def entry(**columns: Any) -> LedgerEntry:
    given = {
        "key_digest": secrets.token_hex(32),
        "key": "post:1",
        "scope": "shop.post",
        "task_name": "shop.post",
        "task_id": "task-1",
        "state": "succeeded",
        "attempt": 1,
        "takeovers": 0,
        "holder": "h",
        "resource": "account:7",
        "token": 7,
        "result": "90",
        "created_at": timezone.now(),
        "started_at": timezone.now(),
        "finished_at": timezone.now(),
    }
    return LedgerEntry.objects.create(**given | columns)


def key_of(text: str) -> Key:
    return Key(secrets.token_hex(32), text)


def queue(leases: Any, text: str, task_id: str, task: str = "shop.feed") -> None:
    ask = Enqueue(key_of(text), task, SPANS["until_executed"], secrets.token_hex(16), task_id, 3600)
    assert leases.enqueue(ask).granted


def run(leases: Any, text: str, task_id: str, lease: float = 60) -> str:
    key = key_of(text)
    delivery, holder = secrets.token_hex(16), secrets.token_hex(16)
    ask = Start(
        key,
        "shop.feed",
        SPANS["until_executed"],
        key.digest,
        delivery,
        holder,
        task_id,
        "a@host",
        lease,
        redelivery=False,
    )
    assert leases.start(ask).answer == "granted"
    return holder


@pytest.fixture
def use_redis(namespace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Let the admin's process have its leases at an address."""
    made = []

    def use(url: str) -> Any:
        app = Celery("admin", set_as_current=False)
        app.conf.once_fenced = settings.CELERY_ONCE_FENCED | {"redis_url": url, "namespace": namespace}
        made.append((app, runtime.runtime_of(app)))
        monkeypatch.setattr(runtime, "current", lambda: made[-1][1])
        return made[-1][1].leases

    yield use
    for app, opened in made:
        opened.close()
        app.close()


@pytest.fixture
def leases(use_redis: Callable[[str], Any], redis_url: str) -> Any:
    return use_redis(redis_url)


@pytest.fixture
def empty(shop: str, leases: Any) -> Iterator[None]:
    yield
    with connections["default"].cursor() as cursor:
        cursor.execute(
            "TRUNCATE once_fenced_fence, once_fenced_ledger, once_fenced_effect, once_fenced_event, auth_user CASCADE"
        )


@pytest.fixture
def client_of() -> Callable[..., Client]:
    def make(*permissions: str, superuser: bool = False) -> Client:
        user = User.objects.create(username=secrets.token_hex(8), is_staff=True, is_superuser=superuser)
        user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
        client = Client()
        client.force_login(user)
        return client

    return make


@pytest.fixture
def admin(client_of: Callable[..., Client]) -> Client:
    return client_of(superuser=True)
