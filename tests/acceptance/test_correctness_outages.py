"""Redis or PostgreSQL is lost in the middle: the posting is made once, and nothing is pending."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass

import pytest
import redis
from django.core.management import call_command
from django.db import connection

from example_project.servers import PostgresServer, RedisServer, Servers, start_postgres, start_redis
from tests.acceptance.correctness_posting import Posting, ends_with_one_effect
from tests.acceptance.correctness_site import ShopSite
from tests.acceptance.workers import eventually
from tests.fixtures.django_project import database_at
from tests.fixtures.proxy import TcpProxy


@dataclass(frozen=True)
class Place:
    """A site whose locks and whose database are on servers of its own; workers reach the database by a proxy."""

    site: ShopSite
    locks: RedisServer
    postgres: PostgresServer
    proxy: TcpProxy

    def stop_postgres(self) -> None:
        connection.close()
        self.postgres.stop()


@pytest.fixture(scope="module")
def place(servers: Servers) -> Iterator[Place]:
    with ExitStack() as stack:
        postgres, locks = stack.enter_context(start_postgres()), stack.enter_context(start_redis())
        stack.enter_context(database_at(postgres.url))
        call_command("migrate", verbosity=0, interactive=False)
        proxy = stack.enter_context(closing(TcpProxy(postgres.url)))
        site = ShopSite.on(servers.redis_url, proxy.url, lock_url=locks.url)
        stack.enter_context(closing(site))
        stack.enter_context(site.worker(concurrency=5))
        yield Place(site, locks, postgres, proxy)


# --- the commit -------------------------------------------------------------------------------------------------------


def commit_whose_reply_is_lost_is_a_success(place: Place, variant: str = "good") -> Posting:
    posting = place.site.posting(variant=variant, at={"completed": "hold"})
    posting.stopped("completed")
    place.proxy.drop_reply_to(b"COMMIT")
    posting.go_on("completed")
    assert place.proxy.dropped.wait(10)
    ends_with_one_effect(posting)
    return posting


def test_commit_whose_reply_is_lost_is_a_success(place: Place) -> None:
    posting = commit_whose_reply_is_lost_is_a_success(place)
    assert posting.runs == len(posting.events("commit.confirmed")) == 1


def test_taking_a_lost_reply_for_a_failure_is_caught(place: Place) -> None:
    with pytest.raises(AssertionError, match="ended FAILURE"):
        commit_whose_reply_is_lost_is_a_success(place, "trusts_the_error")


def test_commit_that_did_not_arrive_is_done_again(place: Place) -> None:
    posting = place.site.posting(at={"completed": "hold"})
    posting.stopped("completed")
    place.proxy.cut()
    posting.go_on("completed")
    posting.has_told("execution.deferred")
    place.proxy.resume()
    ends_with_one_effect(posting)
    assert posting.runs == 2


def test_commit_whose_reply_is_lost_is_found_when_the_ledger_can_be_asked_again(place: Place) -> None:
    posting = place.site.posting(at={"completed": "hold"})
    posting.stopped("completed")
    place.proxy.drop_replies()
    posting.go_on("completed")
    eventually(lambda: posting.ledger.state == "succeeded")
    place.proxy.cut()
    posting.has_told("execution.deferred")
    place.proxy.resume()
    ends_with_one_effect(posting)
    assert posting.runs == len(posting.events("ledger.replayed")) == 1


# --- the database -----------------------------------------------------------------------------------------------------


def postgres_away_at_claim_only_delays(posting: Posting) -> None:
    ends_with_one_effect(posting)
    assert posting.runs == 1


def test_postgres_away_at_claim_only_delays(place: Place) -> None:
    good, naive = [place.site.prepared(variant=variant) for variant in ("good", "fails_without_postgres")]
    place.stop_postgres()
    good.call()
    naive.call()
    good.has_told("execution.deferred")
    eventually(naive.result.ready)
    place.postgres.start()
    postgres_away_at_claim_only_delays(good)
    with pytest.raises(AssertionError, match="ended FAILURE"):
        postgres_away_at_claim_only_delays(naive)


def test_posting_survives_a_restart_of_postgres_in_its_body(place: Place) -> None:
    posting = place.site.posting("post", "post, hold").has_run(1)
    place.stop_postgres()
    place.postgres.start()
    posting.release()
    ends_with_one_effect(posting)
    assert posting.runs == 2


# --- Redis ------------------------------------------------------------------------------------------------------------


def flushed_locks_let_nothing_in_twice(place: Place, variant: str = "good") -> None:
    posting = place.site.posting("post", "hold, post", variant=variant).has_run(1)
    with redis.Redis.from_url(place.locks.url) as locks:
        locks.flushall()
    second = posting.again()
    eventually(lambda: posting.deliveries == 2)
    posting.release()
    second.get(timeout=15)
    ends_with_one_effect(posting)


def test_flushed_locks_let_nothing_in_twice(place: Place) -> None:
    flushed_locks_let_nothing_in_twice(place)


def test_a_flushed_plain_lock_is_caught(place: Place) -> None:
    with pytest.raises(AssertionError, match="posted 2 times"):
        flushed_locks_let_nothing_in_twice(place, "plain_lock")


@pytest.fixture
def without_redis(place: Place) -> Iterator[Place]:
    place.locks.stop()
    yield place
    place.locks.start()


def calls_without_redis_post_once(place: Place, variant: str = "good") -> None:
    posting = place.site.posting("post", "hold, post", variant=variant)
    assert posting.result.outcome.status == "unguarded"
    second = posting.has_run(1).again()
    eventually(lambda: posting.deliveries >= 2)
    posting.release()
    answer = second.get(timeout=15)
    ends_with_one_effect(posting)
    assert answer == 90


def test_calls_without_redis_post_once(without_redis: Place) -> None:
    calls_without_redis_post_once(without_redis)


def test_calls_that_only_redis_guards_are_caught(without_redis: Place) -> None:
    with pytest.raises(AssertionError, match="posted 2 times"):
        calls_without_redis_post_once(without_redis, "efficiency")


def test_redis_may_stop_and_come_back_in_the_middle_of_a_body(place: Place) -> None:
    posting = place.site.posting("post", "post, hold").has_run(1)
    place.locks.restart()
    posting.release()
    ends_with_one_effect(posting)
    assert posting.again().get(timeout=15) == posting.runs * 90 == 90
