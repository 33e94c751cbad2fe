"""One of the processes of the rush: waits for a line on its standard input, calls ``refresh_feed`` for one feed, prints what it got."""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

import django

from example_project.celery_app import app


def main(feed_id: int, calls: int) -> None:
    django.setup()
    app.finalize()
    from example_project.shop.tasks import refresh_feed

    print("ready", flush=True)
    if not sys.stdin.readline():  # whoever was to say "go" is gone
        return
    threading.Thread(target=_end_with_the_demo, daemon=True).start()
    results: list[Any] = [refresh_feed.delay(feed_id) for _ in range(calls)]
    statuses = [result.outcome.status for result in results]
    print(json.dumps({"statuses": statuses, "values": [result.get(timeout=30) for result in results]}))


def _end_with_the_demo() -> None:
    """The pipe closes with the process at its other end, however that ends."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
