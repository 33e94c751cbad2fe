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

MISSING = "{} is not installed: run `make bench`, or pip install -r requirements/bench.txt"

try:
    from benchmarks import processors
    from benchmarks.measures import ALL
    from benchmarks.report import MARKS, markdown, plot, terminal
    from benchmarks.stage import database, empty_redis, install_schema
    from example_project.servers import (
        POSTGRES_VARIABLE,
        REDIS_VARIABLE,
        Server,
        start_postgres,
        start_redis,
    )
except ModuleNotFoundError as missing:
    sys.exit(MISSING.format(missing.name))

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
SUFFIXES = (".svg", ".png")
SERVERS = 2
POSTGRES = {"shared_buffers": "128MB"}  # PostgreSQL's own default


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measures", nargs="*", metavar="measure", help=", ".join(ALL))
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller tables")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--plot", type=Path, help="draw the ratios into this file (.svg or .png)")
    parser.add_argument("--docs", action="store_true", help=f"put figures and plot into {PAGE.name}")
    options = parser.parse_args(arguments)
    _refuse(parser, options)
    with _servers() as ours:
        run = _measure(options.measures or list(ALL), ours, quick=options.quick)
    if options.json:
        options.json.write_text(json.dumps(run, indent=2, ensure_ascii=False) + "\n")
    if options.plot:
        plot(run, options.plot)
    if options.docs:
        _document(run)


def _refuse(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Before anything is measured: what would come to nothing after a quarter of an hour."""
    if unknown := [name for name in options.measures if name not in ALL]:
        parser.error(f"no measure is called {', '.join(unknown)}; there are {', '.join(ALL)}")
    if options.docs and (options.measures or options.quick):
        parser.error("--docs replaces all figures of the page: without names of measures, without --quick")
    if options.plot and options.plot.suffix not in SUFFIXES:
        parser.error(f"--plot draws {' or '.join(SUFFIXES)}, not {options.plot.name}")
    for name in (*PACKAGES, "matplotlib"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)
            continue
        parser.exit(1, MISSING.format(name) + "\n")
    for path in filter(None, (options.json, options.plot)):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError as error:
            parser.error(f"{path} cannot be written: {error.strerror}")


def _measure(names: Sequence[str], ours: Sequence[Server], *, quick: bool) -> dict[str, Any]:
    machine = _machine()
    print(" · ".join(f"{name} {value}" for name, value in machine.items()), flush=True)
    measures = []
    for name in names:
        for parser in ALL[name].parsers:
            _part(ours, pinned=ALL[name].pinned)
            measures.append(_in_a_child(name, parser, "quick" if quick else "full"))
            print(terminal(measures[-1]), flush=True)
    missed = sum(not goal["met"] for figures in measures for goal in figures["goals"])
    print(f"\n{sum(len(figures['goals']) for figures in measures)} goals, {missed} missed")
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"date": date, "commit": _commit(), "quick": quick, "machine": machine, "measures": measures}


def _part(ours: Sequence[Server], *, pinned: bool) -> None:
    """Caller and servers for the next measure: each a processor of their own, or all for all."""
    os.environ.pop(processors.VARIABLE, None)
    if pinned and processors.are_many() and len(ours) == SERVERS:
        os.environ[processors.VARIABLE] = "1"
    for server in ours:
        processors.server(server.pid) if pinned else processors.everywhere(server.pid)


def _commit() -> str | None:
    """What was measured, where it is a clone; with a ``+`` if it was changed since."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return _git("rev-parse", "HEAD") + ("+" if _git("status", "--porcelain") else "")
    return None


def _git(*command: str) -> str:
    return subprocess.run(
        ["git", *command], cwd=PAGE.parent, check=True, capture_output=True, text=True
    ).stdout.strip()


def _in_a_child(name: str, parser: str, effort: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.child", name, effort]
    done = subprocess.run(
        command, env=os.environ | {"BENCH_PARSER": parser}, check=False, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(f"{name} failed; why is said above")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


@contextlib.contextmanager
def _servers() -> Iterator[list[Server]]:
    """Those that the environment names, else our own, which are given; a new database for the tasks in any case."""
    ours: list[Server] = []
    with contextlib.ExitStack() as stack:
        if not os.environ.get(REDIS_VARIABLE):
            ours.append(stack.enter_context(start_redis()))
            os.environ[REDIS_VARIABLE] = ours[-1].url
        else:
            empty_redis()
            stack.callback(empty_redis)
        if not os.environ.get(POSTGRES_VARIABLE):
            ours.append(stack.enter_context(start_postgres(POSTGRES)))
            os.environ[POSTGRES_VARIABLE] = ours[-1].url
        url = stack.enter_context(database("tasks"))
        install_schema(url)
        os.environ[POSTGRES_VARIABLE] = url
        yield ours


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
