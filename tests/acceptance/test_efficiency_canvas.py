"""Calls that something waits for: chains, chords, links, given task ids (E12, E12a)."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

import pytest
from celery import chain, chord, group
from celery.result import AsyncResult

from tests.acceptance.workers import Site, Trial, eventually, was_busy


def new_label() -> str:
    return uuid.uuid4().hex[:8]


def others_wait(site: Site, label: str, equals: Sequence[AsyncResult]) -> None:
    """One of the calls runs, and a worker has turned every other away: one that came when that has ended may run too."""
    eventually(lambda: site.stage.runs(label) == 1)
    eventually(lambda: sum(was_busy(call.id) for call in equals) == len(equals) - 1, what="the other calls")


def both_tails_of_an_equal_head_run(site: Site, variant: str = "good", within: float = 10) -> None:
    head, tails = new_label(), (new_label(), new_label())
    task = site.task("early", variant)
    results = [chain(task.si(head, "hold"), task.si(tail)).apply_async() for tail in tails]
    if variant == "good":
        others_wait(site, head, [result.parent for result in results])
    eventually(lambda: site.stage.runs(head) >= 1)
    site.stage.release(head)
    for tail, result in zip(tails, results, strict=True):
        eventually(lambda tail=tail: site.stage.runs(tail) == 1, within)
        assert result.get(timeout=10) == f"{tail}#1"
        assert result.parent.get(timeout=10) == f"{head}#1"
    assert site.stage.runs(head) == 1


def test_both_tails_of_an_equal_head_run(site: Site) -> None:
    both_tails_of_an_equal_head_run(site)


def body_of_a_chord_with_equal_headers_runs_once(
    site: Site, variant: str = "good", within: float = 10
) -> None:
    label, body = new_label(), new_label()
    task = site.task("early", variant)
    result = chord([task.si(label, "hold"), task.si(label, "hold")])(
        site.app.tasks["unguarded.collect"].s(body)
    )
    if variant == "good":
        others_wait(site, label, result.parent.children)
    eventually(lambda: site.stage.runs(label) >= 1)
    site.stage.release(label)
    eventually(lambda: site.stage.runs(body) >= 1, within)
    assert result.get(timeout=10) == [f"{label}#1"] * 2
    assert (site.stage.runs(label), site.stage.runs(body)) == (1, 1)


def test_body_of_a_chord_with_equal_headers_runs_once(site: Site) -> None:
    body_of_a_chord_with_equal_headers_runs_once(site)


@pytest.mark.parametrize(
    "promise", [both_tails_of_an_equal_head_run, body_of_a_chord_with_equal_headers_runs_once]
)
def test_suppressing_awaited_calls_is_caught(site: Site, promise: Callable[..., None]) -> None:
    with pytest.raises(AssertionError):
        promise(site, "drops_awaited", within=2)


def test_group_of_equal_tasks_answers_every_member(site: Site, label: str) -> None:
    task = site.task("early")
    result = group(task.si(label, "hold"), task.si(label, "hold"), task.si(label, "hold")).apply_async()
    others_wait(site, label, result.children)
    site.stage.release(label)
    assert result.get(timeout=10) == [f"{label}#1"] * 3


def _running(site: Site, name: str, act: str) -> Trial:
    return site.begin(name, act, "sleep 0").has_run(1)


@pytest.mark.parametrize("awaited", [{"link": True}, {"task_id": True}])
def test_awaited_duplicate_is_answered_from_its_holder(site: Site, awaited: dict[str, bool]) -> None:
    holder, linked = _running(site, "early", "hold"), new_label()
    options = (
        {"task_id": str(uuid.uuid4())} if "task_id" in awaited else {"link": site.task("late").si(linked)}
    )
    call = holder.again(**options)
    assert (call.outcome.status, call.outcome.task_id) == ("awaiting", holder.result.id)
    holder.release()
    assert call.get(timeout=10) == f"{holder.label}#1"
    assert call.id != holder.result.id
    if "link" in awaited:
        eventually(lambda: site.stage.runs(linked) == 1)


def test_awaited_duplicate_is_answered_from_a_result_on_its_way_out(site: Site) -> None:
    holder = _running(site, "early", "hold, slow")
    with site.counted(holder.task, "busy"):
        call = holder.again(task_id=str(uuid.uuid4()))
    holder.release()
    assert call.get(timeout=10) == f"slow {holder.label}"
    assert holder.runs == 1


def test_awaited_duplicate_of_a_failure_runs_itself(site: Site) -> None:
    holder = _running(site, "early", "hold, fail")
    call = holder.again("sleep 0", task_id=str(uuid.uuid4()))
    holder.release()
    assert call.get(timeout=10) == f"{holder.label}#2"


def test_awaited_duplicate_of_a_call_that_is_only_queued_runs_itself(site: Site) -> None:
    queued, _ = site.parked("early")
    call = queued.again(task_id=str(uuid.uuid4()))
    assert (call.outcome.status, call.outcome.reason) == ("awaiting", "queued")
    assert call.get(timeout=10) == f"{queued.label}#1"


def test_next_step_of_a_chain_is_never_refused_with_an_error(site: Site) -> None:
    holder, head = _running(site, "raises", "hold"), new_label()
    result = chain(site.task("early").si(head), site.task("raises").si(holder.label)).apply_async()
    assert result.parent.get(timeout=10) == f"{head}#1"
    holder.release()
    assert result.get(timeout=10) == f"{holder.label}#1"
    assert holder.runs == 1
