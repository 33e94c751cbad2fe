"""Every page and every action in a real browser, under a strict content security policy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote

from django_celery_once_fenced.models import Event, Fence, LedgerEntry
from example_project.servers import wait_until
from example_project.shop import tasks
from tests.browser.conftest import DESK, NARROW, PHONE, Visitor
from tests.browser.stage import HOSTILE, PERMISSIONS, Shop

pytestmark = pytest.mark.debian

PAGES = ("overview/", "heldlock/", "ledgerentry/", "indoubt/", "event/")
Visit = Callable[..., Visitor]


# --- who sees what ----------------------------------------------------------------------------------------------------


def test_a_superuser_sees_every_page_from_the_index(calm: Shop, visit: Visit) -> None:
    ada = visit("ada")
    for name in ("Overview", "Held locks", "Dedup records", "Keys in doubt", "Events"):
        ada.page.goto(f"{ada.url}/admin/")
        ada.follow(
            ada.page.locator("#content-main .app-once_fenced").get_by_role("link", name=name, exact=True)
        )
        assert ada.page.locator("#content h1").inner_text() == name


def test_a_viewer_sees_everything_and_is_offered_nothing(calm: Shop, visit: Visit) -> None:
    viewer = visit("viewer")
    for page in PAGES:
        assert viewer.open(page).locator("#content-main").is_visible()
        assert (
            viewer.page.locator("select[name=action], .action-select, .of-actions, .object-tools a").count()
            == 0
        )
    viewer.follow(viewer.open("heldlock/").get_by_role("link", name="charge:42"))
    assert "may write to" in viewer.page.locator(".of-explanation").inner_text()
    assert viewer.page.locator(".of-page button").count() == 0


def test_who_has_no_permission_sees_nothing(calm: Shop, visit: Visit) -> None:
    nobody = visit("nobody")
    for page in PAGES:
        nobody.open(page)
        assert "403" in nobody.page.content()
    nobody.page.goto(f"{nobody.url}/admin/")
    assert "Held locks" not in nobody.page.content()
    # What the browser says of the five refusals is as it should be.
    assert len(nobody.problems) == len(PAGES)
    nobody.problems.clear()


# --- overview ---------------------------------------------------------------------------------------------------------


def test_overview_shows_every_task_and_what_needs_a_person(calm: Shop, visit: Visit) -> None:
    ada = visit("ada")
    ada.open("overview/")
    cards = ada.page.locator(".of-card").all_inner_texts()
    assert [card.split("\n")[0] for card in cards] == ["1", "0", "1", "3", "1", "1"]
    feed = ada.page.locator(".of-tasks tbody", has_text="refresh_feed")
    assert feed.locator("td.of-bad").inner_text() == "1.5 h"
    assert feed.locator("svg.of-bar, svg.of-spark").count() == 2
    takeover = ada.page.locator(".of-takeovers tr", has_text="post:70").inner_text()
    for part in ("A@shop", "B@shop", "1 → 2", "succeeded", "Nothing was lost"):
        assert part in takeover
    ada.keep("overview", full_page=True)


def test_cards_lead_to_what_they_count(calm: Shop, visit: Visit) -> None:
    ada = visit("ada")
    ada.follow(ada.open("overview/").locator("a.of-card", has_text="In doubt"))
    assert "charge:39" in ada.page.locator("#result_list").inner_text()
    ada.follow(ada.open("overview/").locator("a.of-card", has_text="Held too long"))
    (late,) = ada.page.locator("#result_list tbody tr").all_inner_texts()
    assert "feed_id=99" in late
    ada.follow(ada.open("overview/").locator("a.of-card", has_text="Suppressed again"))
    assert all("refresh_feed" in row for row in ada.page.locator("#result_list tbody tr").all_inner_texts())
    ada.open("overview/").locator("a.of-card", has_text="Fenced off").click()
    assert "post_entry" in ada.page.locator(".of-tasks tbody:target").inner_text()


def test_the_drawings_are_told_to_who_does_not_see_them(calm: Shop, visit: Visit) -> None:
    ada = visit("ada")
    labels = [
        drawing.get_attribute("aria-label")
        for drawing in ada.open("overview/").locator(".of-tasks svg").all()
    ]
    assert any("the lease is" in str(label) for label in labels)
    assert any("suppressed calls" in str(label) for label in labels)


# --- held locks -------------------------------------------------------------------------------------------------------


def test_held_locks_count_down(night: Shop, visit: Visit) -> None:
    ada = visit("ada")
    row = ada.open("heldlock/").locator("#result_list tr", has_text="feed_id=16").locator(".of-left")
    ada.keep("held-locks")
    before = row.inner_text()
    wait_until(lambda: row.inner_text() != before, 20, lambda: TimeoutError(f"still {before}"))


def test_held_locks_are_filtered_and_searched(night: Shop, visit: Visit) -> None:
    ada = visit("ada")
    rows = ada.open("heldlock/").locator("#result_list tbody tr")
    everything = rows.count()
    ada.follow(ada.page.locator("#changelist-filter").get_by_role("link", name="lapsed"))
    assert rows.all_inner_texts()[0].startswith("\tcharge:40") or "charge:40" in rows.all_inner_texts()[0]
    assert rows.count() == 1
    ada.follow(ada.page.get_by_role("link", name="Clear all filters"))
    assert rows.count() == everything
    ada.page.fill("#searchbar", "feed_id=1")
    ada.press("Enter")
    assert 1 < rows.count() < everything
    ada.follow(ada.page.locator("#changelist-filter").get_by_role("link", name="c@shop"))
    assert "q=feed_id" in ada.page.url
    assert all("c@shop" in text for text in rows.all_inner_texts())


def test_a_lock_explains_itself_and_leads_on(calm: Shop, visit: Visit) -> None:
    ada = visit("ada")
    ada.follow(ada.open("heldlock/").get_by_role("link", name="charge:42"))
    explained = ada.page.locator(".of-explanation").inner_text()
    assert "token 1" in explained
    assert "2 other calls wait for it." in explained
    ada.keep("held-lock")
    ada.follow(ada.page.locator(".readonly").get_by_role("link", name="42: open"))
    assert "Locks of this object" in ada.page.content()
    ada.keep("locks-of-an-object")
    ada.follow(ada.page.locator(".of-of-object").get_by_role("link", name="charge:42"))
    ada.follow(ada.page.locator(".readonly").get_by_role("link", name=re.compile("charge:42")))
    assert "re_812" in ada.page.locator(".field-effects_table").inner_text()
    ada.keep("dedup-record")


def test_release_from_the_list(night: Shop, visit: Visit) -> None:
    ada = visit("ada")
    ada.open("heldlock/").locator("tr", has_text="feed_id=99").locator(".action-select").check()
    assert "1 of" in ada.page.locator(".action-counter").inner_text()
    ada.page.select_option("select[name=action]", "release")
    ada.follow(ada.page.locator("button[name=index]"))
    assert "goes on running" in ada.page.locator(".of-plan").inner_text()
    ada.page.click("input[name=confirmed]")  # without a reason
    assert "Release" in ada.page.title()
    ada.page.fill("#id_reason", "stuck since noon 🔒")
    ada.follow(ada.page.locator("input[name=confirmed]"))
    assert "feed_id=99: released." in ada.page.locator(".messagelist").inner_text()
    assert "feed_id=99" not in ada.page.locator("#result_list").inner_text()
    assert "stuck since noon" in Event.objects.get(kind="lease.released_by_hand").detail
    assert "stuck since noon" in LogEntry.objects.get().change_message


def test_bump_from_the_page_of_a_lock(night: Shop, visit: Visit) -> None:
    ada = visit("ada")
    ada.follow(ada.open("heldlock/").get_by_role("link", name="charge:42"))
    ada.follow(ada.page.get_by_role("button", name="Release and bump the fence"))
    assert "Token 1 of" in ada.page.locator(".of-plan").inner_text()
    ada.keep("release-and-bump")
    ada.page.fill("#id_reason", "frozen")
    ada.follow(ada.page.locator("input[name=confirmed]"))
    assert "its fence bumped" in ada.page.locator(".messagelist").inner_text()
    fence = Fence.objects.get(resource=night.held["charge:42"].operation.resource)
    assert fence.holder is None
    assert fence.token > night.held["charge:42"].token


def test_release_from_the_page_of_an_object(calm: Shop, visit: Visit) -> None:
    ada = visit("ada")
    ada.page.goto(f"{ada.url}/admin/shop/order/42/change/")
    ada.follow(ada.page.locator(".of-of-object").get_by_role("button", name="Release…", exact=True))
    assert "may still commit with token 1" in ada.page.locator(".of-plan").inner_text()
    ada.follow(ada.page.get_by_role("link", name="Cancel"))
    assert "charge:42" in ada.page.locator("#result_list").inner_text()


def test_a_page_that_is_out_of_date_releases_nothing(night: Shop, visit: Visit) -> None:
    ada, other = visit("ada"), visit("ada")
    for visitor in (ada, other):
        visitor.follow(visitor.open("heldlock/").get_by_role("link", name="charge:41"))
        visitor.follow(visitor.page.get_by_role("button", name="Release and bump the fence"))
        visitor.page.fill("#id_reason", "frozen")
    ada.follow(ada.page.locator("input[name=confirmed]"))
    night.claim(tasks.charge, "charge:41", "d@shop")
    other.follow(other.page.locator("input[name=confirmed]"))
    assert "no longer the one that the page showed" in other.page.locator(".messagelist").inner_text()
    assert Event.objects.filter(kind="fence.force_released").count() == 1


# --- the ledger -------------------------------------------------------------------------------------------------------


def test_records_are_filtered_and_forgotten(night: Shop, visit: Visit) -> None:
    ada = visit("ada")
    rows = ada.open("ledgerentry/").locator("#result_list tbody tr")
    ada.keep("dedup-records")
    ada.follow(
        ada.page.locator("#changelist-filter").get_by_role("link", name="taken over from another worker")
    )
    assert rows.count() == 2
    ada.follow(ada.page.locator("#changelist-filter").get_by_role("link", name="succeeded"))
    assert rows.count() == 1
    rows.first.locator(".action-select").check()
    ada.page.select_option("select[name=action]", "forget")
    ada.follow(ada.page.locator("button[name=index]"))
    ada.page.fill("#id_reason", "wrong amount")
    ada.follow(ada.page.locator("input[name=forget]"))
    assert "post:70: forgotten" in ada.page.locator(".messagelist").inner_text()
    assert not LedgerEntry.objects.filter(key__endswith="post:70").exists()


def test_prune_shows_what_is_due_first(night: Shop, visit: Visit) -> None:
    ada = visit("ada")
    ada.follow(ada.open("ledgerentry/").get_by_role("link", name="Prune…"))
    assert "Nothing is due" in ada.page.locator(".of-explanation").inner_text()
    ada.keep("prune")
    ada.follow(ada.page.get_by_role("button", name="Prune"))
    assert "Pruned: 0 dedup records" in ada.page.locator(".messagelist").inner_text()


def test_what_is_in_doubt_is_resolved(night: Shop, visit: Visit) -> None:
    ada = visit("ada")
    ada.open("indoubt/").locator(".action-select").check()
    ada.page.select_option("select[name=action]", "resolve")
    ada.follow(ada.page.locator("button[name=index]"))
    ada.page.get_by_label("Succeeded: later calls").check()
    ada.page.fill("#id_result", '{"id": "re_810"}')
    ada.page.fill("#id_reason", "it is in the gateway's books")
    ada.keep("resolve")
    ada.follow(ada.page.locator("input[name=resolve]"))
    assert LedgerEntry.objects.get(key__endswith="charge:39").state == "succeeded"
    assert "0 keys in doubt" in ada.page.locator(".paginator").inner_text()


def test_an_event_shows_both_sides(calm: Shop, visit: Visit) -> None:
    ada = visit("ada")
    row = ada.open("event/").locator("#result_list tr", has_text="account:7")
    assert "A@shop → B@shop" in row.inner_text()
    ada.follow(row.get_by_role("link"))
    assert "A@shop" in ada.page.locator(".field-old_worker").inner_text()


# --- any reader -------------------------------------------------------------------------------------------------------


def test_hostile_text_is_shown_and_does_nothing(night: Shop, visit: Visit) -> None:
    night.empty()
    digest = night.queue(tasks.refresh_feed, HOSTILE).digest
    held = night.taken_over(tasks.charge, HOSTILE[:60], HOSTILE[:50], "b@shop", resource=HOSTILE)
    ada = visit("ada")
    addresses = [f"heldlock/{quote('q:' + digest)}/change/", f"heldlock/{quote('f:' + HOSTILE)}/change/"]
    addresses.append(f"ledgerentry/{held.operation.digest.hex()}/change/")
    for page in (*PAGES, *addresses):
        content = ada.open(page).locator("#content")
        assert page == "indoubt/" or "alert(1)" in content.inner_text()
        assert content.locator("script:not([src])").count() == 0
        assert "\u202e" not in re.sub(r"(?s)<bdi.*?</bdi>|<(?:input|title)[^>]*>", "", content.inner_html())
    ada.open("heldlock/", q="%3Cscript%3Ealert(1)%3C/script%3E")
    assert ada.page.locator("#result_list tbody tr").count() == 2
    # ``visit`` asserts at the end that no dialog opened and the console is quiet.


def too_wide(page: Any) -> int:
    """Pixels by which the page, or the worst of its tables, is wider than its place."""
    pixels: int = page.evaluate(
        "Math.max(...[document.documentElement, ...document.querySelectorAll('.results, .of-scroll')]"
        ".map(element => element.scrollWidth - element.clientWidth))"
    )
    return pixels


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("viewport", [NARROW, PHONE], ids=["desk", "phone"])
def test_a_key_of_300_characters_pushes_no_column_out_of_sight(
    night: Shop, visit: Visit, page: str, viewport: dict[str, int]
) -> None:
    long = f"report:{'0123456789abcdef' * 18}"
    night.queue(tasks.refresh_feed, long)
    night.start(tasks.refresh_feed, f"{long}:runs", "a@shop")
    night.claim(tasks.charge, long, "a@shop", resource="report:1")
    night.in_doubt(tasks.charge, f"{long}:doubt", "gateway" * 9, resource="report:2")
    night.finish(night.taken_over(tasks.post_entry, f"{long}:late", "A@shop", "B@shop", resource=long[:250]))
    ada = visit("ada", viewport)
    ada.open(page)
    assert "0123456789abcdef" in ada.page.locator("#content-main").inner_text()
    assert too_wide(ada.page) <= 1


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_nothing_is_wider_than_the_screen(
    calm: Shop, visit: Visit, page: str, viewport: dict[str, int]
) -> None:
    ada = visit("ada", viewport)
    ada.open(page)
    assert too_wide(ada.page) <= 1
    if viewport is PHONE and page in ("overview/", "heldlock/"):
        ada.keep(f"{page.strip('/')}-phone")


def test_dark_is_dark(calm: Shop, visit: Visit) -> None:
    ada = visit("ada", color_scheme="dark")
    for page in ("overview/", "heldlock/"):
        ada.open(page)
        background = ada.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert max(int(part) for part in re.findall(r"\d+", background)[:3]) < 64
        assert contrasts(ada.page) == []
    ada.open("overview/")
    ada.keep("overview-dark")


def test_light_can_be_read(calm: Shop, visit: Visit) -> None:
    ada = visit("ada")
    for page in ("overview/", "heldlock/", "ledgerentry/"):
        ada.open(page)
        assert contrasts(ada.page) == []


CONTRAST = """() => {
    const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
    const over = (top, under) => top.slice(0, 3).map((c, i) => c * (top[3] ?? 1) + under[i] * (1 - (top[3] ?? 1)));
    const light = rgb => rgb.map(c => c / 255).map(c => c <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
    const behind = element => {
        const layers = [];
        for (let e = element; e; e = e.parentElement) layers.unshift(parse(getComputedStyle(e).backgroundColor));
        return layers.reduce((under, layer) => over(layer, under), [255, 255, 255]);
    };
    const bad = [];
    for (const element of document.querySelectorAll('.of-badge, .of-card *, .of-warn, .of-bad, .of-sub, .of-token, .of-explanation')) {
        const ground = behind(element), ink = over(parse(getComputedStyle(element).color), ground);
        const [a, b] = [light(ink), light(ground)].sort((x, y) => y - x);
        if ((a + .05) / (b + .05) < 4.5 && element.textContent.trim()) {
            bad.push(`${element.className} ${element.textContent.trim()} ${((a + .05) / (b + .05)).toFixed(2)}`);
        }
    }
    return [...new Set(bad)];
}"""
"""What has less contrast than WCAG AA asks for."""


def contrasts(page: Any) -> list[str]:
    found: list[str] = page.evaluate(CONTRAST)
    return found


def test_held_locks_are_worked_by_keyboard(calm: Shop, visit: Visit) -> None:
    ada = visit("ada")
    ada.open("heldlock/").locator("#action-toggle").focus()
    ada.page.keyboard.press("Tab")
    ada.page.keyboard.press("Space")
    assert "1 of" in ada.page.locator(".action-counter").inner_text()
    ada.page.locator("select[name=action]").focus()
    ada.page.keyboard.press("ArrowDown")
    ada.page.keyboard.press("Tab")
    ada.press("Enter")
    assert ada.page.locator(".of-plan").is_visible()
    focusable = ada.page.locator("#id_reason, input[name=confirmed], .closelink")
    assert focusable.count() == 3


def test_a_policy_that_is_broken_is_noticed(calm: Shop, visit: Visit) -> None:
    """The control of ``problems``: an inline script on a page of ours is refused, and counted."""
    ada = visit("ada")
    ada.open("overview/")
    ada.page.evaluate("document.body.insertAdjacentHTML('beforeend', '<p style=\"color: red\">x</p>')")
    ada.page.wait_for_timeout(50)
    assert any("Content Security Policy" in problem for problem in ada.problems)
    ada.problems.clear()


def test_the_permissions_of_the_viewer_are_those_of_looking() -> None:
    assert all(name.startswith("view_") for name in PERMISSIONS)
