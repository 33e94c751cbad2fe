"""The processes of the load that call: they wait for the start, then each calls a task once for each order.

Prints "ready", and then what all of them got: how many calls had which outcome.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import django

from example_project.load_worker import app

PACE = 0.04
"""Seconds between two calls: the last ones come when the first orders are paid."""

Call = tuple[int, int, int]


def main(name: str, callers: int, first: int, count: int, *, start: Path) -> None:
    django.setup()
    app.loader.import_default_modules()
    calls = _calls(first, count)
    with get_context("fork").Pool(callers) as pool:
        print("ready", flush=True)
        answers = pool.map(partial(_call_all, name, calls, start), range(callers), chunksize=1)
    print(json.dumps(sum(answers, Counter())))


def _calls(first: int, count: int) -> list[Call]:
    """The arguments of each call.  Leaves no connection that the processes would share."""
    from django.db import connections

    from example_project.shop.models import Order

    calls = list(Order.objects.filter(pk__gte=first)[:count].values_list("pk", "account_id", "amount"))
    connections.close_all()
    return calls


def _call_all(name: str, calls: Sequence[Call], start: Path, number: int) -> Counter[str]:
    """One process: each has an order of its own."""
    task, statuses = app.tasks[name], Counter[str]()
    while not start.exists():
        time.sleep(0.01)
    for call in random.Random(number).sample(calls, len(calls)):
        statuses[_status(task.delay(*call))] += 1
        time.sleep(PACE)
    return statuses


def _status(result: Any) -> str:
    """What became of a call; without a guard each is enqueued."""
    return str(result.outcome.status) if hasattr(result, "outcome") else "enqueued"


if __name__ == "__main__":
    task_name, *numbers, start_file = sys.argv[1:]
    main(task_name, *map(int, numbers), start=Path(start_file))
