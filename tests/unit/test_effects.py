"""The steps of one execution, over a ledger in memory: what is recorded when, and what is made of each answer (L4, L5)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from celery_once_fenced.effects import FINISH_PAUSES, DidNotHappen, Effects, Happened, Policy, Unknown
from celery_once_fenced.errors import FencedOffError, GrantError, InDoubtError, StoreUnavailableError
from celery_once_fenced.ledger import ResultOmitted
from celery_once_fenced.stores import EffectFinish, EffectStart, EffectStarted, Held, Operation

HELD = Held(Operation(b"d" * 32, "charge:42", "shop", "shop.charge", "t1", None, "account:7"), "me", 7, 1)
GO = EffectStarted("go", "dk", "me")
UNKNOWN = EffectStarted("unknown", "dk", "before me")


@dataclass
class Ledger:
    """Answers from a list; keeps what it is told."""

    answers: list[EffectStarted] = field(default_factory=lambda: [GO])
    away: int = 0
    started: list[EffectStart] = field(default_factory=list)
    finished: list[EffectFinish] = field(default_factory=list)

    def effect_start(self, ask: EffectStart) -> EffectStarted:
        self.started.append(ask)
        return self.answers.pop(0)

    def effect_finish(self, ask: EffectFinish) -> bool:
        if self.away:
            self.away -= 1
            raise StoreUnavailableError("postgres", "away")
        self.finished.append(ask)
        return True


class Bench:
    def __init__(self, *answers: EffectStarted, on_unknown: Policy = "hold") -> None:
        self.ledger = Ledger(list(answers or [GO]))
        self.slept: list[float] = []
        store: Any = self.ledger
        self.effects = Effects(store, HELD, on_unknown, (json.dumps, json.loads), sleep=self.slept.append)
        self.calls: list[str] = []

    def run(self, name: str = "gateway", value: Any = "receipt", own: Policy | None = None) -> Any:
        return self.effects.run(name, self.returning(value), (), own)

    def returning(self, value: Any) -> Callable[[str], Any]:
        def fn(key: str) -> Any:
            self.calls.append(key)
            return value

        return fn

    def failing(self, error: Exception, failed: tuple[type[BaseException], ...] = ()) -> None:
        def fn(key: str) -> None:
            self.calls.append(key)
            raise error

        self.effects.run("gateway", fn, failed, None)

    @property
    def outcome(self) -> tuple[str, str | None]:
        (told,) = self.ledger.finished
        return told.state, told.result


# --- the ordinary course ----------------------------------------------------------------------------------------------


def test_step_is_recorded_called_with_its_key_and_recorded() -> None:
    bench = Bench()
    assert bench.run() == "receipt"
    assert (bench.calls, bench.outcome) == (["dk"], ("done", '"receipt"'))


def test_recorded_step_is_replayed_and_not_called() -> None:
    bench = Bench(EffectStarted("done", "dk", "x", result="[1]"))
    assert bench.run() == [1]
    assert (bench.calls, bench.ledger.finished) == ([], [])


def test_superseded_holder_calls_nothing() -> None:
    bench = Bench(EffectStarted("fenced"))
    with pytest.raises(FencedOffError, match="token 7 for account:7"):
        bench.run()
    assert bench.calls == []


@pytest.mark.parametrize(
    ("value", "as_json"), [((1, 2), [1, 2]), ({1: "a"}, {"1": "a"}), (None, None), (0, 0)]
)
def test_first_attempt_gets_what_a_later_one_will(value: Any, as_json: Any) -> None:
    bench = Bench()
    first = bench.run(value=value)
    replay = Bench(EffectStarted("done", "dk", "x", result=bench.outcome[1])).run()
    assert first == replay == as_json


@pytest.mark.parametrize(("value", "reason"), [(object(), "not_serialisable"), ("x" * 70_000, "too_large")])
def test_result_that_cannot_be_recorded_is_marked_in_both(value: Any, reason: str) -> None:
    bench = Bench()
    first = bench.run(value=value)
    replay = Bench(EffectStarted("done", "dk", "x", result=bench.outcome[1])).run()
    assert isinstance(first, ResultOmitted)
    assert isinstance(replay, ResultOmitted)
    assert first.reason == replay.reason == reason


# --- errors -----------------------------------------------------------------------------------------------------------


def test_certain_failure_is_recorded_and_raised() -> None:
    bench = Bench()
    with pytest.raises(ZeroDivisionError):
        bench.failing(ZeroDivisionError("declined"), failed=(ArithmeticError,))
    assert bench.outcome == ("failed", None)
    assert "declined" in (bench.ledger.finished[0].error or "")


@pytest.mark.parametrize("error", [TimeoutError(), KeyboardInterrupt(), SystemExit()])
def test_any_other_error_records_nothing(error: Any) -> None:
    bench = Bench()
    with pytest.raises(type(error)):
        bench.failing(error, failed=(ArithmeticError,))
    assert bench.ledger.finished == []


def test_outcome_is_recorded_as_soon_as_the_database_is_back() -> None:
    bench = Bench()
    bench.ledger.away = len(FINISH_PAUSES)
    assert bench.run() == "receipt"
    assert (bench.slept, bench.calls) == (list(FINISH_PAUSES), ["dk"])


def test_outcome_that_cannot_be_recorded_is_no_success() -> None:
    bench = Bench()
    bench.ledger.away = 99
    with pytest.raises(StoreUnavailableError):
        bench.run()
    assert bench.calls == ["dk"]


def test_lost_reply_to_its_own_start_does_not_keep_it_from_calling() -> None:
    """The store asked again and was told that the step is started: by this very execution, which has not called."""
    bench = Bench(EffectStarted("unknown", "dk", "me"))
    assert bench.run() == "receipt"
    assert bench.calls == ["dk"]


# --- an unknown outcome -----------------------------------------------------------------------------------------------


def probing(answer: Any) -> tuple[Bench, list[str]]:
    asked: list[str] = []

    def probe(key: str) -> Any:
        asked.append(key)
        return answer

    return Bench(UNKNOWN, GO, on_unknown=probe), asked


def test_probe_that_found_it_is_recorded_for_who_started_it() -> None:
    bench, asked = probing(Happened((1,)))
    assert bench.run() == [1]
    assert (asked, bench.calls) == (["dk"], [])
    assert (bench.ledger.finished[0].holder, bench.outcome) == ("before me", ("done", "[1]"))


def test_probe_that_did_not_find_it_lets_it_be_called() -> None:
    bench, _ = probing(DidNotHappen())
    assert bench.run() == "receipt"
    assert bench.calls == ["dk"]
    assert [ask.own for ask in bench.ledger.started] == [None, "rerun"]
    assert bench.ledger.finished[0].holder == "me"


def test_receipt_that_came_while_the_probe_looked_is_replayed() -> None:
    bench, _ = probing(DidNotHappen())
    bench.ledger.answers[1] = EffectStarted("done", "dk", "before me", result='"late"')
    assert bench.run() == "late"
    assert bench.calls == []


def test_successor_that_came_while_the_probe_looked_shuts_it_out() -> None:
    bench, _ = probing(DidNotHappen())
    bench.ledger.answers[1] = EffectStarted("fenced")
    with pytest.raises(FencedOffError):
        bench.run()
    assert bench.calls == []


@pytest.mark.parametrize("policy", ["hold", "fail", lambda key: Unknown()])
def test_unknown_without_an_answer_is_in_doubt(policy: Policy) -> None:
    bench = Bench(UNKNOWN, on_unknown=policy)
    with pytest.raises(InDoubtError, match="gateway"):
        bench.run()
    assert (bench.calls, bench.ledger.finished) == ([], [])


def test_answer_that_is_none_is_refused_and_nothing_called() -> None:
    bench, _ = probing(True)
    with pytest.raises(GrantError, match="must answer Happened"):
        bench.run()
    assert bench.calls == []


def test_policy_of_the_step_goes_before_that_of_the_task() -> None:
    bench = Bench(UNKNOWN, on_unknown="hold")
    assert bench.run(own=lambda key: Happened("found")) == "found"
    (asked,) = bench.ledger.started
    assert (asked.on_unknown, asked.own) == ("hold", "probe")


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "x" * 101, "a\0b", "a\nb", "\ud800"])
def test_name_that_the_ledger_cannot_keep_is_refused(name: str) -> None:
    bench = Bench()
    with pytest.raises(GrantError, match="1 to 100 printable characters"):
        bench.run(name)
    assert bench.ledger.started == []


def test_name_is_used_once_even_after_an_error() -> None:
    bench = Bench(GO, GO)
    with pytest.raises(TimeoutError):
        bench.failing(TimeoutError())
    with pytest.raises(GrantError, match="already called"):
        bench.run()
    assert bench.run("another") == "receipt"


@pytest.mark.parametrize("where", ["step", "probe"])
def test_step_inside_another_is_refused(where: str) -> None:
    def inside(key: str) -> Any:
        return bench.effects.run("inner", str, (), None)

    bench = Bench(GO) if where == "step" else Bench(UNKNOWN, on_unknown=inside)
    with pytest.raises(GrantError, match="'inner' is called inside effect 'gateway'"):
        bench.effects.run("gateway", inside, (), None)
