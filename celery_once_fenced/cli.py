"""``celery -A proj once …`` and, through the Django app, ``manage.py once_fenced …``.

Exit status: 0 done, 1 nothing was released because the holder is another by now, or the doctor found an error, 2 wrong usage or unknown key, 3 a
store does not answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from functools import wraps
from typing import Any

import click

from celery_once_fenced import operate, runtime
from celery_once_fenced.durations import parse_duration
from celery_once_fenced.errors import ConfigError, StoreUnavailableError
from celery_once_fenced.outcome import moment_of
from celery_once_fenced.stores import HeldFence, Hold

__all__ = ["once"]

ACTOR = "command line"
COLUMNS = ("key", "task", "slot", "task_id", "worker", "token", "since", "left", "holder")


class Unavailable(click.ClickException):
    exit_code = 3


def _explained(command: Callable[..., Any]) -> Callable[..., Any]:
    """Say in one line what is wrong, instead of a traceback."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except ConfigError as error:
            raise click.UsageError(str(error)) from error
        except StoreUnavailableError as error:
            raise Unavailable(str(error)) from error

    return run


@click.group(name="once", help="See, explain and free what jobs hold (celery-once-fenced).")
@click.pass_context
def once(context: click.Context) -> None:
    app = getattr(context.obj, "app", None)
    if app is not None:  # the one that `celery -A` names, not whichever was made last
        app.set_current()
        # As a worker does: tasks are registered, and in a Django project Django is set up, which brings the database.
        app.loader.import_default_modules()


@once.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, for programs.")
@_explained
def leases(as_json: bool) -> None:
    """List what is held now: queued (q), running (r) and fences."""
    rows = list(_rows())
    if as_json:
        for row in rows:
            click.echo(json.dumps(row))
        return
    click.echo(_table(COLUMNS, [[_cell(row[column]) for column in COLUMNS] for row in rows]))


@once.command()
@click.argument("key")
@click.option("--json", "as_json", is_flag=True, help="As one JSON object, for programs.")
@_explained
def explain(key: str, as_json: bool) -> None:
    """Say who holds KEY (readable, or its digest), why, and until when."""
    explanation = operate.explain(key)
    if not as_json:
        click.echo(str(explanation))
        return
    rows = [*map(_hold_row, explanation.holds), *map(_fence_row, explanation.fences)]
    entry = explanation.entry and {name: _plain(value) for name, value in explanation.entry.items()}
    click.echo(
        json.dumps({"key": explanation.key, "digest": explanation.digest, "held": rows, "entry": entry})
    )


