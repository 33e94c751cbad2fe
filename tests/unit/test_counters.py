"""The hold-time histogram: where a run is counted, and what is read from the counts."""

from __future__ import annotations

from collections import Counter

import pytest

from celery_once_fenced.stores.counters import (
    HOLD_BOUNDS,
    HOLD_FIELDS,
    HOLD_MAX,
    hold_field,
    hold_quantile,
)


def counted(*runs: float) -> Counter[str]:
    counters = Counter(hold_field(run) for run in runs)
    counters[HOLD_MAX] = round(max(runs, default=0) * 1000)
    return counters


@pytest.mark.parametrize(
    ("seconds", "field"),
    [
        (0.0, "hold_le_0.01"),
        (0.01, "hold_le_0.01"),
        (0.0101, "hold_le_0.025"),
        (60.0, "hold_le_60"),
        (86400.0, "hold_le_86400"),
        (86400.1, "hold_le_inf"),
    ],
)
def test_run_is_counted_at_the_smallest_bound_it_does_not_exceed(seconds: float, field: str) -> None:
    assert hold_field(seconds) == field


def test_bounds_rise_from_10_ms_to_a_day() -> None:
    assert (HOLD_BOUNDS[0], HOLD_BOUNDS[-1]) == (0.01, 86400.0)
    assert list(HOLD_BOUNDS) == sorted(set(HOLD_BOUNDS))
    assert len(set(HOLD_FIELDS)) == len(HOLD_BOUNDS) + 1


def test_no_runs_have_no_quantile() -> None:
    assert hold_quantile({}, 0.5) is None


def test_quantile_is_rounded_up_to_a_bound() -> None:
    counters = counted(*[0.004] * 98, 3.0, 4.0)
    assert hold_quantile(counters, 0.5) == 0.01
    assert hold_quantile(counters, 0.98) == 0.01
    assert hold_quantile(counters, 0.99) == 4.0


def test_no_quantile_is_above_the_longest_run() -> None:
    assert hold_quantile(counted(0.3), 0.99) == 0.3
    assert hold_quantile(counted(200_000.0), 0.5) == 200_000.0
