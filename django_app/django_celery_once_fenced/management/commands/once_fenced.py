from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandParser


class Command(BaseCommand):
    """``manage.py once_fenced leases | explain KEY | release KEY …``: the same as ``celery -A proj once …``."""

    help = "Look at and release locks: the sub-commands of `celery -A proj once`."
    requires_system_checks = ()  # It is wanted most when something is wrong.

    def run_from_argv(self, argv: list[str]) -> None:
        """Hand everything after the command's name to Celery's command group, which has its own ``--help``."""
        self._once(argv[2:], prog_name=f"{argv[0]} {argv[1]}")

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("args", nargs="*")

    def handle(self, *args: str, **_options: Any) -> None:
        """For ``call_command("once_fenced", "leases")``."""
        self._once(list(args), standalone_mode=False)

    def _once(self, args: list[str], **extra: Any) -> None:
        from celery_once_fenced.cli import once

        once.main(args=args, **extra)
