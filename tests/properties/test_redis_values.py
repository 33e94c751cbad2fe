"""What is written into Redis comes back as it was; what anybody else wrote raises nothing."""

from __future__ import annotations

from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from celery_once_fenced.stores.redis_values import decode, encode, milliseconds, parse_hold, parse_member

SLOTS: st.SearchStrategy[Literal["q", "r"]] = st.sampled_from(["q", "r"])
ODD = st.text(st.sampled_from("|%7C25abü\n\x00"))


@given(ODD | st.text())
def test_field_comes_back_as_it_was(text: str) -> None:
    assert "|" not in encode(text)
    assert decode(encode(text)) == text


@given(ODD, ODD)
def test_different_fields_are_stored_differently(one: str, other: str) -> None:
    assert (encode(one) == encode(other)) is (one == other)


@given(SLOTS, ODD | st.text() | st.none() | st.integers(), st.integers() | st.text() | st.none())
def test_any_value_is_a_hold(slot: Literal["q", "r"], value: object, left: object) -> None:
    hold = parse_hold(slot, "digest", value, left)
    assert hold.holder
    assert hold.left >= 0


@given(ODD | st.text(), st.none() | ODD)
def test_any_line_of_the_index_is_a_hold_or_none(member: str, value: str | None) -> None:
    hold = parse_member(["0", member, value, 0])
    assert (hold is None) is (value is None or member.count("|") < 3)


def test_time_to_live_is_never_rounded_to_none() -> None:
    assert [milliseconds(seconds) for seconds in (0, -1, 1e-9, 0.0014, 60)] == [0, 0, 1, 1, 60_000]
