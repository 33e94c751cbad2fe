"""Where the measures run: the servers, databases for one measure, workers."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import LiteralString
from urllib.parse import urlsplit

import psycopg
import redis
from psycopg import sql

from celery_once_fenced.stores.postgres_schema import schema_sql
from example_project.servers import POSTGRES_VARIABLE, REDIS_VARIABLE

__all__ = ["NUMBERS", "database", "empty_redis", "install_schema", "redis_url", "workers"]

NUMBERS = (4, 5, 6, 7)
"""Of Redis's databases: broker, results, locks, notes."""


def redis_url(number: int) -> str:
    """A database of the Redis server."""
    return urlsplit(os.environ[REDIS_VARIABLE])._replace(path=f"/{number}").geturl()


def empty_redis() -> None:
    """The databases that the measures use, and no other."""
    for number in NUMBERS:
        with redis.Redis.from_url(redis_url(number)) as client:
            client.flushdb()


def postgres_url() -> str:
    return os.environ[POSTGRES_VARIABLE]


@contextmanager
def database(name: str) -> Iterator[str]:
    """An empty database for one measure; its URL."""
    name, server = f"bench_{name}_{secrets.token_hex(4)}", postgres_url()
    _execute(server, "CREATE DATABASE {} TEMPLATE template0", name)
    try:
        yield urlsplit(server)._replace(path=f"/{name}").geturl()
    finally:
        _execute(server, "DROP DATABASE IF EXISTS {} WITH (FORCE)", name)


def install_schema(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(schema_sql().encode())


@contextmanager
def workers(*options: str, count: int = 1) -> Iterator[None]:
    """Celery workers of ``benchmarks.tasks``; their broker is emptied of nothing."""
    command = [sys.executable, "-m", "benchmarks.worker", "worker", "--loglevel", "error", *options]
    running = [
        subprocess.Popen(
            [*command, "--hostname", f"bench{n}@%h"],
            stdout=subprocess.DEVNULL,
            stderr=None if os.environ.get("BENCH_VERBOSE") else subprocess.DEVNULL,
        )
        for n in range(count)
    ]
    try:
        yield
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


def _execute(server: str, statement: LiteralString, name: str) -> None:
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(sql.SQL(statement).format(sql.Identifier(name)))
