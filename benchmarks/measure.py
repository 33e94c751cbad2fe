"""Time several ways of doing one thing, in turn, round after round, and compare them to the first."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

__all__ = ["Measured", "compare"]

Way = Callable[[int], object]
"""Does the thing once; the number differs at every call, so that a key can be new."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One way, in microseconds a call; ``ratio`` is the median of its rounds against the first way's."""

    name: str
    median: float
    minimum: float
    p99: float
    ratio: float
    spread: float
    """Largest less smallest ratio of a round, over the median ratio."""

    def row(self) -> str:
        return (
            f"  {self.name:<44} {self.median:9.1f} {self.minimum:9.1f} {self.p99:9.1f}   "
            f"{self.ratio:6.2f}  ±{self.spread / 2:4.0%}"
        )

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def compare(ways: Mapping[str, Way], *, rounds: int, calls: int, size: int = 1) -> list[Measured]:
    """Each round times every way ``calls`` times; the first round is a warm-up.  The order turns with the rounds.

    ``size``: how many things a way does at once; figures are for one of them.
    """
    times: dict[str, list[list[float]]] = {name: [] for name in ways}
    number = 0
    for turn in range(rounds + 1):
        names = list(ways)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times[name].append(_time(ways[name], number, calls, size))
            number += calls
    return [_measured(name, times[name][1:], next(iter(times.values()))[1:]) for name in ways]


def _time(way: Way, number: int, calls: int, size: int) -> list[float]:
    taken = []
    for call in range(number, number + calls):
        began = time.perf_counter()
        way(call)
        taken.append((time.perf_counter() - began) * 1e6 / size)
    return taken


def _measured(name: str, rounds: list[list[float]], first: list[list[float]]) -> Measured:
    every = sorted(value for taken in rounds for value in taken)
    ratios = [statistics.median(a) / statistics.median(b) for a, b in zip(rounds, first, strict=True)]
    ratio = statistics.median(ratios)
    spread = (max(ratios) - min(ratios)) / ratio
    return Measured(name, statistics.median(every), every[0], every[int(len(every) * 0.99)], ratio, spread)
