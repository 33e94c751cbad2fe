"""The message header: what a call tells its worker, and what a worker believes of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from celery_once_fenced.header import Header
from celery_once_fenced.keys import Key

DIGEST = "ab" * 32
FULL = Header(
    key=Key(DIGEST, "shop.post:1"),
    fingerprint="cd" * 32,
    delivery="d2",
    run="d1",
    awaited=True,
    deferrals=3,
    republished=2,
    answer_from="t1",
)


def test_header_survives_the_message() -> None:
    assert Header.parse(json.loads(json.dumps(FULL.dump()))) == FULL


def test_first_delivery_is_its_own_run() -> None:
    first = Header(delivery="d1", run="d1")
    assert first.dump() == {"id": "d1"}
    assert Header.parse(first.dump()) == first


def test_what_is_empty_is_not_sent() -> None:
    assert Header().dump() == {}
    assert Header(bypass=True).dump() == {"bypass": True}


def test_no_argument_travels_but_in_the_readable_key() -> None:
    assert set(FULL.dump()) == {"key", "text", "fp", "id", "run", "awaited", "n", "again", "from"}


@pytest.mark.parametrize("raw", [None, "text", 7, [], [["key", DIGEST]]])
def test_what_is_no_object_is_no_header(raw: object) -> None:
    assert Header.parse(raw) is None


@pytest.mark.parametrize(
    "digest", [None, 7, "", "ab", DIGEST.upper(), DIGEST + "0", DIGEST + "\n", "zz" * 32, [DIGEST]]
)
def test_key_that_is_no_digest_counts_as_missing(digest: Any) -> None:
    parsed = Header.parse({"key": digest, "fp": digest, "id": "d1"})
    assert parsed is not None
    assert (parsed.key, parsed.fingerprint, parsed.delivery) == (None, None, "d1")


@pytest.mark.parametrize("count", [None, -1, 1.5, "3", True, [3]])
def test_count_that_is_none_is_zero(count: Any) -> None:
    parsed = Header.parse({"n": count, "again": count})
    assert parsed is not None
    assert (parsed.deferrals, parsed.republished) == (0, 0)


@pytest.mark.parametrize("flag", [None, 1, "true", [True]])
def test_only_true_is_true(flag: Any) -> None:
    parsed = Header.parse({"awaited": flag, "bypass": flag})
    assert parsed is not None
    assert (parsed.awaited, parsed.bypass) == (False, False)


def test_readable_key_is_cut_at_its_limit() -> None:
    parsed = Header.parse({"key": DIGEST, "text": "x" * 1000})
    assert parsed is not None
    assert parsed.key == Key(DIGEST, "x" * 255)
