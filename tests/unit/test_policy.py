"""What may be written into ``Once``, what goes together, and which layer decides (rules E20 and W7)."""

from __future__ import annotations

import copy
import pickle
from datetime import timedelta
from typing import Any

import pytest

from celery_once_fenced.errors import ConfigError
from celery_once_fenced.policy import SPANS, STRATEGIES, Once, Policy, parse_duration, resolve, span_of


def made(*layers: Any, hard_limit: float | None = None) -> Policy:
    return resolve(layers, task="shop.charge", hard_limit=hard_limit)


# --- durations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (0, 0.0),
        (1.5, 1.5),
        (timedelta(minutes=2), 120.0),
        ("500ms", 0.5),
        ("90s", 90.0),
        ("15m", 900.0),
        ("2h", 7200.0),
        ("30d", 2592000.0),
        ("2w", 1209600.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        (" 90s ", 90.0),
    ],
)
def test_a_duration_is_seconds_a_timedelta_or_text(written: Any, seconds: float) -> None:
    assert parse_duration(written, option="lease") == seconds


@pytest.mark.parametrize(
    "written",
    [
        True,
        None,
        -1,
        "-1s",
        "",
        "90",
        "s",
        "1y",
        "1 h",
        "٣s",
        float("nan"),
        float("inf"),
        10**400,
        "9" * 400 + "s",
    ],
)
def test_anything_else_is_an_error_that_says_what_to_write(written: Any) -> None:
    with pytest.raises(ConfigError, match=r'lease=.* is no duration; write seconds .* "15m"'):
        parse_duration(written, option="lease")


# --- spans --------------------------------------------------------------------------------------------------


def test_the_spans_are_the_table_of_the_protocol() -> None:
    assert {unique: span.flags for unique, span in SPANS.items()} == {
        "until_executed": "qrQnRc",
        "until_executing": "qQc",
        "until_expired": "qQ",
        "while_executing": "nR",
        "until_and_while_executing": "qQnRc",
    }


def test_a_start_that_takes_r_needs_it_free_and_only_a_held_q_is_cleared() -> None:
    for span in SPANS.values():
        assert span.needs_r == span.sets_r
        assert span.sets_q or not span.clears_q
        assert span.refused_by_q == span.sets_q


# --- one layer ----------------------------------------------------------------------------------------------


def test_a_layer_knows_only_what_it_was_given() -> None:
    assert Once(lease="1m", key=None).given() == {"lease": 60.0, "key": None}
    assert Once().given() == {}


def test_options_show_what_was_given_and_nothing_else() -> None:
    assert repr(Once(lease="1m", key=("a",))) == "Once(key=('a',), lease=60.0)"
    assert repr(Once()) == "Once()"


def test_a_layer_can_be_copied_and_pickled() -> None:
    once = Once(lease=30, key=("a",), final_errors=(ValueError,))
    assert copy.deepcopy(once) == pickle.loads(pickle.dumps(once)) == once


def test_an_unknown_option_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="'laese' is no option of Once; did you mean 'lease'"):
        Once(laese=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="the options are tier, key, "):
        Once(zzz=3)  # type: ignore[call-arg]


