"""What a command's exit status says, and errors in one line instead of a traceback."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import wraps
from typing import Any

import click

from celery_once_fenced.errors import ConfigError, StoreUnavailableError

__all__ = ["Exit", "explained"]


class Exit(IntEnum):
    """Exit statuses of all commands."""

    DONE = 0
    """What was asked for was done."""
    NOT_DONE = 1
    """Nothing was changed, because it is not as the command supposed; the doctor found an error."""
    USAGE = 2
    """Wrong options, settings or an unknown key."""
    UNAVAILABLE = 3
    """A store does not answer."""


class Unavailable(click.ClickException):
    exit_code = Exit.UNAVAILABLE


def explained(command: Callable[..., Any]) -> Callable[..., Any]:
    """Say in one line what is wrong."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except ConfigError as error:
            raise click.UsageError(str(error)) from error
        except StoreUnavailableError as error:
            raise Unavailable(str(error)) from error

    return run
