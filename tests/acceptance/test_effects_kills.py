"""Workers killed between "about to call" and "outcome recorded", under every policy (L4, L5)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from celery_once_fenced.errors import InDoubtError, OutcomeUnknownError
from example_project.servers import Servers
from tests.acceptance.correctness_posting import has_one_effect
from tests.acceptance.effects_app import POLICIES
from tests.acceptance.effects_site import SCRIPTS, Charge, EffectsSite, charged_once
from tests.acceptance.workers import eventually

KNOWN = ("granted", "finished", "completed")
"""Nothing was started, or its outcome is recorded: every policy ends in one request and one posting."""
NOT_REACHED = ("started", "calling")
REACHED = ("charged", "returned")
POINTS = (*KNOWN, *NOT_REACHED, *REACHED)
WITHIN = 50.0

Case = tuple[str, str, str]
UNKNOWN = [(policy, how, point) for policy in POLICIES for how in SCRIPTS for point in NOT_REACHED + REACHED]
CERTAIN = [("hold", how, point) for how in SCRIPTS for point in KNOWN]


@pytest.fixture(scope="module")
def site(servers: Servers, shop: str) -> Iterator[EffectsSite]:
    site = EffectsSite.on(servers.redis_url, shop)
    with site.worker(concurrency=6):
        yield site
    site.close()


@pytest.fixture(scope="module")
def charges(site: EffectsSite) -> Mapping[Case, Charge]:
    """All that are killed, called at once."""
    return {
        (policy, how, point): site.charge(
            policy if how == "in the body" else f"{policy}_open", SCRIPTS[how], at={point: "die"}
        )
        for policy, how, point in [*UNKNOWN, *CERTAIN]
    }


@pytest.fixture(scope="module")
def naive(site: EffectsSite) -> Charge:
    return site.charge("charge", variant="naive", at={"charged": "die"})


def of(policy: str, points: tuple[str, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "case", [case for case in UNKNOWN if case[0] == policy and case[2] in points], ids=", ".join
    )


def reached(case: Case) -> int:
    """How many requests the gateway had got before the kill."""
    return int(case[2] in REACHED)


@pytest.mark.parametrize("case", CERTAIN, ids=", ".join)
def test_what_was_not_begun_or_is_recorded_is_asked_for_once(
    charges: Mapping[Case, Charge], case: Case
) -> None:
    charge = charges[case]
    assert charge.value(WITHIN) == charge.balance
    charged_once(charge)
    has_one_effect(charge)
    assert (len(charge.requests), charge.ledger.attempt) == (1, 2)


# --- the outcome is not known -----------------------------------------------------------------------------------------


@of("hold", NOT_REACHED + REACHED)
def test_held_step_is_in_doubt_and_never_taken_again(charges: Mapping[Case, Charge], case: Case) -> None:
    is_in_doubt(charges[case], reached(case))


@of("rerun", NOT_REACHED + REACHED)
def test_rerun_step_is_taken_again_with_the_same_key(charges: Mapping[Case, Charge], case: Case) -> None:
    charge = charges[case]
    assert charge.value(WITHIN) == charge.balance
    charged_once(charge)
    has_one_effect(charge)
    assert len(charge.requests) == reached(case) + 1


@of("fail", NOT_REACHED + REACHED)
def test_failing_step_ends_the_key(charges: Mapping[Case, Charge], case: Case) -> None:
    charge = charges[case]
    first = charge.ends("FAILURE", WITHIN)
    with pytest.raises(OutcomeUnknownError, match="gateway"):
        charge.again().get(timeout=10)
    assert isinstance(first, OutcomeUnknownError)
    assert (len(charge.requests), charge.entries, charge.ledger.state) == (reached(case), 0, "failed")


@of("probe", NOT_REACHED + REACHED)
def test_probed_step_is_taken_only_where_it_did_not_happen(
    charges: Mapping[Case, Charge], case: Case
) -> None:
    charge = charges[case]
    assert charge.value(WITHIN) == charge.balance
    charged_once(charge)
    has_one_effect(charge)
    assert len(charge.requests) == 1
    (told,) = charge.events("effect.probed")
    assert told["answer"] == ("Happened" if reached(case) else "DidNotHappen")


@of("unsure", NOT_REACHED + REACHED)
def test_probe_that_cannot_know_leaves_it_in_doubt(charges: Mapping[Case, Charge], case: Case) -> None:
    is_in_doubt(charges[case], reached(case))


def is_in_doubt(charge: Charge, requests: int) -> None:
    """Its own call and every later one are told which effect, and since when."""
    first = charge.ends("FAILURE", WITHIN)
    with pytest.raises(InDoubtError) as later:
        charge.again().get(timeout=10)
    assert isinstance(first, InDoubtError)
    assert (first.key, first.effect) == (charge.text, "gateway")
    assert later.value.args == first.args
    assert first.since
    assert (len(charge.requests), charge.entries) == (requests, 0)
    assert (charge.ledger.state, bool(charge.ledger.message)) == ("in_doubt", True)


# --- the control ------------------------------------------------------------------------------------------------------


def test_a_mark_that_goes_away_by_itself_is_caught(naive: Charge) -> None:
    eventually(naive.result.ready, WITHIN, "the end of the naive charge")
    with pytest.raises(AssertionError, match="charged 2 times"):
        charged_once(naive)
