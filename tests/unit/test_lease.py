"""The efficiency lease by its holder's clock: believed, renewed, lost."""

from __future__ import annotations

import pytest

from celery_once_fenced.lease import Lease, boot_clock, deferral, queued_hold, trust_window


def lease(ttl: float = 60.0, *, sent: float = 100.0, max_hold: float | None = None) -> Lease:
    return Lease.granted(ttl, sent=sent, max_hold=max_hold)


def test_trust_window_is_the_ttl_less_drift_and_resolution() -> None:
    assert trust_window(60.0) == pytest.approx(60.0 - 0.6 - 0.002)


def test_trust_is_counted_from_before_the_question_was_sent() -> None:
    assert lease(sent=100.0).remaining(101.0) == pytest.approx(trust_window(60.0) - 1.0)


def test_lease_is_renewed_at_a_third() -> None:
    assert lease().due == 120.0


def test_lease_is_lost_when_its_window_ends() -> None:
    held = lease()
    assert not held.lost(100.0 + trust_window(60.0))
    assert held.lost(160.0)
    assert held.remaining(160.0) == 0.0


def test_renewal_moves_the_window_from_when_it_was_sent() -> None:
    held = lease()
    held.renewed(sent=120.0, now=125.0)
    assert held.trusted_until == 120.0 + trust_window(60.0)
    assert held.due == 140.0


def test_failed_renewal_is_tried_again_soon_and_moves_no_window() -> None:
    held = lease()
    before = held.trusted_until
    held.failed(120.0)
    assert (held.due, held.trusted_until) == (120.5, before)


def test_failed_renewal_of_a_short_lease_is_tried_again_within_it() -> None:
    held = lease(0.3)
    held.failed(100.1)
    assert held.due == pytest.approx(100.13)


def test_renewal_that_comes_too_late_does_not_bring_a_lease_back() -> None:
    held = lease()
    held.renewed(sent=120.0, now=161.0)
    assert held.lost(121.0)


def test_refused_lease_is_lost_at_once() -> None:
    held = lease()
    held.refused()
    assert held.lost(100.0)


def test_lost_is_final_even_if_the_clock_goes_back() -> None:
    held = lease()
    assert held.lost(161.0)
    assert held.lost(100.0)


def test_max_hold_ends_renewal_not_trust() -> None:
    held = lease(max_hold=90.0)
    for now in (140.0, 180.0):
        held.renewed(sent=now, now=now)
    assert not held.over(189.0)
    assert held.over(190.0)
    assert not held.lost(190.0)


def test_boot_clock_goes_forward() -> None:
    before = boot_clock()
    assert before <= boot_clock() <= before + 60


# --- stepping aside ---------------------------------------------------------------------------------------------------


def defer(
    left: float = 60.0, *, tries: int = 0, twin: bool = False, visibility: float | None = None
) -> float:
    return deferral(left, visibility_timeout=visibility, tries=tries, twin=twin, jitter=0.0)


def test_twin_waits_for_the_lease() -> None:
    assert defer(60.0, twin=True) == 60.0


def test_others_back_off_from_a_quarter_of_a_second_to_half_a_minute() -> None:
    assert [defer(tries=n, left=1e6) for n in range(9)] == [0.25, 0.5, 1, 2, 4, 8, 16, 32, 32]


def test_nobody_waits_longer_than_what_is_in_the_way() -> None:
    assert defer(0.5, tries=5) == 0.5


def test_nobody_comes_back_at_once() -> None:
    assert defer(0.0) == defer(0.0, twin=True) == 0.05


def test_nobody_waits_beyond_half_the_visibility_timeout() -> None:
    assert defer(3600.0, twin=True, visibility=60.0) == 30.0


def test_jitter_lengthens_by_up_to_a_tenth() -> None:
    assert deferral(60.0, visibility_timeout=None, tries=0, twin=True, jitter=1.0) == pytest.approx(66.0)


def test_very_many_tries_are_no_overflow() -> None:
    assert defer(tries=10**9) == 32.0


# --- the queued hold --------------------------------------------------------------------------------------------------


def test_queued_hold_begins_after_the_delay() -> None:
    assert queued_hold(3600.0, delay=60.0, expires=None) == 3660.0


def test_call_that_expires_holds_no_longer() -> None:
    assert queued_hold(3600.0, delay=60.0, expires=90.0) == 90.0


@pytest.mark.parametrize("expires", [0.0, -5.0])
def test_call_that_has_expired_holds_for_a_moment(expires: float) -> None:
    assert queued_hold(3600.0, delay=0.0, expires=expires) == 0.001


def test_eta_in_the_past_does_not_shorten_the_hold() -> None:
    assert queued_hold(3600.0, delay=-600.0, expires=None) == 3600.0
