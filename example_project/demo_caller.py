"""One of the processes of the rush: waits for the start, calls ``refresh_feed`` for one feed, prints what it got."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import django

from example_project.celery_app import app


def main(feed_id: int, calls: int, start: Path) -> None:
    django.setup()
    app.finalize()
    from example_project.shop.tasks import refresh_feed

    print("ready", flush=True)
    while not start.exists():
        time.sleep(0.01)
    results: list[Any] = [refresh_feed.delay(feed_id) for _ in range(calls)]
    statuses = [result.outcome.status for result in results]
    print(json.dumps({"statuses": statuses, "values": [result.get(timeout=30) for result in results]}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
