"""What a body holds, and how it finds it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass

import pytest

from celery_once_fenced.errors import FencedOffError, GrantError, LeaseLostError
from celery_once_fenced.grant import Grant, current_grant, granted


@dataclass
class Belief:
    lost: bool = False
    remaining: float = 42.0


def test_detached_grant_is_never_lost() -> None:
    detached = Grant("shop.post:1")
    detached.check()
    assert (detached.lost, detached.token, detached.attempt) == (False, None, 1)
    assert detached.remaining() == float("inf")
    assert detached.headers() == {}


def test_grant_believes_what_its_lease_says() -> None:
    belief = Belief()
    grant = Grant("k", belief=belief)
    assert (grant.lost, grant.remaining()) == (False, 42.0)
    belief.lost = True
    assert grant.lost


def test_check_of_a_lost_lease_names_the_key() -> None:
    with pytest.raises(LeaseLostError, match="on shop"):
        Grant("shop.post:1", belief=Belief(lost=True)).check()


def test_check_of_a_superseded_fence_names_token_and_resource() -> None:
    with pytest.raises(FencedOffError, match="token 7 for account:1"):
        Grant("k", resource="account:1", token=7, belief=Belief(lost=True)).check()


def test_token_goes_into_the_headers_of_a_service_that_checks_it() -> None:
    assert Grant("k", token=7).headers() == {"Fencing-Token": "7"}


def test_no_grant_outside_a_guarded_task() -> None:
    with pytest.raises(GrantError, match="no guarded task"):
        current_grant()


def test_inner_grant_is_current_until_it_ends() -> None:
    outer, inner = Grant("outer"), Grant("inner")
    with granted(outer):
        with granted(inner):
            assert current_grant() is inner
        assert current_grant() is outer


def test_grant_is_gone_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), granted(Grant("k")):
        raise ZeroDivisionError
    with pytest.raises(GrantError):
        current_grant()


def test_threads_that_share_a_task_do_not_share_a_grant() -> None:
    met = threading.Barrier(2, timeout=5)

    def body(key: str) -> str:
        with granted(Grant(key)):
            met.wait()
            return current_grant().key

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(body, ["a", "b"])) == ["a", "b"]


def in_thread(call: Callable[[], object]) -> object:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def test_thread_of_a_body_has_no_grant_unless_the_context_is_handed_on() -> None:
    with granted(Grant("k")):
        assert in_thread(lambda: copy_context().run(list)) == []
        with pytest.raises(GrantError):
            in_thread(current_grant)
        context = copy_context()
        assert in_thread(lambda: context.run(current_grant)) is current_grant()
