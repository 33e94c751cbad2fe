"""The servers of the conformance suite are the versions that it claims."""

from __future__ import annotations

from contextlib import closing

import pytest

from celery_once_fenced.stores.redis import RedisLeaseStore
from tests.fixtures.redis_servers import HAS_REDIS_6, url_of

VERSIONS = [
    *([("redis6", "redis 6.2.")] if HAS_REDIS_6 else []),
    pytest.param("redis7", "redis 7.", marks=pytest.mark.debian),
]


@pytest.mark.parametrize(("kind", "version"), VERSIONS)
def test_server_is_the_version_it_is_named_for(
    request: pytest.FixtureRequest, kind: str, version: str
) -> None:
    with closing(RedisLeaseStore(url_of(kind, request), namespace="version", socket_timeout=20)) as store:
        assert str(store.server_version()).startswith(version)
