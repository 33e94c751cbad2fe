"""What was counted and measured: stats, audit, metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict
from typing import Any

import click

from celery_once_fenced import figures as readings
from celery_once_fenced import runtime
from celery_once_fenced.audit import Audited, audit
from celery_once_fenced.cli.exits import Exit
from celery_once_fenced.cli.group import command, registered
from celery_once_fenced.cli.output import NOT_COUNTED, Duration, note, print_json, print_table
from celery_once_fenced.errors import ConfigError, StoreUnavailableError
from celery_once_fenced.figures import Figures, TaskFigures
from celery_once_fenced.stores.counters import COUNTERS
from celery_once_fenced.stores.observations import GuardedTable

__all__: list[str] = []

NOW = ("task", "queued", "running", "oldest", "overdue", "in_doubt")
TIMES = ("p50", "p99", "longest")
BODIES = ("begun", "runs")
"""Bodies: begun, and ended."""
ALWAYS = frozenset({"suppressed"})
"""Counters that are shown even where all are zero."""
RENAMED = {"in_doubt": "ended_in_doubt"}
"""A counter beside what is there now."""
AUDIT = ("task", "tier", "breaks", "enforced", "lease", *TIMES, "expired", "lost")


@command()
@click.pass_context
def stats(context: click.Context, as_json: bool) -> None:
    """Count what is held and what happened, per task; name holds that last too long."""
    figures, known = _read(), readings.policies(runtime.current().app)
    tasks = [(task, readings.uncounted(task.counters, known.get(task.task))) for task in figures.tasks()]
    if as_json:
        print_json(*(_numbers(task, missing) for task, missing in tasks))
    else:
        _print_stats(figures, [_row(task, missing) for task, missing in tasks])
    context.exit(_status(figures))


def _status(figures: Figures) -> Exit:
    """The rest was shown."""
    return Exit.UNAVAILABLE if figures.silent else Exit.DONE


def _print_stats(figures: Figures, rows: Sequence[Mapping[str, Any]]) -> None:
    seen = [name for name in _counter_names() if name in ALWAYS or any(row[name] for row in rows)]
    print_table((*NOW, "begun", *seen, *TIMES), rows)
    for late in figures.overdue:
        click.echo(f"overdue: {late}")


def _read() -> Figures:
    figures = readings.read(runtime.current())
    if "redis" in figures.silent:
        raise figures.silent["redis"]
    if "postgres" in figures.silent:
        note(f"what is in doubt is not known: {figures.silent['postgres']}")
    return figures


def _numbers(task: TaskFigures, missing: Set[str]) -> dict[str, Any]:
    counters = {name: task.counters.get(name, 0) for name in COUNTERS}
    numbers = {name: getattr(task, name) for name in (*NOW, *TIMES, *BODIES)}
    return {**numbers, **dict.fromkeys(missing), "counters": counters}


def _row(task: TaskFigures, missing: Set[str]) -> dict[str, Any]:
    counted = {RENAMED.get(name, name): task.counters.get(name, 0) for name in COUNTERS}
    now = {name: getattr(task, name) for name in (*NOW, "begun")}
    times = {name: _duration(getattr(task, name)) for name in TIMES}
    unknown = dict.fromkeys(missing, NOT_COUNTED)
    return {**counted, **now, **times, "oldest": _duration(task.oldest), **unknown}


def _counter_names() -> list[str]:
    return [RENAMED.get(name, name) for name in COUNTERS]


@command()
@click.pass_context
def audit_(context: click.Context, as_json: bool) -> None:
    """Say of each task what a second run breaks, what prevents one, and whether its lease fits."""
    here = registered()
    figures = _read()
    rows = audit(readings.subjects(here.app, figures), _guarded_tables(here))
    if as_json:
        print_json(*map(asdict, rows))
    else:
        _print_audit(rows)
    context.exit(_status(figures))


def _print_audit(rows: Sequence[Audited]) -> None:
    print_table(AUDIT, map(_audit_row, rows))
    for text, tasks in _by_advice(rows).items():
        click.echo(f"{', '.join(tasks)}: {text}")


def _by_advice(rows: Sequence[Audited]) -> dict[str, list[str]]:
    """What several tasks need is said once."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for advice in row.advice:
            found.setdefault(advice.text, []).append(row.task)
    return found


def _guarded_tables(here: runtime.Runtime) -> Sequence[GuardedTable]:
    try:
        return here.ledger.facts().tables if here.ledger is not None else ()
    except StoreUnavailableError as error:
        note(f"fenced tables are not known: {error}")
        return ()


def _audit_row(row: Audited) -> dict[str, Any]:
    seconds = {name: _duration(getattr(row, name)) for name in ("lease", *TIMES)}
    return {name: getattr(row, name) for name in AUDIT} | seconds


def _duration(seconds: float | None) -> Duration | None:
    return None if seconds is None else Duration(seconds)


@command(json=False)
def metrics() -> None:
    """Print all metrics as Prometheus reads them; needs the extra `prometheus`."""
    try:
        from celery_once_fenced.observers.prometheus import exposition
    except ImportError as error:
        raise ConfigError(
            'prometheus-client is not installed: pip install "celery-once-fenced[prometheus]"'
        ) from error
    registered()
    text, _ = exposition(runtime.current)
    click.echo(text, nl=False)
