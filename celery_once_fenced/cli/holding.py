"""Who holds what: leases, explain, release."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import click

from celery_once_fenced import operate, runtime
from celery_once_fenced.cli.exits import Exit
from celery_once_fenced.cli.group import REASON, command, decided
from celery_once_fenced.cli.output import LAPSED, Duration, note, print_json, print_table
from celery_once_fenced.errors import ConfigError, StoreUnavailableError
from celery_once_fenced.lookup import SHORTENED
from celery_once_fenced.outcome import moment_of
from celery_once_fenced.stores import Decision, HeldFence, Hold, RecordedEffect, Surroundings, Waiters

__all__: list[str] = []

WHY = f"{REASON}  Without a database that is a line in the log."
COLUMNS = ("key", "task", "slot", "task_id", "worker", "token", "since", "left", "holder")


@command()
@click.pass_context
def leases(context: click.Context, as_json: bool) -> None:
    """List what is held now: queued (q), running (r) and fences."""
    rows, away = _rows()
    if as_json:
        print_json(*rows)
    elif rows:
        print_table(COLUMNS, map(_shown, rows))
    elif away is None:
        click.echo("nothing is held")
    if away is not None:
        note(f"{'' if rows else 'no lease is held; '}fences are not known: {away}")
    context.exit(Exit.DONE if away is None else Exit.UNAVAILABLE)


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "left": LAPSED if row["left"] is None else row["left"]}


@command()
@click.argument("key")
@click.pass_context
def explain(context: click.Context, key: str, as_json: bool) -> None:
    """Say who holds KEY (readable, or its digest), why, and until when."""
    explanation = operate.explain(key)
    if as_json:
        print_json(_explained(explanation))
    else:
        click.echo(str(explanation))
    context.exit(Exit.UNAVAILABLE if explanation.unknown else Exit.DONE)


def _explained(explanation: operate.Explanation) -> dict[str, Any]:
    return {
        "key": explanation.key,
        "digest": explanation.digest,
        "text": str(explanation),
        "held": [*map(_hold_row, explanation.holds), *map(_fence_row, explanation.fences)],
        "around": _around_row(explanation.around),
        "blocked_by": _blocker_row(explanation.blocker),
        "waiters": {name: _waiters_row(found) for name, found in explanation.waiters.items()},
        "entry": explanation.entry,
        "effects": [_effect_row(effect) for effect in explanation.effects],
        "decisions": [_decision_row(decision) for decision in explanation.decisions],
    }


@command()
@click.argument("key")
@click.option("--holder", help="Free only what this holder has; default: ask for each.")
@click.option("--reason", default="", help=WHY)
@decided
@click.option("--yes", is_flag=True, help="Do not ask; needed with --json.")
@click.pass_context
def release(
    context: click.Context, key: str, holder: str | None, reason: str, actor: str, yes: bool, as_json: bool
) -> None:
    """Free KEY by hand.  Its task goes on running, but can free or commit nothing of its successor's.

    Where an external step of it is under way, the key may end in doubt; that is said before it is asked.
    """
    if as_json and not yes:
        raise click.UsageError("--json asks nothing: give --yes as well")
    explanation = operate.explain(key)
    if not explanation.known and not explanation.unknown:
        raise ConfigError(str(explanation))
    if not as_json:
        click.echo(str(explanation))
        if explanation.warning:
            click.echo(explanation.warning)
    freed: list[str] = []
    kept: list[str] = []
    for one in [holder] if holder else list(dict.fromkeys(_holders(explanation))):
        if yes or click.confirm(f"Free what holder {one} has?"):
            done = operate.release(key, one, reason=reason, actor=actor)
            (freed if done else kept).append(one)
            if not as_json:
                click.echo(f"{'freed' if done else 'no longer held by'} {one}")
    if as_json:
        print_json({"key": explanation.key, "freed": freed, "no_longer_held_by": kept})
    elif not freed:
        click.echo("nothing was freed")
    context.exit(Exit.DONE if freed else Exit.UNAVAILABLE if explanation.unknown else Exit.NOT_DONE)


def _holders(explanation: operate.Explanation) -> Iterator[str]:
    yield from (hold.holder for hold in explanation.holds)
    yield from (fence.holder for fence in explanation.fences)


# --- rows -------------------------------------------------------------------------------------------------------------


def _rows() -> tuple[list[dict[str, Any]], StoreUnavailableError | None]:
    """What Redis knows is worth showing where the fences are not known: then also why."""
    here = runtime.current()
    rows = list(map(_hold_row, here.readings.holds()))
    if here.ledger is None:
        return rows, None
    try:
        return [*rows, *map(_fence_row, here.ledger.fences())], None
    except StoreUnavailableError as error:
        return rows, error


def _hold_row(hold: Hold) -> dict[str, Any]:
    return {
        "key": _key(hold),
        "digest": hold.digest,
        "task": hold.task,
        "slot": hold.slot,
        "task_id": hold.task_id,
        "worker": hold.worker,
        "token": None,
        "since": _moment(hold.since),
        "left": Duration(round(hold.left, 1)),
        "holder": hold.holder,
    }


def _key(hold: Hold) -> str:
    """A slot keeps the beginning of a long key, which ``explain`` understands."""
    return f"{hold.text}…" if len(hold.text) >= SHORTENED else hold.text or hold.digest


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
        "left": Duration(round(fence.left, 1)) if fence.left > 0 else None,
        "holder": fence.holder,
    }


def _blocker_row(fence: HeldFence | None) -> dict[str, Any] | None:
    return None if fence is None else {**_fence_row(fence), "key": fence.key, "resource": fence.resource}


def _waiters_row(waiters: Waiters) -> dict[str, Any]:
    return {"number": waiters.number, "since": _moment(waiters.since)}


def _effect_row(effect: RecordedEffect) -> dict[str, Any]:
    return {"name": effect.name, "state": effect.state, "since": _moment(effect.since)}


def _decision_row(decision: Decision) -> dict[str, Any]:
    return {**asdict(decision), "at": _moment(decision.at)}


def _around_row(around: Surroundings) -> dict[str, Any]:
    return {
        "waiting": around.waiting,
        "waiting_since": _moment(around.waiting_since),
        "refused": around.refused,
        "refused_since": _moment(around.refused_since),
        "kept_at": _moment(around.kept_at),
        "newest_task": around.newest_task,
        "newest_at": _moment(around.newest_at),
        "unconfirmed": around.unconfirmed,
        "displaced_task": around.displaced_task,
        "resource": around.resource,
    }


def _moment(seconds: float | None) -> str | None:
    moment = None if seconds is None else moment_of(seconds)
    return None if moment is None else moment.isoformat(timespec="seconds")
