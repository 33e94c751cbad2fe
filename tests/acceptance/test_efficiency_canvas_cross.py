"""Every shape of canvas with a duplicate in every position (E12, E12a).

A duplicate is a member whose key another call holds.  However the canvas is made, no tail is lost, no body waits for
ever, and the member has its holder's result.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from celery import chain, chord, group

from tests.acceptance.workers import Site, Trial, eventually

Members = Sequence[Any]


@dataclass(frozen=True)
class Shape:
    """A canvas of so many members, and the value it has when each of them has its own."""

    members: int
    make: Callable[[Site, Members], Any]
    value: Callable[[Sequence[str]], Any]
    order: Sequence[int] = (0, 1, 2)
    """In which its members are published."""
    successor: bool = False
    """Whether the first one takes the place, and the task id, of another task: then it is published unasked (E10)."""


def collect(site: Site) -> Any:
    """The body of a chord that answers what it is given."""
    return site.app.tasks["unguarded.collect"].s(uuid.uuid4().hex[:8])


def replaced(site: Site, by: Any) -> Any:
    return site.app.tasks["unguarded.replaced"].si(by)


SHAPES = {
    "chain": Shape(3, lambda site, m: chain(*m), lambda v: v[2]),
    "group": Shape(3, lambda site, m: group(*m), list),
    "chord": Shape(2, lambda site, m: chord(list(m), collect(site)), list),
    "chord and its body": Shape(3, lambda site, m: chord(list(m[:2]), m[2]), lambda v: v[2]),
    "chord of chords": Shape(
        3,
        lambda site, m: chord([chord(list(m[:2]), collect(site)), m[2]], collect(site)),
        lambda v: [[v[0], v[1]], v[2]],
    ),
    "group in a chain": Shape(3, lambda site, m: chain(group(*m[:2]), m[2]), lambda v: v[2]),
    "chain in a group": Shape(
        3, lambda site, m: group(chain(*m[:2]), m[2]), lambda v: [v[1], v[2]], order=(0, 2, 1)
    ),
    "chain in a chord": Shape(
        3,
        lambda site, m: chord([chain(*m[:2]), m[2]], collect(site)),
        lambda v: [v[1], v[2]],
        order=(0, 2, 1),
    ),
    "link": Shape(2, lambda site, m: _linked(*m), lambda v: v[0]),
    "replace by a task": Shape(1, lambda site, m: replaced(site, m[0]), lambda v: v[0], successor=True),
    "replace by a chain": Shape(2, lambda site, m: replaced(site, chain(*m)), lambda v: v[1]),
    "replace by a group": Shape(2, lambda site, m: replaced(site, group(*m)), list),
    "replace in a chain": Shape(
        2, lambda site, m: chain(replaced(site, m[0]), m[1]), lambda v: v[1], successor=True
    ),
    "stamped chain": Shape(3, lambda site, m: _stamped(chain(*m)), lambda v: v[2]),
    "stamped chord": Shape(2, lambda site, m: _stamped(chord(list(m), collect(site))), list),
}


def _linked(task: Any, callback: Any) -> Any:
    task.link(callback)
    return task


def _stamped(canvas: Any) -> Any:
    canvas.stamp(order="42")
    return canvas


def placings() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Each shape with a duplicate in each position, and in all of them."""
    for name, shape in SHAPES.items():
        every = tuple(range(shape.members))
        yield from ((name, places) for places in {*((place,) for place in every), every})


def played(site: Site, name: str, places: Sequence[int], variant: str = "good", within: float = 20) -> None:
    shape, task = SHAPES[name], site.task("early", variant)
    holders = {place: site.begin("early", "hold", variant=variant).has_run(1) for place in places}
    labels = [holders[p].label if p in holders else uuid.uuid4().hex[:8] for p in range(shape.members)]
    counters = Counter(site.stats(task))
    result = shape.make(site, [task.si(label) for label in labels]).apply_async()
    for place in (place for place in shape.order if place in holders):
        counter = "busy" if shape.successor and place == 0 else "awaiting"
        counters[counter] += 1  # it is on its way, while its key is still held
        eventually(
            lambda counter=counter: site.stats(task).get(counter, 0) >= counters[counter], within, counter
        )
        holders[place].release()
    eventually(result.ready, within, f"the end of {name}")
    assert result.get(timeout=5) == shape.value([f"{label}#1" for label in labels])
    for label in labels:
        eventually(lambda label=label: site.stage.runs(label) >= 1, within, f"a run of each member of {name}")
    assert [site.stage.runs(label) for label in labels] == [1] * shape.members


@pytest.mark.parametrize(("name", "places"), sorted(placings()))
def test_no_shape_loses_anything_to_a_duplicate(site: Site, name: str, places: Sequence[int]) -> None:
    played(site, name, places)


@pytest.mark.parametrize("name", ["chain", "chord", "replace by a chain"])
def test_suppressing_a_member_is_caught(site: Site, name: str) -> None:
    with pytest.raises(AssertionError):
        played(site, name, (0,), variant="drops_awaited", within=2)


# --- error callbacks --------------------------------------------------------------------------------------------------


def failing(site: Site, label: str, errback: str) -> Any:
    signature = site.task("early").si(label, "fail", "fail")
    return signature.on_error(site.app.tasks["good.single"].si(errback))


def test_error_callback_that_is_a_duplicate_is_settled(site: Site, label: str) -> None:
    single = site.app.tasks["good.single"]
    holder = single.delay(label)
    eventually(lambda: site.stage.runs(label) == 1)
    with site.counted(single, "awaiting"):
        result = failing(site, uuid.uuid4().hex[:8], label).apply_async()
    with site.counted(single, "released", times=2):
        site.stage.release(label)
    assert holder.get(timeout=10) == f"{label}#1"
    eventually(lambda: result.state == "FAILURE")
    eventually(lambda: site.holds(single, label) == {})
    assert site.stage.runs(label) == 1


def test_duplicate_of_a_task_that_fails_calls_its_own_error_callback(site: Site, label: str) -> None:
    holder: Trial = site.begin("early", "hold, fail").has_run(1)
    site.stage.release(label)
    with site.counted(holder.task, "awaiting"):
        result = failing(site, holder.label, label).apply_async()
    holder.release()
    eventually(lambda: site.stage.runs(label) == 1, 20)
    assert (result.state, holder.runs) == ("FAILURE", 2)
