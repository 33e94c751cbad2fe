"""``python -m benchmarks``: what guarding a task costs, as ratios within one run.

python -m benchmarks                      all measures, about a quarter of an hour
python -m benchmarks --quick              fewer rounds and smaller tables, under two minutes
python -m benchmarks enqueue-new key      these alone
python -m benchmarks --json F --plot F    figures and plot into files (.svg, .png)
python -m benchmarks --docs               figures and plot into docs/reference/performance.*
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measures import ALL
from benchmarks.report import MARKS, markdown, plot, terminal
from benchmarks.stage import database, install_schema
from example_project.servers import (
    POSTGRES_VARIABLE,
    REDIS_VARIABLE,
    start_postgres,
    start_redis,
)

PACKAGES = (
    "celery",
    "kombu",
    "redis",
    "hiredis",
    "psycopg",
    "celery-once",
    "celery-singleton",
    "celery-heimdall",
)
PAGE = Path(__file__).parents[1] / "docs" / "reference" / "performance.md"
POSTGRES = {"shared_buffers": "128MB"}  # PostgreSQL's own default


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measures", nargs="*", choices=[[], *ALL], metavar="measure", help=", ".join(ALL))
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller tables")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--plot", type=Path, help="draw the ratios into this file (.svg or .png)")
    parser.add_argument("--docs", action="store_true", help=f"put figures and plot into {PAGE.name}")
    options = parser.parse_args(arguments)
    with _servers():
        run = _measure(options.measures or list(ALL), quick=options.quick)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(run, indent=2, ensure_ascii=False) + "\n")
    if options.plot:
        plot(run, options.plot)
    if options.docs:
        _document(run)


def _measure(names: Sequence[str], *, quick: bool) -> dict[str, Any]:
    machine = _machine()
    print(" · ".join(f"{name} {value}" for name, value in machine.items()), flush=True)
    measures = []
    for name in names:
        for parser in ALL[name].parsers:
            measures.append(_in_a_child(name, parser, "quick" if quick else "full"))
            print(terminal(measures[-1]), flush=True)
    missed = sum(not goal["met"] for figures in measures for goal in figures["goals"])
    print(f"\n{sum(len(figures['goals']) for figures in measures)} goals, {missed} missed")
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"date": date, "quick": quick, "machine": machine, "measures": measures}


def _in_a_child(name: str, parser: str, effort: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.child", name, effort]
    done = subprocess.run(
        command, env=os.environ | {"BENCH_PARSER": parser}, check=True, stdout=subprocess.PIPE, text=True
    )
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


@contextlib.contextmanager
def _servers() -> Iterator[None]:
    """Those that the environment names, else our own; a new database for the tasks in any case."""
    with contextlib.ExitStack() as stack:
        if not os.environ.get(REDIS_VARIABLE):
            os.environ[REDIS_VARIABLE] = stack.enter_context(start_redis()).url
        if not os.environ.get(POSTGRES_VARIABLE):
            os.environ[POSTGRES_VARIABLE] = stack.enter_context(start_postgres(POSTGRES)).url
        url = stack.enter_context(database("tasks"))
        install_schema(url)
        os.environ[POSTGRES_VARIABLE] = url
        yield


def _document(run: dict[str, Any]) -> None:
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    PAGE.write_text(f"{before}{MARKS[0]}\n\n{markdown(run)}\n\n{MARKS[1]}{after}")
    plot(run, PAGE.with_suffix(".svg"))


def _machine() -> dict[str, str]:
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "Python": platform.python_version(),
        **versions,
        **_server_versions(),
    }


def _processor() -> str:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith("model name")).partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _server_versions() -> dict[str, str]:
    import psycopg
    import redis

    with redis.Redis.from_url(os.environ[REDIS_VARIABLE]) as client:
        info = client.info("server")
    with psycopg.connect(os.environ[POSTGRES_VARIABLE]) as connection:
        postgres = connection.info.server_version // 10_000
    name = "Valkey" if "valkey_version" in info else "Redis"
    return {name: info.get("valkey_version", info["redis_version"]), "PostgreSQL": str(postgres)}


if __name__ == "__main__":
    main()
