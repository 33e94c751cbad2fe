"""``celery -A proj once …`` and, through the Django app, ``manage.py once_fenced …``: one group of commands.

Each command is for people, with tables and sentences, and with ``--json`` for programs: one object, or one a line where
there may be many.  What goes to standard error is for people alone.  Exit statuses are in ``exits``.
"""

from __future__ import annotations

from celery_once_fenced.cli import deciding, holding, measuring, upkeep  # noqa: F401  # each adds its commands to the group
from celery_once_fenced.cli.exits import Exit
from celery_once_fenced.cli.group import once

__all__ = ["Exit", "once"]
