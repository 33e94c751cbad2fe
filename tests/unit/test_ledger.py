"""What is recorded of an outcome, and what a worker makes of the ledger's answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from celery_once_fenced.errors import RecordedError
from celery_once_fenced.ledger import (
    LARGEST_RESULT,
    Aftermath,
    Encoded,
    ResultOmitted,
    aftermath,
    decode_error,
    encode_error,
    recorded_value,
)

CODEC = (json.dumps, json.loads)


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, 0, "", [], {}, False, "é\0\ud800", {"a": [1.5, None]}])
def test_recorded_result_comes_back_as_it_was(value: object) -> None:
    encoded = Encoded.of(value, CODEC)
    assert encoded.text is not None
    assert encoded.text.isascii()
    assert recorded_value(encoded.text, encoded.omitted, CODEC) == value


def raising(_: object) -> str:
    raise RuntimeError("a __json__ of somebody's own")


@pytest.mark.parametrize(
    ("value", "codec"),
    [(object(), CODEC), (1, (raising, json.loads)), ("é", (str, json.loads))],
)
def test_result_that_cannot_be_text_is_omitted_not_an_error(value: object, codec: Any) -> None:
    encoded = Encoded.of(value, codec)
    assert (encoded.text, encoded.omitted) == (None, "not_serialisable")
    assert ResultOmitted.matches(encoded.value)


def test_result_that_is_too_large_is_omitted() -> None:
    largest = "x" * (LARGEST_RESULT - 2)
    assert Encoded.of(largest, CODEC).omitted is None
    assert Encoded.of(largest + "x", CODEC).omitted == "too_large"


def test_first_run_and_replay_return_the_same_marker() -> None:
    first = Encoded.of(object(), CODEC)
    assert first.value == recorded_value(first.text, first.omitted, CODEC)


def test_result_that_was_never_added_is_said_to_be_missing() -> None:
    marker = recorded_value(None, None, CODEC)
    assert isinstance(marker, ResultOmitted)
    assert marker.reason == "not_recorded"


def test_marker_is_known_after_a_result_backend_had_it() -> None:
    assert ResultOmitted.matches(json.loads(json.dumps(ResultOmitted("too_large"))))
    assert not ResultOmitted.matches({"reason": "too_large"})
    assert not ResultOmitted.matches(None)


# --- errors -----------------------------------------------------------------------------------------------------------


class CardDeclinedError(Exception):
    pass


class TwoArgumentsError(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)


class WordlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def raised_again(error: Exception, *known: type[Exception]) -> BaseException:
    return decode_error(encode_error(error), key="k", known=known)


def test_final_error_comes_back_as_its_class() -> None:
    again = raised_again(CardDeclinedError("no funds"), CardDeclinedError)
    assert (type(again), again.args) == (CardDeclinedError, ("no funds",))


def test_error_whose_class_is_not_known_is_told_in_words() -> None:
    again = raised_again(CardDeclinedError("no funds"), ValueError)
    assert isinstance(again, RecordedError)
    assert str(again) == f"k ended with {__name__}.CardDeclinedError: no funds"


def test_error_that_cannot_be_made_from_its_message_is_told_in_words() -> None:
    again = raised_again(TwoArgumentsError(7, "no funds"), TwoArgumentsError)
    assert isinstance(again, RecordedError)
    assert "no funds" in str(again)


def test_error_without_words_is_recorded_all_the_same() -> None:
    assert "WordlessError" in str(raised_again(WordlessError()))


def test_long_message_is_cut() -> None:
    assert len(encode_error(ValueError("x" * 10_000))) < 2100


def test_recorded_error_is_ascii_whatever_it_says() -> None:
    assert encode_error(ValueError("é\0\ud800")).isascii()


@pytest.mark.parametrize("text", [None, "", "{", "[]", "1", "{}", '{"type": "x"}'])
def test_record_that_cannot_be_read_is_an_error_of_its_own(text: str | None) -> None:
    assert "cannot be read" in str(decode_error(text, key="k", known=[ValueError]))


def test_nothing_is_imported_by_a_name_from_the_database() -> None:
    text = json.dumps({"type": "os.system", "message": "true"})
    assert isinstance(decode_error(text, key="k", known=[]), RecordedError)


# --- after an error ---------------------------------------------------------------------------------------------------


def decided(state: str, **facts: bool) -> Aftermath:
    known = {"ours": True, "fence_ours": True, "same_task": True, "connection_lost": False}
    return aftermath(state=state, **{**known, **facts})


def test_commit_that_happened_is_a_success_whatever_the_error() -> None:
    assert decided("succeeded", connection_lost=True, fence_ours=False) is Aftermath.SUCCEEDED


def test_plain_error_is_the_outcome() -> None:
    assert decided("retryable") is decided("failed") is decided("in_doubt") is Aftermath.RAISE


def test_lost_connection_is_no_outcome() -> None:
    assert decided("retryable", connection_lost=True) is Aftermath.AGAIN


def test_resource_taken_by_another_key_is_no_outcome() -> None:
    assert decided("retryable", fence_ours=False) is Aftermath.AGAIN


def test_result_of_the_own_twin_is_left_alone() -> None:
    assert decided("taken_over", ours=False) is Aftermath.LEAVE
    assert decided("succeeded", ours=False) is Aftermath.LEAVE


def test_other_calls_success_is_the_answer() -> None:
    assert decided("succeeded", ours=False, same_task=False) is Aftermath.REPLAY


def test_other_call_that_is_still_at_it_is_waited_for() -> None:
    assert decided("taken_over", ours=False, same_task=False) is Aftermath.DEFER
