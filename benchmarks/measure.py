"""Several ways of doing one thing, timed in turn, round after round, and compared within the run.

Absolute figures belong to a machine and its mood; ratios of ways that took turns are what can be repeated.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Comparison", "Effort", "Goal", "Measure", "Way", "compare", "in_turn"]

Way = Callable[[int], object]
"""Does the thing once; the number differs at every call, so that a key can be new."""

Statistic = Literal["median", "p99"]


def p99(values: Sequence[float]) -> float:
    """What one in a hundred takes longer than; of fewer, the longest."""
    return sorted(values)[min(int(len(values) * 0.99), len(values) - 1)]


STATISTICS: Mapping[Statistic, Callable[[Sequence[float]], float]] = {"median": statistics.median, "p99": p99}


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    quick: bool
    rounds: int
    calls: int

    @classmethod
    def of(cls, *, quick: bool) -> Effort:
        return cls(quick, rounds=4, calls=80) if quick else cls(quick, rounds=20, calls=200)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What every way took: one list of values for each round, in the measure's unit."""

    ways: Mapping[str, Sequence[Sequence[float]]]
    notes: Mapping[str, float] = field(default_factory=dict)
    """Figures that are no ratio of two ways, by name; goals may be about them."""

    def rows(self) -> list[dict[str, Any]]:
        """Median, minimum, p99, and the ratio to the first way with its spread."""
        first = next(iter(self.ways))
        return [{"way": name, **self._figures(name), **self.against(name, first)} for name in self.ways]

    def against(self, way: str, other: str) -> dict[str, float]:
        """``ratio``: the median of the rounds' ratios of medians.  ``spread``: largest less smallest, over that."""
        ratios = self._ratios(way, other, "median")
        ratio = statistics.median(ratios)
        return {
            "ratio": ratio,
            "spread": (max(ratios) - min(ratios)) / ratio,
            "ratio_of_minima": self._pooled(way)[0] / self._pooled(other)[0],
        }

    def value(self, goal: Goal) -> float:
        """The figure that a goal is about."""
        return self._value(goal.way, goal)

    def floor(self, goal: Goal) -> float | None:
        """The same figure of the way that does nothing but what cannot be left out; None where there is no such way."""
        return None if goal.floor is None else self._value(goal.floor, goal)

    def _value(self, way: str, goal: Goal) -> float:
        if goal.against is None:
            return self.notes[way]
        return statistics.median(self._ratios(way, goal.against, goal.statistic))

    def _ratios(self, way: str, other: str, statistic: Statistic) -> list[float]:
        """Of each round, in which both met the same machine."""
        figure = STATISTICS[statistic]
        pairs = zip(self.ways[way], self.ways[other], strict=True)
        return [figure(ours) / figure(theirs) for ours, theirs in pairs]

    def _figures(self, name: str) -> dict[str, float]:
        every = self._pooled(name)
        return {"median": statistics.median(every), "minimum": every[0], "p99": p99(every)}

    def _pooled(self, name: str) -> list[float]:
        return sorted(value for values in self.ways[name] for value in values)


@dataclass(frozen=True, slots=True)
class Goal:
    """``way`` against another way of the same measure, or, without ``against``, a note of that name.

    ``most`` is an upper bound, ``least`` a lower one; ``most_in_python`` holds where redis-py reads replies in Python.
    ``floor`` names what does no more than cannot be left out: what it takes in the same run bounds what can be reached.
    """

    way: str
    against: str | None = None
    most: float | None = None
    least: float | None = None
    most_in_python: float | None = None
    statistic: Statistic = "median"
    floor: str | None = None

    def limit(self, parser: str) -> str:
        """The bound in words."""
        if self.least is not None:
            return f"≥ {self.least:g}"
        return f"≤ {self._most(parser):g}"

    def met(self, value: float, parser: str) -> bool:
        return value >= self.least if self.least is not None else value <= self._most(parser)

    def most_for(self, parser: str) -> float | None:
        """The upper bound; None where there is a lower one."""
        return self._most(parser) if self.least is None else None

    def _most(self, parser: str) -> float:
        most = self.most_in_python if parser == "python" and self.most_in_python is not None else self.most
        assert most is not None
        return most


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One row of the table: what is compared, and what is asked of it."""

    name: str
    title: str
    unit: str
    run: Callable[[Effort], Comparison]
    goals: tuple[Goal, ...]
    parsers: tuple[str, ...] = ("",)
    """``("hiredis", "python")``: measured with and without hiredis."""
    pinned: bool = True
    """Caller and servers on processors of their own; not for several clients at once, which need all there are."""


def compare(
    ways: Mapping[str, Way], *, rounds: int, calls: int, size: int = 1, warm_up: bool = True
) -> Comparison:
    """Each round times every way ``calls`` times; the order turns with the rounds.  The first round does not count.

    ``size``: how many things a way does at once; figures are for one of them.
    """
    times: dict[str, list[list[float]]] = {name: [] for name in ways}
    number = 0
    for turn in range(rounds + warm_up):
        names = list(ways)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times[name].append(_time(ways[name], number, calls, size))
            number += calls
    return Comparison({name: taken[warm_up:] for name, taken in times.items()})


def in_turn(ways: Mapping[str, Callable[[], float]], *, rounds: int) -> Comparison:
    """As ``compare``, of ways that time themselves, once a round."""
    taken: dict[str, list[list[float]]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        names = list(ways)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            taken[name].append([ways[name]()])
    return Comparison({name: values[1:] for name, values in taken.items()})


def _time(way: Way, number: int, calls: int, size: int) -> list[float]:
    taken = []
    for call in range(number, number + calls):
        began = time.perf_counter()
        way(call)
        taken.append((time.perf_counter() - began) * 1e6 / size)
    return taken
