"""Layers and durations, for combinations that nobody thought of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_once_fenced.errors import ConfigError
from celery_once_fenced.policy import SPANS, Once, parse_duration, resolve, span_of

often = settings(max_examples=300, derandomize=True, database=None, deadline=None)

# Options that stand alone, so that any layers of them go together.
free = {
    "lease": st.integers(1, 60).map(float),
    "queue_hold": st.integers(1, 60).map(float),
    "max_deferred": st.integers(0, 9),
    "max_attempts": st.integers(0, 9),
    "key": st.sampled_from([None, (), ("a",), "x:{a}"]),
    "resource": st.sampled_from([None, "x:{a}"]),
    "double_run": st.sampled_from(["", "charged twice"]),
    "on_conflict": st.sampled_from(["skip", "defer", "raise"]),
    "replay_for": st.integers(0, 9).map(float),
}
layers = st.lists(st.fixed_dictionaries({}, optional=free), max_size=4)
Merge = Callable[[Sequence[dict[str, Any]]], dict[str, Any]]


def by_resolve(options: Sequence[dict[str, Any]]) -> dict[str, Any]:
    policy = resolve([Once(**layer) for layer in options], task="t")
    return {name: getattr(policy, name) for name in free}


def by_truth(options: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Broken: takes the first value that is true, so 0, () and None of a stronger layer are passed over."""
    built_in = by_resolve([])
    return {n: next((o[n] for o in options if o.get(n)), built_in[n]) for n in free}


def by_update(options: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Broken: the last layer wins."""
    return {**by_resolve([]), **{name: value for layer in options for name, value in layer.items()}}


def the_first_layer_that_sets_an_option_decides(merge: Merge) -> None:
    @often
    @given(layers)
    def check(options: list[dict[str, Any]]) -> None:
        found = merge(options)
        for name in free:
            setting = [layer[name] for layer in options if name in layer]
            if setting:
                assert found[name] == setting[0]
            else:
                assert found[name] == by_resolve([])[name]

    check()


def test_the_first_layer_that_sets_an_option_decides() -> None:
    the_first_layer_that_sets_an_option_decides(by_resolve)


@pytest.mark.parametrize("broken", [by_truth, by_update])
def test_another_order_is_caught(broken: Merge) -> None:
    with pytest.raises(AssertionError):
        the_first_layer_that_sets_an_option_decides(broken)


@often
@given(layers)
def test_a_dict_and_once_are_the_same_layer_and_neither_is_changed(options: list[dict[str, Any]]) -> None:
    before = [dict(layer) for layer in options]
    assert resolve(options, task="t") == resolve([Once(**layer) for layer in options], task="t")
    assert options == before


@often
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "tier": st.sampled_from(["efficiency", "correctness"]),
            "unique": st.sampled_from(sorted(SPANS)),
            "on_duplicate": st.sampled_from(["return_existing", "raise", "replace", "keep_last"]),
            "window": st.none() | st.integers(1, 9),
            "replay_for": st.integers(0, 9),
            "max_hold": st.none() | st.integers(1, 90),
            "atomic": st.booleans(),
        },
    )
)
def test_a_policy_keeps_the_rules_of_declaration_or_is_refused(options: dict[str, Any]) -> None:
    try:
        policy = resolve([options], task="t")
    except ConfigError:
        return
    assert policy.span == span_of(policy.unique, policy.on_duplicate)
    assert (policy.window is not None) == (policy.unique == "until_expired")
    assert policy.replay_for is not None or not policy.correctness
    assert policy.on_duplicate == "return_existing" or policy.unique != "while_executing"
    assert policy.max_hold is None or policy.max_hold >= policy.lease


@often
@given(st.integers(0, 99), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59), st.integers(0, 999))
def test_every_way_to_write_a_duration_is_the_same_one(d: int, h: int, m: int, s: int, ms: int) -> None:
    span = timedelta(days=d, hours=h, minutes=m, seconds=s, milliseconds=ms)
    text = f"{d}d{h}h{m}m{s}s{ms}ms"
    seconds = parse_duration(span, option="x")
    assert parse_duration(text, option="x") == pytest.approx(seconds)
    assert parse_duration(seconds, option="x") == seconds


@often
@given(
    st.one_of(st.text(), st.floats(), st.integers(), st.none(), st.booleans(), st.timedeltas(), st.binary())
)
def test_a_duration_is_finite_and_not_negative_or_refused(value: Any) -> None:
    try:
        seconds = parse_duration(value, option="x")
    except ConfigError:
        return
    assert 0 <= seconds < 4e9
    assert type(seconds) is float
