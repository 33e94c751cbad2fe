"""Every state of a model, breadth first; the shortest way to one that breaks a property is the trace."""

from __future__ import annotations

from dataclasses import dataclass

from tests.properties.protocol_model import Model, ViolationError, World

__all__ = ["Found", "explore", "violation_of"]


class BrokenError(Exception):
    """A property does not hold: what, and the steps that lead there."""


@dataclass(frozen=True)
class Found:
    states: int
    steps: int
    ends: frozenset[object]
    """States in which nothing more happens by itself: the world, and what is in its store."""


def explore(model: Model) -> Found:
    """Raises ``BrokenError`` with a trace where a property does not hold in some state."""
    numbers: dict[World, int] = {model.first: 0}
    worlds = [model.first]
    came_from: list[tuple[int, str]] = [(-1, "")]
    before: list[list[int]] = [[]]
    ends: list[int] = []
    count = 0
    for here, world in enumerate(worlds):  # grows while it is walked
        goes_on = False
        try:
            for said, there in model.steps(world):
                count += 1
                number = numbers.setdefault(there, len(worlds))
                if number == len(worlds):
                    worlds.append(there)
                    came_from.append((here, said))
                    before.append([])
                before[number].append(here)
                goes_on = goes_on or (number != here and len(there.faults) == len(world.faults))
            if not goes_on:
                ends.append(here)
                model.check_end(world)
        except ViolationError as error:
            raise BrokenError(_trace(str(error), here, came_from)) from error
    _check_all_end(ends, before, came_from)
    return Found(len(worlds), count, frozenset(_shown(model, worlds[number]) for number in ends))


def _shown(model: Model, world: World) -> object:
    return world._replace(store=0), model.memory.contents(world.store)


def _check_all_end(ends: list[int], before: list[list[int]], came_from: list[tuple[int, str]]) -> None:
    """From each state an end can be reached: nothing goes round for ever."""
    reaching, todo = set(ends), list(ends)
    while todo:
        for number in before[todo.pop()]:
            if number not in reaching:
                reaching.add(number)
                todo.append(number)
    if len(reaching) < len(before):
        stuck = min(set(range(len(before))) - reaching)
        raise BrokenError(_trace("no end can be reached", stuck, came_from))


def _trace(why: str, number: int, came_from: list[tuple[int, str]]) -> str:
    steps = []
    while number > 0:
        number, said = came_from[number]
        steps.append(said)
    return "\n".join([why, *(f"  {i}. {said}" for i, said in enumerate(reversed(steps), 1))])


def violation_of(model: Model) -> str:
    """The trace of a broken model; empty where every property holds."""
    try:
        explore(model)
    except BrokenError as broken:
        return str(broken)
    return ""
