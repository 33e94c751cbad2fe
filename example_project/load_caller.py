"""One of the processes of the load: waits for the start, calls a task once for each order, prints what it got."""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import django

from example_project.load_worker import app

PACE = 0.04
"""Seconds between two calls: the last ones come when the first orders are paid."""


def main(name: str, number: int, first: int, count: int, *, start: Path) -> None:
    django.setup()
    app.loader.import_default_modules()
    from example_project.shop.models import Order

    task = app.tasks[name]
    calls = list(Order.objects.filter(pk__gte=first)[:count].values_list("pk", "account_id", "amount"))
    random.Random(number).shuffle(calls)
    print("ready", flush=True)
    while not start.exists():
        time.sleep(0.01)
    statuses: Counter[str] = Counter()
    for call in calls:
        statuses[_status(task.delay(*call))] += 1
        time.sleep(PACE)
    print(json.dumps(statuses))


def _status(result: Any) -> str:
    """What became of a call; without a guard each is enqueued."""
    return str(result.outcome.status) if hasattr(result, "outcome") else "enqueued"


if __name__ == "__main__":
    task_name, *numbers, start_file = sys.argv[1:]
    main(task_name, *map(int, numbers), start=Path(start_file))