def test_options_are_keywords() -> None:
    with pytest.raises(ConfigError, match="keyword options only"):
        Once("feed:{feed_id}")  # type: ignore[call-arg,arg-type]


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("tier", "corectness", "did you mean 'correctness'"),
        ("unique", "until_execute", "did you mean 'until_execut"),
        ("on_duplicate", "keep_lst", "did you mean 'keep_last'"),
        ("on_conflict", "wait", "'skip', 'defer' or 'raise'"),
        ("on_overflow", None, "'raise' or 'drop'"),
        ("on_store_error", "closed", "'open' or 'raise'"),
        ("on_unknown", "retry", "'hold', 'rerun' or 'fail'"),
        ("lease", 0, "at least 0.1 s"),
        ("lease", "50ms", "at least 0.1 s"),
        ("queue_hold", 0, "more than 0 s"),
        ("window", "0s", "more than 0 s"),
        ("max_hold", "soon", "is no duration"),
        ("replay_for", None, "is no duration"),
        ("max_deferred", -1, "whole number"),
        ("max_attempts", True, "whole number"),
        ("max_attempts", 2.0, "whole number"),
        ("atomic", 1, "True or False"),
        ("double_run", None, "must be text"),
        ("scope", "", "leave it out for the task's name"),
        ("key", 5, "tuple of argument names"),
        ("key", (1,), "tuple of argument names"),
        ("key", "{0}", "may name arguments only"),
        ("resource", ("a",), "format string"),
        ("resource", "{a.b}", "may name arguments only"),
        ("fingerprint", "amount", r"\('amount',\)"),
        ("final_errors", ValueError, "tuple of exception classes"),
        ("final_errors", (KeyboardInterrupt,), "tuple of exception classes"),
        ("final_errors", "ValueError", "tuple of exception classes"),
    ],
)
def test_a_wrong_value_is_an_error_naming_option_value_and_remedy(
    option: str, value: Any, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{option}=.*{remedy}"):
        Once(**{option: value})


def test_a_dict_of_options_says_all_that_is_wrong() -> None:
    with pytest.raises(ConfigError, match=r"'leas'.*; tier='x'.*; max_attempts="):
        Once.from_mapping({"leas": 3, "tier": "x", "max_attempts": -1})


def test_a_probe_is_a_function() -> None:
    assert Once(on_unknown=len).on_unknown is len


# --- layers -------------------------------------------------------------------------------------------------


def test_what_no_layer_sets_is_built_in() -> None:
    found = made()
    assert (found.tier, found.key, found.scope, found.unique) == (
        "efficiency",
        None,
        "shop.charge",
        "until_executed",
    )
    assert (found.lease, found.queue_hold, found.max_hold, found.window) == (60.0, 3600.0, None, None)
    assert (found.max_deferred, found.max_attempts, found.atomic, found.replay_for) == (100, 5, True, None)
    assert found.span is SPANS["until_executed"]


def test_the_first_layer_that_sets_an_option_decides() -> None:
    found = made({"lease": 1}, Once(lease=2, queue_hold="2m"), Once(queue_hold=3, max_deferred=4))
    assert (found.lease, found.queue_hold, found.max_deferred) == (1.0, 120.0, 4)


def test_none_is_a_value_that_a_stronger_layer_can_set() -> None:
    assert made(Once(key=None), Once(key=("a",))).key is None


@pytest.mark.parametrize(
    ("unique", "on_conflict"),
    [("until_executed", "skip"), ("until_executing", "defer"), ("while_executing", "defer")],
)
def test_the_default_on_conflict_depends_on_the_span(unique: Any, on_conflict: str) -> None:
    assert made(Once(unique=unique)).on_conflict == on_conflict
    assert made(Once(unique=unique, on_conflict="raise")).on_conflict == "raise"


def test_renewal_ends_at_the_hard_time_limit_unless_told_otherwise() -> None:
    assert made(hard_limit=300.0).max_hold == 300.0
    assert made(Once(max_hold="2m"), hard_limit=300.0).max_hold == 120.0


def test_a_queued_hold_is_the_window_where_there_is_one() -> None:
    assert made(Once(unique="until_expired", window="15m")).hold == 900.0
    assert made(Once(queue_hold=7)).hold == 7.0


def test_the_efficiency_tier_keeps_what_correctness_needs_and_compares_no_fingerprint() -> None:
    task = Once(resource="account:{a}", fingerprint=("a",), atomic=False, replay_for=0)
    assert made(task).fingerprint == ()
    assert made(task).replay_for == 0.0
    assert made({"tier": "correctness", "atomic": True}, task).fingerprint == ("a",)


def test_a_policy_never_changes() -> None:
    with pytest.raises(AttributeError):
        made().lease = 1.0  # type: ignore[misc]


# --- what does not go together ------------------------------------------------------------------------------


def test_correctness_needs_replay_for_and_the_error_says_what_to_write() -> None:
    with pytest.raises(ConfigError, match=r"shop.charge: .*needs replay_for.*replay_for=0.*replay_for='30d'"):
        made(Once(tier="correctness"))
    assert made(Once(tier="correctness", replay_for=0)).replay_for == 0.0
    assert made(Once(tier="correctness", replay_for="30d")).correctness


def test_a_tier_flipped_by_settings_needs_replay_for_too() -> None:
    with pytest.raises(ConfigError, match="needs replay_for"):
        made({"tier": "correctness"}, Once(key=("a",)))


@pytest.mark.parametrize("on_duplicate", ["raise", "replace", "keep_last"])
def test_while_executing_refuses_nothing_when_enqueuing(on_duplicate: Any) -> None:
    with pytest.raises(ConfigError, match=f"while_executing.*{on_duplicate}.*would never apply"):
        made(Once(unique="while_executing", on_duplicate=on_duplicate))


def test_keep_last_brings_its_own_span() -> None:
    assert made(Once(on_duplicate="keep_last")).unique == "until_and_while_executing"
    assert made(Once(on_duplicate="keep_last", unique="until_and_while_executing")).on_conflict == "defer"


@pytest.mark.parametrize("unique", ["until_executed", "until_executing", "until_expired"])
def test_keep_last_with_another_span_is_refused(unique: Any) -> None:
    with pytest.raises(ConfigError, match=f"keep_last.*{unique}.*leave unique out"):
        made(Once(on_duplicate="keep_last", unique=unique))


@pytest.mark.parametrize("on_duplicate", ["replace", "keep_last"])
def test_in_correctness_only_a_key_that_may_run_again_keeps_the_newest(on_duplicate: Any) -> None:
    with pytest.raises(ConfigError, match=f"{on_duplicate}.*use replay_for=0"):
        made(Once(tier="correctness", replay_for="1d", on_duplicate=on_duplicate))
    assert (
        made(Once(tier="correctness", replay_for=0, on_duplicate=on_duplicate)).on_duplicate == on_duplicate
    )


def refusal(unique: str, on_duplicate: str, replay_for: Any) -> str:
    """Why a combination makes no sense; empty where it does."""
    if unique == "while_executing" and on_duplicate != "return_existing":
        return "would never apply"
    if on_duplicate == "keep_last" and unique != "until_and_while_executing":
        return "leave unique out"
    return "use replay_for=0" if replay_for and on_duplicate in ("replace", "keep_last") else ""


@pytest.mark.parametrize("replay_for", [None, 0, "1d"], ids=["efficiency", "repeats", "replays"])
@pytest.mark.parametrize("on_duplicate", STRATEGIES)
@pytest.mark.parametrize("unique", SPANS)
def test_every_span_with_every_strategy_in_every_tier(
    unique: Any, on_duplicate: Any, replay_for: Any
) -> None:
    options: dict[str, Any] = {"unique": unique, "on_duplicate": on_duplicate}
    if unique == "until_expired":
        options["window"] = 60
    if replay_for is not None:
        options |= {"tier": "correctness", "replay_for": replay_for}
    why = refusal(unique, on_duplicate, replay_for)
    if why:
        with pytest.raises(ConfigError, match=why):
            made(Once(**options))
    else:
        assert made(Once(**options)).span == span_of(unique, on_duplicate)


def test_a_kept_call_may_not_name_another_resource() -> None:
    kept = Once(tier="correctness", replay_for=0, on_duplicate="keep_last")
    assert made(kept).fingerprint == ()
    with pytest.raises(ConfigError, match="leave resource out"):
        made(Once(resource="account:{a}"), kept)


def test_until_expired_and_window_need_each_other() -> None:
    with pytest.raises(ConfigError, match="needs a window"):
        made(Once(unique="until_expired"))
    with pytest.raises(ConfigError, match="window=60 needs unique='until_expired'"):
        made(Once(window=60))


def test_a_hold_shorter_than_its_lease_is_refused_but_a_short_time_limit_is_not() -> None:
    with pytest.raises(ConfigError, match="max_hold=30 is shorter than lease=60"):
        made(Once(max_hold=30))
    assert made(hard_limit=30.0).lease == 60.0


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match=r"needs a window.*max_hold=1 .*needs replay_for"):
        made(Once(unique="until_expired", max_hold=1, tier="correctness"))
