"""Who holds what: leases, explain, release."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import click

from celery_once_fenced import operate, runtime
from celery_once_fenced.cli.exits import Exit
from celery_once_fenced.cli.group import REASON, command, decided
from celery_once_fenced.cli.output import Duration, note, print_json, print_table
from celery_once_fenced.errors import StoreUnavailableError
from celery_once_fenced.outcome import moment_of
from celery_once_fenced.stores import Decision, HeldFence, Hold, Surroundings, Waiters

__all__: list[str] = []

WHY = f"{REASON}  Without a database that is a line in the log."
COLUMNS = ("key", "task", "slot", "task_id", "worker", "token", "since", "left", "holder")


@command()
def leases(as_json: bool) -> None:
    """List what is held now: queued (q), running (r) and fences."""
    if as_json:
        print_json(*_rows())
    elif rows := list(_rows()):
        print_table(COLUMNS, rows)
    else:
        click.echo("nothing is held")


@command()
@click.argument("key")
def explain(key: str, as_json: bool) -> None:
    """Say who holds KEY (readable, or its digest), why, and until when."""
    explanation = operate.explain(key)
    if not as_json:
        click.echo(str(explanation))
        return
    print_json(
        {
            "key": explanation.key,
            "digest": explanation.digest,
            "text": str(explanation),
            "held": [*map(_hold_row, explanation.holds), *map(_fence_row, explanation.fences)],
            "around": _around_row(explanation.around),
            "blocked_by": _blocker_row(explanation.blocker),
            "waiters": {name: _waiters_row(found) for name, found in explanation.waiters.items()},
            "entry": explanation.entry,
            "decisions": [_decision_row(decision) for decision in explanation.decisions],
        }
    )


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
    """Free KEY by hand.  Its task goes on running, but can free or commit nothing of its successor's."""
    if as_json and not yes:
        raise click.UsageError("--json asks nothing: give --yes as well")
    explanation = operate.explain(key)
    if not as_json:
        click.echo(str(explanation))
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
    context.exit(Exit.DONE if freed else Exit.NOT_DONE)


def _holders(explanation: operate.Explanation) -> Iterator[str]:
    yield from (hold.holder for hold in explanation.holds)
    yield from (fence.holder for fence in explanation.fences)


# --- rows -------------------------------------------------------------------------------------------------------------


def _rows() -> Iterator[dict[str, Any]]:
    here = runtime.current()
    yield from map(_hold_row, here.readings.holds())
    if here.ledger is None:
        return
    try:
        yield from map(_fence_row, here.ledger.fences())
    except StoreUnavailableError as error:  # what Redis knows is worth showing all the same
        note(f"fences are not known: {error}")


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
        "left": Duration(round(hold.left, 1)),
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
        "left": Duration(round(fence.left, 1)),
        "holder": fence.holder,
    }


def _blocker_row(fence: HeldFence | None) -> dict[str, Any] | None:
    return None if fence is None else {**_fence_row(fence), "key": fence.key, "resource": fence.resource}


def _waiters_row(waiters: Waiters) -> dict[str, Any]:
    return {"number": waiters.number, "since": _moment(waiters.since)}


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
