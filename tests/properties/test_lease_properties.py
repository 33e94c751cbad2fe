"""What holds of every lease, deferral, hold and header, whatever the numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_once_fenced.header import Header
from celery_once_fenced.keys import Key
from celery_once_fenced.lease import Lease, deferral, queued_hold, trust_window

often = settings(max_examples=300, derandomize=True, database=None, deadline=None)

ttls = st.floats(0.1, 1e6)
seconds = st.floats(0.0, 1e9)
steps = st.lists(
    st.tuples(st.sampled_from(["renewed", "failed", "refused", "look"]), st.floats(0.0, 100.0)), max_size=30
)


@often
@given(ttls)
def test_trust_ends_before_the_ttl(ttl: float) -> None:
    assert 0 < trust_window(ttl) < ttl


# --- believing --------------------------------------------------------------------------------------------------------


class Forgiving(Lease):
    """Broken: a late renewal brings a lease back."""

    def lost(self, now: float) -> bool:
        return self.refused_ or now > self.trusted_until

    def renewed(self, *, sent: float, now: float) -> None:
        self.refused_ = False
        self.trusted_until = sent + trust_window(self.ttl)


def played(lease: Lease, steps: list[tuple[str, float]]) -> list[tuple[float, bool]]:
    """What the holder saw after each step; the answer to a renewal comes when half of its step has passed."""
    now, seen = 0.0, []
    for step, passed in steps:
        sent, now = now + passed / 2, now + passed
        if step == "renewed":
            lease.renewed(sent=sent, now=now)
        elif step == "failed":
            lease.failed(now)
        elif step == "refused":
            lease.refused()
        seen.append((now, lease.lost(now)))
    return seen


def lost_is_final(kind: type[Lease]) -> None:
    @often
    @given(steps)
    def check(steps: list[tuple[str, float]]) -> None:
        lost = [lost for _, lost in played(kind.granted(60.0, sent=0.0, max_hold=None), steps)]
        assert lost == sorted(lost)

    check()


def test_lost_is_final() -> None:
    lost_is_final(Lease)


def test_lease_that_comes_back_is_noticed() -> None:
    with pytest.raises(AssertionError):
        lost_is_final(Forgiving)


@often
@given(ttls, steps)
def test_nothing_is_believed_beyond_the_ttl_of_the_last_renewal_that_was_sent(
    ttl: float, steps: list[tuple[str, float]]
) -> None:
    seen = played(Lease.granted(ttl, sent=0.0, max_hold=None), steps)
    lives_until, now = ttl, 0.0
    for (step, passed), (at, lost) in zip(steps, seen, strict=True):
        if step == "renewed":
            lives_until = max(lives_until, now + passed / 2 + ttl)
        now = at
        assert lost or at < lives_until


@often
@given(ttls, st.floats(0.1, 1e6), steps)
def test_renewal_ends_with_max_hold(ttl: float, max_hold: float, steps: list[tuple[str, float]]) -> None:
    lease = Lease.granted(ttl, sent=0.0, max_hold=max_hold)
    played(lease, steps)
    assert lease.over(max_hold)


# --- stepping aside ---------------------------------------------------------------------------------------------------

Defer = Callable[..., float]
deferrals = st.fixed_dictionaries(
    {
        "left": seconds,
        "visibility_timeout": st.none() | st.floats(0.1, 1e6),
        "tries": st.integers(0, 10**6),
        "twin": st.booleans(),
        "jitter": st.floats(0.0, 1.0, exclude_max=True),
    }
)


@often
@given(deferrals)
def test_deferral_is_some_time_but_at_most_half_the_visibility_timeout(ask: dict[str, Any]) -> None:
    found = deferral(**ask)
    assert found > 0
    if ask["visibility_timeout"] is not None:
        assert found <= ask["visibility_timeout"] / 2


@often
@given(deferrals)
def test_deferral_grows_with_the_tries_and_stays_below_what_is_left(ask: dict[str, Any]) -> None:
    found = deferral(**ask)
    assert found <= deferral(**{**ask, "tries": ask["tries"] + 1})
    assert found <= max(ask["left"], 0.05) * 1.1


@often
@given(deferrals)
def test_only_twins_wait_longer_than_half_a_minute(ask: dict[str, Any]) -> None:
    assert deferral(**{**ask, "twin": False}) <= 32 * 1.1
    assert deferral(**{**ask, "twin": False}) <= deferral(**{**ask, "twin": True})


# --- the queued hold --------------------------------------------------------------------------------------------------


@often
@given(st.floats(0.001, 1e6), st.floats(-1e6, 1e6), st.none() | st.floats(-1e6, 1e6))
def test_queued_hold_is_positive_and_capped_by_the_expiry(
    hold: float, delay: float, expires: float | None
) -> None:
    found = queued_hold(hold, delay=delay, expires=expires)
    assert found > 0
    assert found <= hold + max(delay, 0.0)
    if expires is not None:
        assert found <= max(expires, 0.001)


# --- the header -------------------------------------------------------------------------------------------------------

words = st.text(max_size=40)
digests = st.binary(min_size=32, max_size=32).map(bytes.hex)
headers = st.builds(
    Header,
    key=st.none() | st.builds(Key, digests, words),
    fingerprint=st.none() | digests,
    delivery=words.filter(bool),
    run=words.filter(bool),
    awaited=st.booleans(),
    deferrals=st.integers(0, 10**9),
    republished=st.integers(0, 10**9),
    answer_from=words,
    bypass=st.booleans(),
    once_key=st.none() | words.filter(bool),
)
names = st.sampled_from(
    ["key", "text", "fp", "id", "run", "awaited", "n", "again", "from", "bypass", "once_key"]
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(names | st.text(), inner),
    max_leaves=12,
)


@often
@given(headers)
def test_header_survives_the_message(header: Header) -> None:
    assert Header.parse(json.loads(json.dumps(header.dump()))) == header


@often
@given(anything)
def test_header_of_a_stranger_never_raises(raw: object) -> None:
    parsed = Header.parse(raw)
    assert (parsed is None) == (not isinstance(raw, dict))
    if parsed is not None:
        assert Header.parse(parsed.dump()) == parsed
