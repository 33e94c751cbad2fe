"""The group that the commands belong to, and what all of them have."""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable
from typing import Any

import click

from celery_once_fenced import runtime
from celery_once_fenced.cli.exits import explained

__all__ = ["REASON", "command", "decided", "once", "registered"]

REASON = "Why; kept with the event."
_JSON = click.option("--json", "as_json", is_flag=True, help="For programs.")


@click.group(
    name="once",
    help="See, explain and free what jobs hold (celery-once-fenced).",
    epilog="Exit status: 0 done, 1 not done, 2 wrong usage or unknown key, 3 a store does not answer.",
)
@click.pass_context
@explained
def once(context: click.Context) -> None:
    app = getattr(context.obj, "app", None)
    if app is not None:  # the one that `celery -A` names, not whichever was made last
        app.set_current()
        if context.invoked_subcommand != "doctor":  # it has its own way of telling what is wrong
            # As a worker does: tasks are registered, and in a Django project Django is set up, which brings the database.
            app.loader.import_default_modules()


def command(*, json: bool = True) -> Callable[[Callable[..., Any]], click.Command]:
    """Add a command to the group.  ``json``: it has ``--json``, given as ``as_json``."""

    def add(function: Callable[..., Any]) -> click.Command:
        with_options = _JSON(explained(function)) if json else explained(function)
        return once.command(name=function.__name__.rstrip("_"))(with_options)

    return add


def decided(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--actor`` to a command that decides something, given as ``actor``: who, and that it was done here."""
    option = click.option(
        "--actor",
        default="",
        help="Who decides; kept with the event.  Default: the user of the operating system.",
        callback=lambda _context, _option, name: f"{name.strip() or _user()} (command line)",
    )
    return option(function)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, ImportError, OSError):  # a container may run under a number that has no name
        return f"user {os.getuid()}" if hasattr(os, "getuid") else "unknown user"


def registered() -> runtime.Runtime:
    """The runtime of the app that was named, or of the project's, with all its tasks registered."""
    here = runtime.current()
    here.app.loader.import_default_modules()
    return here
