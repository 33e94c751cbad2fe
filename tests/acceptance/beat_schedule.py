"""Run in a process of its own: migrate, and write a schedule into the database; arguments: seconds, then names of tasks."""

from __future__ import annotations

import json
import sys

import django
from django.core.management import call_command


def main(seconds: str, *tasks: str) -> None:
    django.setup()
    from django_celery_beat.models import IntervalSchedule, PeriodicTask

    call_command("migrate", verbosity=0, interactive=False)
    every = IntervalSchedule.objects.create(every=int(seconds), period=IntervalSchedule.SECONDS)
    for task in tasks:
        arguments = json.dumps(["database", 0, 0, ""])
        PeriodicTask.objects.create(
            name=f"every {seconds} s: {task}", task=task, interval=every, args=arguments
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
