"""What keeps it well: prune, doctor, sql."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import click

from celery_once_fenced import runtime
from celery_once_fenced.cli.exits import Exit
from celery_once_fenced.cli.group import command
from celery_once_fenced.cli.output import print_json
from celery_once_fenced.doctor import UNANSWERED, Finding, examine_all
from celery_once_fenced.durations import parse_duration
from celery_once_fenced.errors import ConfigError
from celery_once_fenced.stores import LedgerStore, Pruned
from celery_once_fenced.stores.postgres_schema import schema_sql
from celery_once_fenced.wording import counted

__all__: list[str] = []

KINDS = ("fences", "entries", "messages")


@command()
@click.option(
    "--grace", default="1d", show_default=True, help="Keep fences that were free for less than this."
)
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="Rows deleted in one transaction.",
)
def prune(grace: str, batch: int, as_json: bool) -> None:
    """Delete what has served its time: fences long free, entries past their retention, messages published."""
    here = runtime.current()
    if here.ledger is None:
        raise ConfigError("there is no ledger: name a database in the setting once_fenced")
    here.sweep()
    deleted = dict.fromkeys(KINDS, 0)
    for pruned in _pruned(
        here.ledger, parse_duration(float(grace) if grace.isdecimal() else grace, option="--grace"), batch
    ):
        for kind in KINDS:
            deleted[kind] += getattr(pruned, kind)
    if as_json:
        print_json(deleted)
    else:
        click.echo(
            f"{counted(deleted['fences'], 'fence')}, {counted(deleted['entries'], 'entry', 'entries')} and "
            f"{counted(deleted['messages'], 'message')} deleted"
        )


def _pruned(ledger: LedgerStore, grace: float, batch: int) -> Iterator[Pruned]:
    """Batch after batch, with a bar on standard error where that is a terminal."""
    with click.progressbar(length=ledger.due(grace), label="pruning", file=sys.stderr, show_pos=True) as bar:
        while pruned := ledger.prune(grace, batch):
            bar.update(sum(getattr(pruned, kind) for kind in KINDS))
            yield pruned


@command()
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Say what is wrong with the set-up, and what to do about it."""
    findings = list(examine_all(runtime.current_app()))
    for finding in findings:
        if as_json:
            print_json(
                {"id": finding.id, "level": finding.level, "text": finding.text, "remedy": finding.remedy}
            )
        else:
            click.echo(f"{finding.id} {finding.level}: {finding.text}\n     remedy: {finding.remedy}")
    if not findings and not as_json:
        click.echo("nothing is wrong")
    context.exit(_status(findings))


def _status(findings: Sequence[Finding]) -> Exit:
    errors = {finding.id for finding in findings if finding.level == "error"}
    if errors and errors <= UNANSWERED:
        return Exit.UNAVAILABLE
    return Exit.NOT_DONE if errors else Exit.DONE


@command()
def sql(as_json: bool) -> None:
    """Print the schema of the correctness tier, for psql, where there is no Django to migrate it."""
    if as_json:
        print_json({"sql": schema_sql()})
    else:
        click.echo(schema_sql())
