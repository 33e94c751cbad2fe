"""``python -m benchmarks [--quick] [--json FILE]``: what guarding a task costs, as ratios within one run."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.measure import Measured, compare
from example_project.servers import POSTGRES_VARIABLE, REDIS_VARIABLE, servers

PACKAGES = ("celery", "redis", "psycopg", "celery-once")


def enqueue(rounds: int, calls: int) -> list[Measured]:
    """A call: new keys, and duplicates of a held one."""
    from benchmarks.tasks import bare, celery_once, singleton

    run = secrets.randbelow(1 << 30) << 30  # keys that no run before has used
    singleton.delay(-1)
    celery_once.delay(-1)
    return compare(
        {
            "bare task": bare.delay,
            "celery_once_fenced, new key": lambda number: singleton.delay(run + number),
            "celery-once, new key": lambda number: celery_once.delay(run + number),
            "celery_once_fenced, duplicate": lambda _: singleton.delay(-1),
            "celery-once, duplicate": lambda _: celery_once.delay(-1),
        },
        rounds=rounds,
        calls=calls,
    )


def derivation(rounds: int, calls: int) -> list[Measured]:
    """A key of five arguments, against binding them with ``inspect.Signature.bind``."""
    import inspect

    from celery_once_fenced.calls import CallPlan
    from celery_once_fenced.keys import KeyRecipe

    def task(a: int, b: str, c: float, d: bool = True, e: None = None) -> None: ...

    signature, recipe = inspect.signature(task), KeyRecipe(CallPlan.of(task, "task"), fingerprint=())
    return compare(
        {
            "inspect.Signature.bind alone": lambda number: signature.bind(number, "text", 1.5, d=False),
            "key": lambda number: recipe.derive((number, "text", 1.5), {"d": False}),
        },
        rounds=rounds,
        calls=calls * 10,
    )


def run(rounds: int, calls: int) -> list[Measured]:
    """A queue of tasks, drained by one solo worker; microseconds a task."""
    from benchmarks.tasks import bare, celery_once, fenced, singleton

    ways = {
        "bare task": bare,
        "celery_once_fenced": singleton,
        "celery-once": celery_once,
        "celery_once_fenced, fenced": fenced,
    }
    return compare(
        {name: _drain(task, calls) for name, task in ways.items()}, rounds=rounds, calls=1, size=calls
    )


def _drain(task: Any, calls: int) -> Any:
    def fill_and_drain(number: int) -> None:
        base = (number + 1) * 1_000_000 + secrets.randbelow(1 << 30) * 1_000_000_000
        for call in range(calls):
            task.apply_async((base + call,), queue="drain")
        _drained()

    return fill_and_drain


def _drained() -> None:
    import redis

    from benchmarks.tasks import REDIS

    client = redis.Redis.from_url(f"{REDIS}/4")
    while client.llen("drain") or client.hlen("unacked"):
        time.sleep(0.001)
    client.close()


@contextmanager
def _solo_worker() -> Iterator[None]:
    command = [
        sys.executable,
        "-m",
        "celery",
        "-A",
        "benchmarks.tasks",
        "worker",
        "-P",
        "solo",
        "-Q",
        "drain",
        "-l",
        "error",
    ]
    worker = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        worker.terminate()
        worker.wait()


# --- the run ----------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: under two minutes")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    options = parser.parse_args(arguments)
    with servers() as running:
        name = f"bench_{secrets.token_hex(4)}"
        os.environ |= {REDIS_VARIABLE: running.redis_url, POSTGRES_VARIABLE: running.create_database(name)}
        try:
            figures = _measure(rounds=5 if options.quick else 20, calls=200)
        finally:
            _close()
            running.drop_database(name)
    if options.json:
        options.json.write_text(json.dumps({"machine": _machine(), **figures}, indent=2))


def _measure(*, rounds: int, calls: int) -> dict[str, Any]:
    _install_schema()
    print(" · ".join(f"{name} {value}" for name, value in _machine().items()))
    figures = {"derivation": derivation(rounds, calls), "enqueue": enqueue(rounds, calls)}
    with _solo_worker():
        figures["run (calls and runs together)"] = run(rounds, calls)
    for title, measured in figures.items():
        print(f"\n{title:<46} {'median':>9} {'min':>9} {'p99':>9}   ratio  spread   (µs)")
        print("\n".join(each.row() for each in measured))
    return {title: [each.as_json() for each in measured] for title, measured in figures.items()}


def _install_schema() -> None:
    import psycopg

    from celery_once_fenced.stores.postgres_schema import schema_sql

    with psycopg.connect(os.environ[POSTGRES_VARIABLE], autocommit=True) as connection:
        connection.execute(schema_sql().encode())


def _close() -> None:
    from benchmarks.tasks import app
    from celery_once_fenced.runtime import runtime_of

    runtime_of(app).close()
    app.close()


def _machine() -> dict[str, str]:
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), "cores": str(os.cpu_count()), **versions}


if __name__ == "__main__":
    main()
