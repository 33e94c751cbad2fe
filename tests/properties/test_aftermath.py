"""After an error the ledger was asked: whatever it said, no job is lost and no result is overwritten.

All answers are tried.  The rules are written down once more here, as what must never be.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import get_args

import pytest

from celery_once_fenced.ledger import Aftermath, aftermath
from celery_once_fenced.stores import Abandoned

Facts = tuple[str, bool, bool, bool, bool]
Decide = Callable[..., Aftermath]


def possible(facts: Facts) -> bool:
    """As ``AbandonReply`` says: taken_over is never ours; retryable, failed and in_doubt always are.

    Ours, completed or not, is of our own task.
    """
    state, ours, _, same_task, _ = facts
    if ours and not same_task:
        return False
    return state == "succeeded" or ours == (state != "taken_over")


ANSWERS = [facts for facts in product(get_args(Abandoned), *[(True, False)] * 4) if possible(facts)]
ENDS_FAILURE = {Aftermath.RAISE}
COMES_AGAIN = {Aftermath.AGAIN, Aftermath.DEFER}


def wrong(decide: Decide, facts: Facts) -> str:
    """The rule that a decision breaks; empty: none."""
    state, ours, fence_ours, same_task, lost = facts
    action = decide(state=state, ours=ours, fence_ours=fence_ours, same_task=same_task, connection_lost=lost)
    done = state == "succeeded"
    broken = {
        "C13: infrastructure became the outcome": action in ENDS_FAILURE and (lost or not fence_ours),
        "C13: an error of the body is tried again for ever": action in COMES_AGAIN
        and ours
        and fence_ours
        and not lost,
        "L8: a commit that happened is no success": done and ours and action is not Aftermath.SUCCEEDED,
        "L8: a success that did not happen": not (done and ours) and action is Aftermath.SUCCEEDED,
        "L10: a superseded attempt tells its own story": not ours
        and action in (Aftermath.RAISE, Aftermath.SUCCEEDED),
        "W10: the successor's result is overwritten": not ours
        and same_task
        and action is not Aftermath.LEAVE,
        "W10: a call of its own is left without an answer": not same_task and action is Aftermath.LEAVE,
        "W10: an answer that nobody recorded": action is Aftermath.REPLAY and not done,
        "the job is lost": action is Aftermath.LEAVE and ours,
    }
    return next((rule for rule, holds in broken.items() if holds), "")


def test_every_answer_has_one_right_action() -> None:
    assert {facts: rule for facts in ANSWERS if (rule := wrong(aftermath, facts))} == {}


def test_decision_is_total() -> None:
    for state, *flags in product([*get_args(Abandoned), "of a newer version"], *[(True, False)] * 4):
        names = ("ours", "fence_ours", "same_task", "connection_lost")
        assert isinstance(aftermath(state=state, **dict(zip(names, flags, strict=True))), Aftermath)


def by_the_error_alone(*, connection_lost: bool, **_: object) -> Aftermath:
    """Broken: does not ask whether the commit happened."""
    return Aftermath.AGAIN if connection_lost else Aftermath.RAISE


def without_the_fence(**facts: bool) -> Aftermath:
    """Broken: another key took the resource, and the job ends in FAILURE."""
    return aftermath(**{**facts, "fence_ours": True})  # type: ignore[arg-type]


def without_the_connection(**facts: bool) -> Aftermath:
    """Broken: a restart of Postgres ends jobs in FAILURE."""
    return aftermath(**{**facts, "connection_lost": False})  # type: ignore[arg-type]


def without_the_task(**facts: bool) -> Aftermath:
    """Broken: another call's take-over counts as the own twin's, and nobody answers this one."""
    return aftermath(**{**facts, "same_task": True})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "broken", [by_the_error_alone, without_the_fence, without_the_connection, without_the_task]
)
def test_broken_decisions_are_noticed(broken: Decide) -> None:
    assert any(wrong(broken, facts) for facts in ANSWERS)
