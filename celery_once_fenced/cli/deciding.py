"""What a person decides of a recorded key: resolve, forget."""

from __future__ import annotations

import json
from typing import Any

import click

from celery_once_fenced import operate
from celery_once_fenced.cli.exits import Exit
from celery_once_fenced.cli.group import REASON, command, decided
from celery_once_fenced.cli.output import print_json
from celery_once_fenced.errors import ConfigError

__all__: list[str] = []


@command()
@click.argument("key")
@click.argument("outcome", type=click.Choice(["succeeded", "failed", "again"]))
@click.option("--result", help="JSON that later calls get, where succeeded; default: null.")
@click.option("--reason", required=True, help=REASON)
@decided
@click.pass_context
def resolve(
    context: click.Context, key: str, outcome: Any, result: str | None, reason: str, actor: str, as_json: bool
) -> None:
    """Decide KEY, which is in doubt: it succeeded, it failed, or the body runs again."""
    if result is not None and outcome != "succeeded":
        raise click.UsageError(
            f"--result is what later calls get where a key succeeded, not where it is resolved as {outcome}"
        )
    done = operate.resolve(key, outcome, result=_parsed(result), reason=reason, actor=actor)
    if as_json:
        print_json({"key": key, "outcome": outcome, "resolved": done})
    else:
        click.echo(f"{key} is resolved: {outcome}" if done else f"{key} is not in doubt")
    context.exit(Exit.DONE if done else Exit.NOT_DONE)


@command()
@click.argument("key")
@click.option("--reason", required=True, help=REASON)
@decided
@click.pass_context
def forget(context: click.Context, key: str, reason: str, actor: str, as_json: bool) -> None:
    """Let KEY, which has finished or waits for a retry, run again from the start."""
    done = operate.forget(key, reason=reason, actor=actor)
    if as_json:
        print_json({"key": key, "forgotten": done})
    elif done:
        click.echo(f"{key} may run again")
    else:
        click.echo(f"{key} has nothing to forget: it is running, in doubt, or not recorded")
    context.exit(Exit.DONE if done else Exit.NOT_DONE)


def _parsed(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--result is not JSON: {error}") from error