@once.command()
@click.argument("key")
@click.option("--holder", help="Free only what this holder has; default: ask for each.")
@click.option("--reason", default="", help="Why; kept with the event.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_context
@_explained
def release(context: click.Context, key: str, holder: str | None, reason: str, yes: bool) -> None:
    """Free KEY by hand.  Its task goes on running, but can free or commit nothing of its successor's."""
    explanation = operate.explain(key)
    click.echo(str(explanation))
    holders = [holder] if holder else list(dict.fromkeys(_holders(explanation)))
    freed = [
        _release(key, one, reason) for one in holders if yes or click.confirm(f"Free what holder {one} has?")
    ]
    if not any(freed):
        click.echo("nothing was freed")
        context.exit(1)


@once.command()
@click.argument("key")
@click.argument("outcome", type=click.Choice(["succeeded", "failed", "again"]))
@click.option("--result", help="JSON that later calls get, where succeeded; default: null.")
@click.option("--reason", required=True, help="Why; kept with the event.")
@click.pass_context
@_explained
def resolve(context: click.Context, key: str, outcome: Any, result: str | None, reason: str) -> None:
    """Decide KEY, which is in doubt: it succeeded, it failed, or the body runs again."""
    value = _json(result)
    if not operate.resolve(key, outcome, result=value, reason=reason, actor=ACTOR):
        click.echo(f"{key} is not in doubt")
        context.exit(1)
    click.echo(f"{key} is resolved: {outcome}")


@once.command()
@click.argument("key")
@click.option("--reason", required=True, help="Why; kept with the event.")
@click.pass_context
@_explained
def forget(context: click.Context, key: str, reason: str) -> None:
    """Let KEY, which has finished or waits for a retry, run again from the start."""
    if not operate.forget(key, reason=reason, actor=ACTOR):
        click.echo(f"{key} has nothing to forget: it is running, in doubt, or not recorded")
        context.exit(1)
    click.echo(f"{key} may run again")


@once.command()
@click.option(
    "--grace", default="1d", show_default=True, help="Keep fences that were free for less than this."
)
@click.option("--batch", default=1000, show_default=True, help="Rows deleted in one transaction.")
@_explained
def prune(grace: str, batch: int) -> None:
    """Delete what has served its time: fences long free, entries past their retention, messages published."""
    here = runtime.current()
    if here.ledger is None:
        raise ConfigError("there is no ledger: name a database in the setting once_fenced")
    here.sweep()
    fences = entries = messages = 0
    while pruned := here.ledger.prune(parse_duration(grace, option="--grace"), batch):
        fences, entries, messages = (
            fences + pruned.fences,
            entries + pruned.entries,
            messages + pruned.messages,
        )
        click.echo(f"\r{fences} fences, {entries} entries, {messages} messages", nl=False, err=True)
    click.echo(f"{fences} fences, {entries} entries and {messages} messages deleted")


@once.command()
@_explained
def doctor() -> None:
    """Say what is wrong with the set-up; exit status 1 where a promise is broken."""
    from celery_once_fenced.doctor import examine

    findings = list(examine(runtime.current().app))
    for finding in findings:
        click.echo(f"{finding.level}: {finding.text}")
    if not findings:
        click.echo("nothing is wrong")
    if any(finding.level == "error" for finding in findings):
        raise SystemExit(1)


@once.command()
@_explained
def sql() -> None:
    """Print the schema of the correctness tier, for psql, where there is no Django to migrate it."""
    from celery_once_fenced.stores.postgres_schema import schema_sql

    click.echo(schema_sql())


def _json(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--result is not JSON: {error}") from error


def _release(key: str, holder: str, reason: str) -> bool:
    freed = operate.release(key, holder, reason=reason, actor=ACTOR)
    click.echo(f"{'freed' if freed else 'no longer held by'} {holder}")
    return freed


def _holders(explanation: operate.Explanation) -> Iterator[str]:
    yield from (hold.holder for hold in explanation.holds)
    yield from (fence.holder for fence in explanation.fences)


# --- rows -------------------------------------------------------------------------------------------------------------


def _rows() -> Iterator[dict[str, Any]]:
    here = runtime.current()
    yield from map(_hold_row, here.leases.holds())
    if here.ledger is None:
        return
    try:
        yield from map(_fence_row, here.ledger.fences())
    except StoreUnavailableError as error:  # what Redis knows is worth showing all the same
        click.echo(f"fences are not known: {error}", err=True)


def _hold_row(hold: Hold) -> dict[str, Any]:
    return {
        "key": hold.text or hold.digest,
        "digest": hold.digest,
        "task": hold.task,
        "slot": hold.slot,
        "task_id": hold.task_id,
        "worker": hold.worker,
        "token": None,
        "since": _moment(hold.since),
        "left": round(hold.left, 1),
        "holder": hold.holder,
    }


def _fence_row(fence: HeldFence) -> dict[str, Any]:
    return {
        "key": fence.resource,
        "digest": fence.digest.hex() if fence.digest else None,
        "task": fence.task,
        "slot": "fence",
        "task_id": fence.task_id,
        "worker": fence.worker,
        "token": fence.token,
        "since": _moment(fence.since),
        "left": round(fence.left, 1),
        "holder": fence.holder,
    }


def _moment(seconds: float) -> str | None:
    moment = moment_of(seconds)
    return None if moment is None else moment.isoformat(timespec="seconds")


def _plain(value: Any) -> Any:
    if isinstance(value, bytes | memoryview):
        return bytes(value).hex()
    return value.isoformat() if isinstance(value, datetime) else value


def _cell(value: object) -> str:
    return "" if value is None else str(value)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [list(titles), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
