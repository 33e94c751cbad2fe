"""The audit of tasks, and the holds that last too long: what is said, and that following it ends it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_once_fenced.audit import (
    ENOUGH_RUNS,
    LEASES,
    MARGIN,
    SETTLED_RUNS,
    SHORTEST,
    GuardedTable,
    Subject,
    audit,
    fitting_lease,
    overdue,
)
from celery_once_fenced.stores import Hold
from celery_once_fenced.stores.counters import COUNTED_BY_STORES, COUNTERS, HOLD_MAX, hold_field
from celery_once_fenced.wording import lasting

NOW = 1_800_000_000.0


def counted(*runs: float, **counters: int) -> Counter[str]:
    counted = Counter(hold_field(run) for run in runs)
    counted[HOLD_MAX] = round(max(runs, default=0) * 1000)
    return counted + Counter(counters)


def subject(*runs: float, tier: str = "efficiency", lease: float = 60.0, **options: object) -> Subject:
    counters = {name: value for name, value in options.items() if name in COUNTERS}
    declared = {name: value for name, value in options.items() if name not in COUNTERS}
    return Subject(task="shop.feed", tier=tier, lease=lease, counters=counted(*runs, **counters), **declared)  # type: ignore[arg-type]


def kinds(task: Subject) -> list[str]:
    (row,) = audit([task])
    return [advice.kind for advice in row.advice]


# --- what breaks, and what prevents it --------------------------------------------------------------------------------


def test_a_task_without_incidents_gets_no_advice() -> None:
    assert kinds(subject(*[1.0] * 50)) == []
    assert kinds(subject()) == []


def test_the_words_of_the_task_say_what_breaks() -> None:
    (row,) = audit([subject(double_run="the feed is fetched twice")])
    assert row.breaks == "the feed is fetched twice"


@pytest.mark.parametrize(
    ("tier", "resource", "enforced", "words"),
    [
        ("efficiency", "account:{account_id}", ("nothing",), "nothing"),
        ("correctness", None, ("ledger", "fence"), "ledger and fence"),
        ("correctness", "invoice:{account_id}", ("ledger", "fence"), "ledger and fence"),
        (
            "correctness",
            "account:{account_id}",
            ("ledger", "fence", "trigger"),
            "ledger and fence, and a trigger on shop_account (require)",
        ),
    ],
)
def test_what_enforces_a_single_run_without_the_lock(
    tier: str, resource: str | None, enforced: tuple[str, ...], words: str
) -> None:
    table = GuardedTable("shop_account", "account:{}", "require")
    (row,) = audit([subject(tier=tier, resource=resource)], [table])
    assert (row.enforced_by, row.enforced) == (enforced, words)


def test_rows_come_by_name_with_what_was_measured() -> None:
    rows = audit([replace(subject(0.2, 0.3), task=name) for name in "ba"])
    assert [row.task for row in rows] == ["a", "b"]
    assert (rows[0].p50, rows[0].p99, rows[0].longest, rows[0].runs) == (0.25, 0.3, 0.3, 2)
    assert audit([subject()])[0].longest is None


# --- advice -----------------------------------------------------------------------------------------------------------


def test_a_lease_that_bodies_outlived_is_to_be_raised_to_the_worst_case_and_a_margin() -> None:
    (row,) = audit([subject(*[50.0] * 30, lease=20.0, lost=2)])
    (advice, _) = row.advice
    assert (advice.kind, advice.lease) == ("raise_lease", 90.0)
    assert "raise lease to 90 s: 2 bodies outlived theirs" in advice.text


def test_a_lease_shorter_than_the_body_is_no_fault_while_renewals_carry_it() -> None:
    assert kinds(subject(*[300.0] * 30, lease=20.0)) == []


def test_a_long_lease_that_was_outlived_all_the_same_points_at_the_workers() -> None:
    assert kinds(subject(*[1.0] * 30, lost=2)) == ["look", "describe"]


def test_what_people_released_is_no_reason_for_a_longer_lease() -> None:
    runs = [50.0] * 30
    assert kinds(subject(*runs, lease=20.0, tier="correctness", fenced_off=1, released_by_hand=1)) == []
    (row,) = audit([subject(*runs, lease=20.0, tier="correctness", fenced_off=2, lost=1, released_by_hand=1)])
    (advice,) = row.advice
    assert "raise lease to 90 s: 1 body outlived theirs" in advice.text
    assert kinds(subject(*runs, lease=20.0, tier="correctness", fenced_off=1)) == ["raise_lease"]


def test_a_hold_that_lapsed_may_come_of_redis_as_well() -> None:
    (row,) = audit([subject(1.0, expired=1)])
    assert row.advice[0].text.startswith(
        "1 running hold lapsed and nobody ended it in time (1 run ended): a worker was"
    )
    assert "or Redis did not answer" in row.advice[0].text


def test_a_lease_far_longer_than_any_run_is_to_be_lowered() -> None:
    (row,) = audit([subject(*[1.0] * 30, lease=600.0)])
    (advice,) = row.advice
    assert (advice.kind, advice.lease) == ("lower_lease", SHORTEST)
    assert kinds(subject(*[1.0] * (ENOUGH_RUNS - 1), lease=600.0)) == []  # too few to tell


def test_a_double_run_that_breaks_something_is_a_reason_to_promote() -> None:
    assert kinds(subject(1.0, expired=1, double_run="charged twice")) == ["look", "promote"]
    assert kinds(subject(1.0, expired=1)) == ["look", "describe"]
    assert kinds(subject(1.0, double_run="charged twice")) == []
    assert kinds(subject(1.0, tier="correctness", expired=1, double_run="charged twice")) == ["look"]


def test_a_ledger_that_stopped_nothing_is_a_reason_to_demote() -> None:
    runs = [0.1] * SETTLED_RUNS
    assert kinds(subject(*runs, tier="correctness")) == ["demote"]
    assert kinds(subject(*runs)) == []
    for incident in ("replayed", "fenced_off", "lost", "expired"):
        assert "demote" not in kinds(subject(*runs, tier="correctness", **{incident: 1}))
    assert "demote" not in kinds(subject(*runs, tier="correctness", in_doubt=1))


def test_what_waits_for_a_person_comes_first() -> None:
    task = replace(subject(1.0, tier="correctness", overflowed=1, repeated=2, bounded=False), in_doubt=3)
    assert kinds(task) == ["resolve", "look", "look", "limit"]


durations = st.floats(0.001, 200_000)
subjects = st.builds(
    lambda runs, tier, lease, lost, fenced_off, expired: subject(
        *runs, tier=tier, lease=lease, lost=lost, fenced_off=fenced_off, expired=expired
    ),
    st.lists(durations, max_size=60),
    st.sampled_from(["efficiency", "correctness"]),
    st.floats(0.1, 100_000),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 3),
)


@given(durations, durations)
def test_the_fitting_lease_outlasts_the_longest_run_and_rises_with_it(one: float, other: float) -> None:
    assert fitting_lease(one) >= max(one * MARGIN, SHORTEST)
    assert fitting_lease(one) in LEASES or fitting_lease(one) % 3600 == 0
    if one <= other:
        assert fitting_lease(one) <= fitting_lease(other)


@given(subjects)
def test_a_lease_that_was_changed_as_advised_is_not_advised_on_again(task: Subject) -> None:
    (row,) = audit([task])
    for advice in row.advice:
        if advice.lease is not None:
            assert advice.lease >= (row.longest or 0)
            assert (advice.lease > task.lease) == (advice.kind == "raise_lease")
            (again,) = audit([replace(task, lease=advice.lease)])
            assert not [other for other in again.advice if other.lease is not None]


@given(subjects)
def test_every_advice_is_one_sentence_that_says_what_to_do(task: Subject) -> None:
    for advice in audit([task])[0].advice:
        assert advice.text
        assert not advice.text.endswith(".")
        assert "\n" not in advice.text


# --- holds ------------------------------------------------------------------------------------------------------------


def hold(age: float, slot: str = "r", task: str = "shop.feed") -> Hold:
    return Hold(slot, "ab" * 32, "h", "t1", "d", NOW - age, 60.0, "w@host", "shop.feed:7", task)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("held", "runs", "found"),
    [
        (hold(61.0), [12.0] * 30, True),  # more than five times the p99
        (hold(59.0), [12.0] * 30, False),
        (hold(9.0), [0.01] * 30, False),  # nothing to get up for
        (hold(11.0), [0.01] * 30, True),
        (hold(61.0), [*[1.0] * 200, 80.0], False),  # it took longer once
        (hold(61.0), [12.0] * 19, False),  # too few runs to tell
        (hold(61.0, slot="q"), [1.0] * 30, False),  # waits for a worker, does not run
        (hold(61.0, task="other"), [1.0] * 30, False),
        (hold(NOW), [1.0] * 30, False),  # a stranger's hold without a time
    ],
)
def test_a_hold_far_older_than_the_p99_is_overdue(held: Hold, runs: list[float], found: bool) -> None:
    assert bool(overdue([held], {"shop.feed": counted(*runs)}, now=NOW)) is found


def test_overdue_holds_come_oldest_first_and_speak_for_themselves() -> None:
    stats = {"shop.feed": counted(*[1.0] * 30)}
    first, second = overdue([hold(50.0), hold(200.0)], stats, now=NOW)
    assert (first.age, second.age) == (200.0, 50.0)
    assert str(first) == (
        "shop.feed:7 has been held for 3 min 20 s by task t1 on w@host, though 99 % of the runs of shop.feed took 1 s at most, "
        "and the longest 1 s"
    )


# --- words and counters -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0 ms"),
        (0.0451, "45.1 ms"),
        (0.9999, "1 s"),
        (2.5, "2.5 s"),
        (59.96, "1 min"),
        (200.0, "3 min 20 s"),
        (3900.0, "1 h 5 min"),
        (90_000.0, "1 d 1 h"),
    ],
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert lasting(seconds) == words


def test_whatever_a_store_counts_is_a_counter_with_a_meaning() -> None:
    assert set(COUNTED_BY_STORES) <= set(COUNTERS)
