"""Tables for people, JSON for programs."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import click

from celery_once_fenced.wording import lasting, shorten

__all__ = ["LAPSED", "NOT_COUNTED", "Duration", "note", "print_json", "print_table"]

NARROWEST = 12
"""Characters that a column keeps, however narrow the terminal is."""
GAP = "  "
NOT_COUNTED = "\N{EN DASH}"
LAPSED = "lapsed"
NO_NUMBERS = frozenset({None, NOT_COUNTED, LAPSED})
"""What may stand in a column of numbers."""


class Duration(float):
    """Seconds, which people read as words and programs as a number."""


def print_json(*values: Mapping[str, Any]) -> None:
    """Each object in a line of its own."""
    if values:
        click.echo("\n".join(json.dumps(value, default=_plain) for value in values))


def print_table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Titles and rows; numbers stand right.  In a terminal, long texts are shortened so that it does not break lines."""
    listed = list(rows)
    lines = [list(columns), *([_cell(row[column]) for column in columns] for row in listed)]
    right = [_is_numeric(row[column] for row in listed) for column in columns]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    if sys.stdout.isatty():
        widths = _fitted(widths, shutil.get_terminal_size().columns, right)
        lines = [list(map(shorten, line, widths)) for line in lines]
    shape = GAP.join(f"{{:{'>' if r else '<'}{width}}}" for width, r in zip(widths, right, strict=True))
    click.echo("\n".join(shape.format(*line).rstrip() for line in lines))


def note(text: str) -> None:
    """A remark that is no part of the answer."""
    click.echo(text, err=True)


def _cell(value: object) -> str:
    if type(value) is str:
        return value
    if value is None:
        return ""
    return lasting(value) if isinstance(value, Duration) else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes | memoryview):
        return bytes(value).hex()
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _is_numeric(values: Iterable[object]) -> bool:
    found = [value for value in values if value not in NO_NUMBERS]
    return bool(found) and all(isinstance(value, int | float) for value in found)


def _fitted(widths: list[int], room: int, fixed: Sequence[bool]) -> list[int]:
    """The widest texts give way until all fit, or none can."""
    fitted = list(widths)
    spare = room - len(GAP) * (len(fitted) - 1)
    while sum(fitted) > spare:
        width, widest = max((width, i) for i, width in enumerate(fitted) if not fixed[i])
        if width <= NARROWEST:
            break
        fitted[widest] -= 1
    return fitted
