"""The two drawings of the overview as numbers: what the SVG templates draw.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Bar", "Column", "Sparkline", "bar", "sparkline"]

BAR_WIDTH, BAR_MARGIN = 180.0, 2.0
SPARK_WIDTH, SPARK_HEIGHT = 120.0, 28.0
LEAST = 1.5
"""Units of a drawing that still can be seen."""


@dataclass(frozen=True, slots=True)
class Bar:
    """Lengths along one axis that ends at the longer of lease and longest hold."""

    width: float
    p50: float
    p99: float
    longest: float
    lease: float
    over: bool
    """The longest hold outlasted the lease: it was renewed."""


def bar(p50: float, p99: float, longest: float, lease: float) -> Bar:
    """All in seconds."""
    end = max(lease, longest, 0.001)
    p50_at, p99_at, longest_at, lease_at = (
        round(BAR_MARGIN + (BAR_WIDTH - 2 * BAR_MARGIN) * seconds / end, 1)
        for seconds in (p50, p99, longest, lease)
    )
    return Bar(
        BAR_WIDTH,
        max(p50_at, LEAST),
        max(p99_at, LEAST),
        max(longest_at, LEAST),
        lease_at,
        over=longest > lease,
    )


@dataclass(frozen=True, slots=True)
class Column:
    """One hour: runs below, calls that were suppressed above them, and a mark where something went wrong."""

    x: float
    width: float
    runs_y: float
    runs_height: float
    more_y: float
    more_height: float
    trouble: bool


@dataclass(frozen=True, slots=True)
class Sparkline:
    columns: Sequence[Column]
    width: float
    height: float
    runs: int
    suppressed: int
    trouble: int
    busiest: int
    """The most calls in one hour."""


TROUBLE = ("expired", "lost", "fenced_off")


def sparkline(hours: Mapping[str, Sequence[int]]) -> Sparkline:
    """``hours``: as ``LeaseStore.hours()`` has them of one task."""
    runs, suppressed = _begun(hours), list(hours.get("suppressed", ()))
    trouble = [
        sum(numbers) for numbers in zip(*(hours[name] for name in TROUBLE if name in hours), strict=True)
    ]
    busiest = max((sum(pair) for pair in zip(runs, suppressed, strict=True)), default=0)
    step = SPARK_WIDTH / max(len(runs), 1)
    columns = [
        _column(step * place, step - 1, run, more, bool(bad), busiest)
        for place, (run, more, bad) in enumerate(zip(runs, suppressed, trouble, strict=True))
    ]
    return Sparkline(columns, SPARK_WIDTH, SPARK_HEIGHT, sum(runs), sum(suppressed), sum(trouble), busiest)


def _begun(hours: Mapping[str, Sequence[int]]) -> list[int]:
    """Bodies by hour; a start may have been granted in one and put off in the next."""
    granted = hours.get("granted", ())
    unentered = hours.get("not_entered", [0] * len(granted))
    return [max(starts - none, 0) for starts, none in zip(granted, unentered, strict=True)]


def _column(x: float, width: float, runs: int, more: int, trouble: bool, busiest: int) -> Column:
    low, room = SPARK_HEIGHT - 1, SPARK_HEIGHT - 6
    heights = [max(LEAST, room * number / busiest) if number else 0.0 for number in (runs, more)]
    below, above = (round(height, 1) for height in heights)
    return Column(
        round(x, 1),
        round(width, 1),
        round(low - below, 1),
        below,
        round(low - below - above, 1),
        above,
        trouble,
    )
