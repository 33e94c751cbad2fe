"""Bodies whose process or session is killed: the work is done once, by a takeover or a new attempt (CASES 3, 47)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from example_project.servers import Servers
from tests.acceptance.correctness_site import Posting, ShopSite, ends_with_one_effect


@pytest.fixture(scope="module")
def site(servers: Servers, shop: str) -> Iterator[ShopSite]:
    site = ShopSite.on(servers.redis_url, shop)
    with site.worker(concurrency=4):
        yield site
    site.close()


@pytest.fixture(scope="module")
def postings(site: ShopSite) -> Mapping[str, Posting]:
    """All that take a while, begun at once."""
    return {
        "begun": site.posting("post", at={"begun": "die"}),
        "written": site.posting("post", at={"written": "die"}),
        "completed": site.posting("post", at={"completed": "die"}),
        "disconnect": site.posting("post", "disconnect, post", "post"),
    }


@pytest.mark.parametrize("name", ["begun", "written", "completed", "disconnect"])
def test_work_is_done_once(postings: Mapping[str, Posting], name: str) -> None:
    ends_with_one_effect(postings[name])
