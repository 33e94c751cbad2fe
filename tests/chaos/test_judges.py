"""The judges of the chaos see what is wrong: negative controls, one for each thing that must not be."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from example_project.gateway import GatewayLog, Request
from tests.chaos.judges import Evidence, Job, of_each, of_tokens

JOB = Job(1, "chaos.charge", 7, 10)


def found(**changes: Any) -> Evidence:
    """What a job that went well leaves behind."""
    gateway = changes.pop("gateway", GatewayLog([Request("a", 1, 0), Request("a", 1, 0)], {"a": 1}))
    right: dict[str, Any] = {"writes": Counter({1: 1}), "tokens": {7: [3, 4]}, "states": {1: "succeeded"}}
    return Evidence(gateway, **{**right, **changes})


def test_a_job_that_went_well_is_in_order() -> None:
    assert [*of_each([JOB], found()), *of_tokens([JOB], found())] == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"states": {}},
        {"states": {1: "retryable"}},
        {"states": {1: "in_doubt"}},
        {"writes": Counter()},
        {"writes": Counter({1: 2})},
        {"gateway": GatewayLog([], {})},
        {"gateway": GatewayLog([Request("a", 1, 0), Request("b", 1, 0)], {"a": 1})},
        {"gateway": GatewayLog([Request("a", 1, 0), Request("b", 1, 0)], {"a": 1, "b": 1})},
    ],
    ids=[
        "lost",
        "unfinished",
        "written in doubt",
        "not written",
        "twice",
        "not charged",
        "two keys",
        "charged twice",
    ],
)
def test_a_job_that_went_wrong_is_seen(wrong: dict[str, Any]) -> None:
    assert [*of_each([JOB], found(**wrong))]


@pytest.mark.parametrize("tokens", [[4, 3], [3, 3], [3, 5, 4]])
def test_a_write_under_an_older_token_than_the_last_committed_is_seen(tokens: list[int]) -> None:
    assert [*of_tokens([JOB], found(tokens={7: tokens}))]
