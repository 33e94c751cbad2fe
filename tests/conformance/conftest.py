"""The same sentences on every lease store: the memory twin, and each server that is supported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import redis

from tests.conformance.lease_bench import Bench, memory_bench, redis_bench
from tests.fixtures.redis_servers import REDIS_KINDS, url_of


@pytest.fixture(params=["memory", *REDIS_KINDS])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    if request.param == "memory":
        yield memory_bench()
        return
    url, namespace = url_of(request.param, request), request.getfixturevalue("namespace")
    with redis.Redis.from_url(url) as client:
        made = redis_bench(client, url, namespace)
        with closing(made.store):
            yield made
        if made_here := list(client.scan_iter(match=f"*{namespace}*", count=1000)):
            client.delete(*made_here)
