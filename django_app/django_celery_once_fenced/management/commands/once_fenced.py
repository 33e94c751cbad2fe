from __future__ import annotations

from argparse import REMAINDER
from typing import Any

from click import ClickException
from django.core.management.base import BaseCommand, CommandError, CommandParser


class Command(BaseCommand):
    """``manage.py once_fenced leases | explain KEY | release KEY …``: the same as ``celery -A proj once …``."""

    help = "Look at and release locks: the sub-commands of `celery -A proj once`."
    requires_system_checks = ()  # It is wanted most when something is wrong.

    def run_from_argv(self, argv: list[str]) -> None:
        """Hand everything after the command's name to Celery's command group, which has its own ``--help``."""
        self._once(argv[2:], prog_name=f"{argv[0]} {argv[1]}")

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("args", nargs=REMAINDER)

    def handle(self, *args: str, **_options: Any) -> None:
        """For ``call_command("once_fenced", "leases", "--json")``.

        Raises ``CommandError``, with the exit status as ``returncode``, unless that is 0.
        """
        try:
            status = self._once(list(args), standalone_mode=False)
        except ClickException as error:
            raise CommandError(error.format_message(), returncode=error.exit_code) from error
        if status:
            raise CommandError(f"once {' '.join(args)} was not done", returncode=int(status))

    def _once(self, args: list[str], **extra: Any) -> Any:
        from celery_once_fenced.cli import once

        return once.main(args=args, **extra)
