"""What people read instead of digests and JSON, whatever stands in the tables."""

from __future__ import annotations

from typing import Any

import pytest

from django_celery_once_fenced import readable


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("post:9#" + "ab" * 32, "post:9"),
        ("post:9#ab", "post:9#ab"),
        ("#" + "ab" * 31, "#" + "ab" * 31),
        ("account:7", "account:7"),
        (None, ""),
    ],
)
def test_a_resource_is_read_without_the_digest_of_its_key(text: str | None, expected: str) -> None:
    assert readable.resource(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"type": "shop.CardDeclined", "message": "no"}', "CardDeclined: no"),
        ('{"type": "ValueError"}', "ValueError"),
        ('{"type": "ValueError", "message": null}', "ValueError"),
        ('{"type": 7}', '{"type": 7}'),
        ("no JSON", "no JSON"),
        ("[" * 100_000, "[" * 100_000),
        (None, ""),
    ],
)
def test_an_error_is_its_class_and_its_message(text: str | None, expected: str) -> None:
    assert readable.error(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [('"f\\u00fcr"', '"für"'), ("90", "90"), ("null", "null"), ("", ""), (None, "")]
)
def test_a_value_is_json_with_its_characters(text: str | None, expected: str) -> None:
    assert readable.value(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"state": "succeeded", "reason": "in the books"}', "succeeded: in the books"),
        ('{"state": "in_doubt", "reason": "x"}', "in doubt: x"),
        ('{"state": "odd", "reason": 7}', "odd: 7"),
        (
            '{"effect": "gateway", "state": "failed", "result": null, "error": "{\\"type\\": \\"a.Declined\\"}"}',
            "gateway: failed, Declined",
        ),
        ('{"effect": "gateway", "state": "done"}', "gateway: done"),
        ("stuck since noon", "stuck since noon"),
        ('{"reason": "mine"}', '{"reason": "mine"}'),
        (None, ""),
    ],
)
def test_the_detail_of_an_event_is_a_sentence(text: str | None, expected: str) -> None:
    assert readable.detail(text) == expected


@pytest.mark.parametrize("text", ["7", "[]", '"x"', "nul", "{}", "\x00"])
def test_anything_is_read_as_it_is(text: Any) -> None:
    assert {readable.error(text), readable.detail(text)} == {text}
