"""What people ask of every lease store: pages of holds, how many there are, and the counters of the last day."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_once_fenced.stores import Cursor, HoldQuery, Listed
from tests.conformance.lease_bench import Bench, RedisBench, key

ALL = HoldQuery()
Pager = Callable[[Bench, int], Iterator[list[str]]]


def running(
    bench: Bench, text: str, *, lease: float = 60.0, task: str = "shop.feed", task_id: str = ""
) -> Bench:
    one = Bench(bench.store, key=key(text), task=task, unique="while_executing")
    one.start(f"d {text}", f"h {text}", lease=lease, task_id=task_id)
    return one


def queued(bench: Bench, text: str, *, hold: float = 3600.0, task: str = "shop.feed") -> Bench:
    one = Bench(bench.store, key=key(text), task=task)
    one.enqueue(f"d {text}", hold=hold)
    return one


def texts(bench: Bench, query: HoldQuery = ALL, size: int = 100, **where: Any) -> list[str]:
    """The keys of a page, however often a busy machine makes the search stop on the way."""
    page = bench.store.page(query, size, **where)
    found = [listed.hold.text for listed in page.holds]
    if page.stopped is not None and len(found) < size:
        return found + texts(bench, query, size - len(found), cursor=page.stopped)
    return found


# --- pages ------------------------------------------------------------------------------------------------------------


def pages_by_cursor(bench: Bench, size: int) -> Iterator[list[str]]:
    cursor = None
    while page := bench.store.page(ALL, size, cursor).holds:
        yield [listed.hold.text for listed in page]
        cursor = page[-1].at


def pages_by_number(bench: Bench, size: int) -> Iterator[list[str]]:
    """The naive way: the n-th page is what now stands there."""
    number = 0
    while page := sorted(bench.store.holds(), key=lambda hold: hold.left)[
        number * size : (number + 1) * size
    ]:
        yield [hold.text for hold in page]
        number += 1


def reads_every_hold_once(bench: Bench, pages: Pager) -> None:
    """…that is held all the time, whatever comes and goes meanwhile."""
    made = [running(bench, f"feed {number}", lease=100 + number) for number in range(60)]
    seen = []
    for page in pages(bench, 7):
        seen += page
        for text in page[:3]:
            bench.store.release(key(text).digest, "r", f"h {text}")
    assert seen == [one.key.text for one in made]


def test_pages_hold_every_hold_once_soonest_to_lapse_first(bench: Bench) -> None:
    reads_every_hold_once(bench, pages_by_cursor)


def test_pages_by_number_would_miss_some(bench: Bench) -> None:
    with pytest.raises(AssertionError):
        reads_every_hold_once(bench, pages_by_number)


def test_a_page_is_found_again_backwards(bench: Bench) -> None:
    for number in range(50):
        running(bench, f"feed {number}", lease=100 + number)
    first = bench.store.page(ALL, 20).holds
    second = bench.store.page(ALL, 20, first[-1].at).holds
    assert texts(bench, size=20, cursor=second[0].at, back=True) == [one.hold.text for one in first]
    assert texts(bench, size=10, back=True) == [f"feed {number}" for number in range(40, 50)]


def test_a_hold_that_has_gone_is_no_obstacle_as_a_cursor(bench: Bench) -> None:
    ones = [running(bench, f"feed {number}", lease=100 + number) for number in range(5)]
    at = bench.store.page(ALL, 2).holds[-1].at
    assert bench.store.release(ones[1].key.digest, "r", "h feed 1")
    assert texts(bench, cursor=at) == ["feed 2", "feed 3", "feed 4"]
    assert texts(bench, cursor=at, back=True) == ["feed 0"]


def test_holds_of_one_bucket_that_lapse_together_are_all_listed(bench: Bench) -> None:
    same = [each.text for each in (key(f"feed {i}") for i in range(1500)) if each.digest[0] == "7"]
    for text in same:
        queued(bench, text)
    assert sorted(text for page in pages_by_cursor(bench, 10) for text in page) == sorted(same)


@pytest.mark.parametrize("back", [False, True])
def test_holds_of_all_buckets_that_lapse_together_are_listed_once(bench: Bench, back: bool) -> None:
    made = [queued(bench, f"feed {number}").key for number in range(100)]
    lapse_together(bench)
    seen: list[str] = []
    cursor = None
    while page := bench.store.page(ALL, 7, cursor, back=back).holds:
        seen += [listed.hold.text for listed in page]
        cursor = page[0 if back else -1].at
    assert sorted(seen) == sorted(key.text for key in made)


def lapse_together(bench: Bench) -> None:
    """In the memory store they do, by its clock that stands still."""
    if isinstance(bench, RedisBench):
        assert bench.client is not None
        for index in list(bench.client.scan_iter(match=f"{{{bench.namespace}:*}}:index")):
            members: Any = bench.client.zrange(index, 0, -1)
            bench.client.zadd(index, dict.fromkeys(members, 9_999_999_999_999))


def test_a_page_says_how_many_there_are(bench: Bench) -> None:
    for number in range(30):
        queued(bench, f"feed {number}")
    assert bench.store.page(HoldQuery(text="feed 7"), 10).total == 30


@pytest.mark.parametrize(
    "text", ["", "x", "1~", "~m", "1~m", "-5~q|a|b|c~d", "²~m", "9" * 40 + "~m", "1e5~m"]
)
def test_a_cursor_from_an_address_is_one_or_none(bench: Bench, text: str) -> None:
    cursor = Cursor.parse(text)
    assert cursor is None or str(cursor) == text
    assert texts(bench, cursor=cursor) == []


# --- filters ----------------------------------------------------------------------------------------------------------

QUERIES = {
    "slot q": (HoldQuery(slot="q"), {"post:1|%"}),
    "slot r": (HoldQuery(slot="r"), {"feed:1", "feed:2"}),
    "task": (HoldQuery(tasks=frozenset({"shop.feed"})), {"feed:1"}),
    "tasks": (HoldQuery(tasks=frozenset({"shop.feed", "shop|post"})), {"feed:1", "post:1|%"}),
    "no task": (HoldQuery(tasks=frozenset()), set()),
    "worker": (HoldQuery(worker="celery@host"), {"feed:1", "feed:2"}),
    "no worker": (HoldQuery(worker="celery"), set()),
    "key": (HoldQuery(text="FEED:"), {"feed:1", "feed:2"}),
    "separator in the key": (HoldQuery(text="1|%"), {"post:1|%"}),
    "separator in the task": (HoldQuery(text="P|P"), {"post:1|%"}),
    "separator in key and task": (HoldQuery(text="|"), {"post:1|%"}),
    "what stands for a separator": (HoldQuery(text="%7C"), set()),
    "task id": (HoldQuery(text="id-2"), {"feed:2"}),
    "part of a task": (HoldQuery(text="p.other"), {"feed:2"}),
    "holder": (HoldQuery(text="h feed:1"), {"feed:1"}),
    "part of a holder": (HoldQuery(text="h feed"), set()),
    "digest": (HoldQuery(text=key("feed:2").digest[:12]), {"feed:2"}),
    "middle of a digest": (HoldQuery(text=key("feed:2").digest[5:20]), set()),
    "text and slot": (HoldQuery(text="feed", slot="q"), set()),
    "nothing": (HoldQuery(text="zzz"), set()),
    "one of two texts": (HoldQuery(text="FEED:1\npost:1|%"), {"feed:1", "post:1|%"}),
    "a text or a holder": (HoldQuery(text="zzz\nh feed:2"), {"feed:2"}),
    "older than now": (HoldQuery(before={"shop.feed": 4e9, "shop|post": 4e9}), {"feed:1"}),
    "older than long ago": (HoldQuery(before={"shop.feed": 1e9, "shop.other": 1e9}), set()),
    "older of another task": (HoldQuery(before={"shop.feed": 4e9}, tasks=frozenset({"shop.other"})), set()),
    "older of no task": (HoldQuery(before={}, tasks=frozenset({"shop.feed"})), set()),
    "two texts in none": (HoldQuery(text="zzz\nyyy"), set()),
}


@pytest.mark.parametrize("name", QUERIES)
def test_holds_are_found_by(bench: Bench, name: str) -> None:
    running(bench, "feed:1", task_id="id-1")
    running(bench, "feed:2", task="shop.other", task_id="ID-2")
    queued(bench, "post:1|%", task="shop|post")
    query, expected = QUERIES[name]
    assert set(texts(bench, query)) == expected


@pytest.mark.parametrize("text", ["100%", "|b", "%", "|"])
def test_a_key_is_found_by_a_sign_that_the_other_fields_encode(bench: Bench, text: str) -> None:
    running(bench, "rate:100%|b", task_id="id-1")
    running(bench, "rate:7", task_id="id-2")
    assert texts(bench, HoldQuery(text=text)) == ["rate:100%|b"]


def test_a_rare_hold_is_found_among_many(bench: Bench) -> None:
    for number in range(3000):
        queued(bench, f"feed:{number}:")
    assert texts(bench, HoldQuery(text=":2718:")) == ["feed:2718:"]


def test_nobody_waits_for_a_hold_without_waiters(bench: Bench) -> None:
    running(bench, "feed:1")
    (listed,) = bench.store.page(ALL, 10).holds
    assert isinstance(listed, Listed)
    assert listed.waiting == 0
    assert texts(bench, HoldQuery(waited=True)) == []


def test_holds_that_somebody_waits_for_are_found_with_how_many(bench: Bench) -> None:
    waited = running(bench, "feed:1")
    running(bench, "feed:2")
    queued(bench, "feed:3")
    for number in range(2):
        waited.defer(f"later {number}", limit=0)
    assert texts(bench, HoldQuery(waited=True)) == ["feed:1"]
    assert {listed.hold.text: listed.waiting for listed in bench.store.page(ALL, 10).holds} == {
        "feed:1": 2,
        "feed:2": 0,
        "feed:3": 0,
    }


def test_a_queued_call_does_not_wait_for_itself(bench: Bench) -> None:
    """Its message came, found the resource held by another key, and stepped aside."""
    one = queued(bench, "post:302")
    one.defer("d post:302", limit=0, resource="account:4")
    assert [listed.waiting for listed in bench.store.page(ALL, 10).holds] == [0]
    assert texts(bench, HoldQuery(waited=True)) == []
    one.defer("another", limit=0, resource="account:4")
    assert [listed.waiting for listed in bench.store.page(HoldQuery(waited=True), 10).holds] == [1]


# --- counts -----------------------------------------------------------------------------------------------------------


def test_the_census_counts_by_task_and_slot_and_knows_the_oldest(bench: Bench) -> None:
    for number in range(40):
        queued(bench, f"feed:{number}")
    first = running(bench, "post:1", task="shop.post").slot("r")
    for number in range(2, 9):
        running(bench, f"post:{number}", task="shop.post")
    census = bench.store.census()
    assert {task: (one.queued, one.running) for task, one in census.tasks.items()} == {
        "shop.feed": (40, 0),
        "shop.post": (0, 8),
    }
    assert census.total == 48
    assert census.workers == ["celery@host"]
    assert first is not None
    assert census.tasks["shop.post"].oldest == pytest.approx(first.since, abs=0.001)
    assert census.tasks["shop.feed"].oldest is None


def test_a_census_with_time_enough_counts_all(bench: Bench) -> None:
    for number in range(40):
        queued(bench, f"feed:{number}")
    assert bench.store.census(60) == bench.store.census()
    assert bench.store.census(60).whole


def test_nothing_is_an_empty_census(bench: Bench) -> None:
    assert (bench.store.census().tasks, bench.store.hours()) == ({}, {})


def test_counters_of_the_hour(bench: Bench) -> None:
    bench.enqueue("d1")
    bench.enqueue("d2")
    bench.enqueue("d3")
    bench.start("d1", "h1")
    hours = bench.store.hours()[bench.task]
    assert {counter: sum(counted) for counter, counted in hours.items() if sum(counted)} == {
        "granted": 1,
        "suppressed": 2,
    }
    assert [len(counted) for counted in hours.values()] == [24] * len(hours)
    assert sum(hours["suppressed"][-2:]) == 2  # the test may have run over the end of an hour
