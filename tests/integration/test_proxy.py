"""The proxy loses what it says, and nothing else: tests of lost replies stand on it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import psycopg
import pytest
import redis

from tests.fixtures.proxy import TcpProxy

MakeProxy = Callable[[str], TcpProxy]


@contextlib.contextmanager
def client_of(url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(url, socket_timeout=0.3, retry=None) as client:
        yield client


def test_proxy_forwards(redis_url: str, namespace: str, tcp_proxy: MakeProxy) -> None:
    with client_of(tcp_proxy(redis_url).url) as client:
        assert client.set(namespace, "x" * 200_000)
        assert client.strlen(namespace) == 200_000


def test_lost_reply_leaves_the_command_done(redis_url: str, namespace: str, tcp_proxy: MakeProxy) -> None:
    proxy = tcp_proxy(redis_url)
    with client_of(proxy.url) as client:
        client.ping()
        proxy.drop_reply_to(b"INCR")
        with pytest.raises(redis.ConnectionError):
            client.incr(namespace)
        assert proxy.dropped.is_set()
        assert client.get(namespace) == b"1"


def test_dropped_replies_time_out_until_resumed(redis_url: str, namespace: str, tcp_proxy: MakeProxy) -> None:
    proxy = tcp_proxy(redis_url)
    with client_of(proxy.url) as client:
        client.ping()
        proxy.drop_replies()
        with pytest.raises(redis.TimeoutError):
            client.incr(namespace)
        proxy.resume()
        assert client.get(namespace) == b"1"


def test_hanging_proxy_forwards_nothing_until_resumed(
    redis_url: str, namespace: str, tcp_proxy: MakeProxy
) -> None:
    proxy = tcp_proxy(redis_url)
    with client_of(proxy.url) as client, client_of(redis_url) as direct:
        client.ping()
        proxy.hang()
        with pytest.raises(redis.TimeoutError):
            client.incr(namespace)
        assert direct.get(namespace) is None
        proxy.resume()
        assert client.ping()


def test_cut_proxy_refuses_until_resumed(redis_url: str, tcp_proxy: MakeProxy) -> None:
    proxy = tcp_proxy(redis_url)
    with client_of(proxy.url) as client:
        client.ping()
        proxy.cut()
        for _ in range(2):
            with pytest.raises(redis.ConnectionError):
                client.ping()
        proxy.resume()
        assert client.ping()


def test_lost_reply_of_commit_leaves_it_committed(postgres_url: str, tcp_proxy: MakeProxy) -> None:
    proxy = tcp_proxy(postgres_url)
    with psycopg.connect(proxy.url) as connection:
        connection.execute("CREATE TABLE t ()")
        proxy.drop_reply_to(b"COMMIT")
        with pytest.raises(psycopg.OperationalError):
            connection.commit()
    with psycopg.connect(postgres_url) as direct:
        assert direct.execute("SELECT count(*) FROM t").fetchone() == (0,)
