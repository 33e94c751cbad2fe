"""Fence and ledger through PgBouncer in transaction mode: no session state, also not for eviction (C8)."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest

from celery_once_fenced.errors import StoreUnavailableError
from celery_once_fenced.stores.postgres import is_connection_loss
from celery_once_fenced.stores.postgres_connections import OwnConnection
from tests.fixtures.ledger import Ledger, eventually, ledger_at, operation, parked

pytestmark = pytest.mark.debian

SETTINGS = """\
[databases]
* = host={host} port={port} user={user}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {own_port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 3
"""


@pytest.fixture
def pooled(postgres_url: str, tmp_path: Path) -> Iterator[Ledger]:
    server = urlsplit(postgres_url)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = tmp_path / "pgbouncer.ini"
    user = server.username or "postgres"
    settings.write_text(
        SETTINGS.format(host=server.hostname, port=server.port or 5432, user=user, own_port=port)
    )
    for path in (tmp_path, settings):
        path.chmod(0o755)
    program = shutil.which("pgbouncer") or "/usr/sbin/pgbouncer"
    process = subprocess.Popen([program, "-u", "nobody", settings], stderr=subprocess.DEVNULL)
    try:
        url = server._replace(netloc=f"{user}@127.0.0.1:{port}").geturl()
        eventually(lambda: answers(url), within=10)
        with ledger_at(postgres_url), ledger_at(url, "select 1") as ledger:
            yield ledger
    finally:
        process.terminate()
        process.wait()


def answers(url: str) -> bool:
    try:
        psycopg.connect(url, connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True


def test_many_workers_share_few_sessions(pooled: Ledger) -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: pooled.run(pooled.hold(operation())), range(40)))
    assert pooled.execute("select count(*) from writes") == [(40,)]


def test_statements_prepared_through_the_pooler_would_be_missed(
    pooled: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OwnConnection, "_is_direct", lambda _: True)
    with (
        pytest.raises((psycopg.Error, StoreUnavailableError), match="prepared statement"),
        ThreadPoolExecutor(8) as threads,
    ):
        list(threads.map(lambda _: pooled.run(pooled.hold(operation())), range(80)))


def test_a_frozen_holder_is_evicted_through_the_pooler(pooled: Ledger) -> None:
    held = pooled.lapsed(operation())
    with parked(pooled.url, held) as zombie:
        pooled.run(pooled.hold(held.operation))
        with pytest.raises(psycopg.Error) as refused:
            zombie.commit()
    assert is_connection_loss(refused.value)
    assert len(pooled.writes(held.operation)) == 1
