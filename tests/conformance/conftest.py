"""The same sentences on both lease stores: the memory twin, and a real server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import redis

from example_project.servers import Servers
from tests.conformance.lease_bench import Bench, memory_bench, redis_bench


@pytest.fixture(params=["memory", "redis"])
def bench(request: pytest.FixtureRequest, servers: Servers, namespace: str) -> Iterator[Bench]:
    if request.param == "memory":
        yield memory_bench()
        return
    with redis.Redis.from_url(servers.redis_url) as client:
        made = redis_bench(client, servers.redis_url, namespace)
        with closing(made.store):
            yield made
