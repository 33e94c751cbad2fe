"""Many fences in one process, one of them busy (C8)."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from django.utils import timezone

from example_project.servers import Servers
from tests.acceptance.correctness_posting import Posting, ends_with_one_effect
from tests.acceptance.correctness_site import ShopSite
from tests.acceptance.workers import eventually


@pytest.fixture(scope="module")
def site(servers: Servers, shop: str) -> Iterator[ShopSite]:
    site = ShopSite.on(servers.redis_url, shop)
    with site.worker(pool="threads", concurrency=4):
        yield site
    site.close()


def lease_is_renewed_beside_a_busy_one(shop: str, busy: Posting, other: Posting) -> None:
    """Somebody locks the fence row of ``busy`` for longer than a lease."""
    with psycopg.connect(shop) as connection:
        connection.execute("select from once_fenced_fence where resource = %s for update", (busy.fence.pk,))
        eventually(lambda: has_lapsed(busy))
        lapsed = has_lapsed(other)
    assert not lapsed, "the other lease was over too"
    for posting in (busy, other):
        ends_with_one_effect(posting.release())


def has_lapsed(posting: Posting) -> bool:
    return posting.fence.expires_at < timezone.now()


def test_lease_is_renewed_beside_a_busy_one(site: ShopSite, shop: str) -> None:
    busy, other = [site.posting("post", "hold, post").has_run(1) for _ in range(2)]
    lease_is_renewed_beside_a_busy_one(shop, busy, other)
    assert (busy.runs, other.runs) == (1, 1)


def test_a_lease_that_is_not_renewed_is_caught(site: ShopSite, shop: str) -> None:
    busy, other = [site.posting(name, "hold, post").has_run(1) for name in ("post", "unrenewed")]
    with pytest.raises(AssertionError, match="was over too"):
        lease_is_renewed_beside_a_busy_one(shop, busy, other)
    busy.release()
    other.release()
