"""``python -m benchmarks.admin_pages``: how long the admin's pages take with 100,000 holds and 1,000,000 dedup records.

Starts the demo's servers, fills them, and asks for each page through Django's test client: middleware, views, stores
and templates, without a browser.  Prints the shortest, the median and the longest of a few requests, and how long this
process itself worked for one; exits 1 where the shortest is over the limit, for that is what is left on a busy machine.  ``ONCE_FENCED_REDIS_URL`` and ``ONCE_FENCED_POSTGRES_URL`` name servers of one's own.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import os
import random
import re
import secrets
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from example_project.servers import POSTGRES_VARIABLE, REDIS_VARIABLE, servers

LIMIT = 0.3
"""Seconds."""
TASKS = ("shop.refresh_feed", "shop.index_product", "shop.send_digest", "shop.charge", "shop.post_entry")
HELD_FENCES = 500

_ENTRIES = """
insert into once_fenced_ledger (key_digest, key, scope, task_name, task_id, run_id, fingerprint, state, attempt, takeovers,
                                holder, resource, token, result, created_at, started_at, finished_at, replay_until,
                                retain_until)
select sha256(n::text::bytea), 'charge:' || n, (%(tasks)s::text[])[1 + n %% 5], (%(tasks)s::text[])[1 + n %% 5],
       md5(n::text), md5(n::text), sha256(('f' || n)::bytea),
       case when n <= %(held)s then 'running' when n %% 1000 = 1 then 'failed' when n %% 20000 = 2 then 'in_doubt' when n %% 5000 = 3 then 'retryable'
            else 'succeeded' end,
       1 + (n %% 500 = 0)::int, (n %% 500 = 0)::int, md5('h' || n), 'charge:' || n || '#' || md5(n::text), n,
       '{"id": ' || n || '}', at, at, at + interval '1 second', at + interval '30 days', at + interval '30 days'
  from generate_series(1, %(rows)s) n,
       lateral (select now() - interval '7 days' * (1 - n::float8 / %(rows)s) as at) t
"""
_FENCES = """
insert into once_fenced_fence (resource, token, holder, key_digest, task_id, task_name, key, worker, acquired_at, expires_at)
select 'charge:' || n || '#' || md5(n::text), n, md5('h' || n), sha256(n::text::bytea), md5(n::text),
       (%(tasks)s::text[])[1 + n %% 5], 'charge:' || n, 'w' || n %% 8 || '@host', now(),
       case when n <= %(held)s then now() + n * interval '1 second' end
  from generate_series(1, %(rows)s) n
"""
_EVENTS = """
insert into once_fenced_event (at, kind, resource, key_digest, task_name, task_id, worker, token, old_worker, old_token)
select now() - interval '7 days' * (1 - n::float8 / %(events)s), 'fence.taken_over', 'charge:' || n, sha256(n::text::bytea),
       (%(tasks)s::text[])[1 + n %% 5], md5(n::text), 'b@host', n + 1, 'a@host', n
  from generate_series(1, %(events)s) n
"""


def fill_postgres(rows: int) -> None:
    from django.db import connection

    given = {"tasks": list(TASKS), "rows": rows, "held": HELD_FENCES, "events": rows // 10}
    with connection.cursor() as cursor:
        for statement in (_ENTRIES, _FENCES, _EVENTS):
            cursor.execute(statement, given)
        cursor.execute("vacuum analyze once_fenced_ledger, once_fenced_fence, once_fenced_event")


def fill_redis(url: str, namespace: str, holds: int) -> None:
    """What 100,000 calls leave: one in five runs, the others are queued."""
    import redis

    random.seed(5)
    with redis.Redis.from_url(url) as client:
        for some in _batched(holds):
            pipe = client.pipeline(transaction=False)
            for number in some:
                _hold(pipe, namespace, number)
            pipe.execute()


def _batched(holds: int) -> Iterator[range]:
    for start in range(0, holds, 5000):
        yield range(start, min(holds, start + 5000))


def _hold(pipe: Any, namespace: str, number: int) -> None:
    now = time.time()
    text, task = f"shop:feed={number}", TASKS[number % 3]
    digest = hashlib.sha256(text.encode()).hexdigest()
    bucket = f"{{{namespace}:{digest[0]}}}:"
    since, left = int((now - random.random() * 600) * 1e6), random.randint(60_000, 3_600_000)
    holder, task_id = secrets.token_hex(16), secrets.token_hex(16)
    if number % 5:
        slot, value = "q", f"{holder}|{task_id}|{since}|{task}|{text}"
    else:
        slot = "r"
        value = f"{holder}|{task_id}|{secrets.token_hex(16)}|{since}|w{number % 8}@host|{task}|{text}"
    pipe.set(f"{bucket}{slot}:{digest}", value, px=left)
    pipe.zadd(f"{bucket}index", {f"{slot}||{digest}|{task}": int(now * 1000) + left})
    pipe.hincrby(f"{bucket}stats:{task}", "granted")
    pipe.hincrby(f"{bucket}stats:{task}", "hold_le_5")
    pipe.sadd(f"{bucket}tasks", task)


# --- the pages --------------------------------------------------------------------------------------------------------

PAGES = {
    "overview": "overview/",
    "held locks": "heldlock/",
    "held locks, second page": "",  # found on the first one
    "held locks, last page": "heldlock/?before=9999999999999~~",
    "held locks of a task, running": "heldlock/?task=shop.index_product&slot=running",
    "held locks of a worker": "heldlock/?worker=w3%40host",
    "held locks, a key": "heldlock/?q=feed%3D99999",
    "held locks, a text in none": "heldlock/?q=zzzz",
    "held locks, fences that lapsed": "heldlock/?state=lapsed",
    "one lock, with a fence": "",
    "one lock, queued": "",
    "one lock, running": "",
    "locks of an object": "/admin/shop/order/1/change/",
    "dedup records": "ledgerentry/",
    "dedup records, page 100": "ledgerentry/?p=100",
    "dedup records that failed": "ledgerentry/?state__exact=failed",
    "dedup records waiting for a retry": "ledgerentry/?state__exact=retryable",
    "dedup records of a task": "ledgerentry/?task_name=shop.charge",
    "dedup records of no task": "ledgerentry/?task_name=shop.none",
    "dedup records, more than one attempt": "ledgerentry/?attempts=more",
    "dedup records, a week ago": "ledgerentry/?when=week",
    "dedup records, a whole key": "ledgerentry/?q=charge:500000",
    "dedup records, part of a key": "ledgerentry/?q=:99999",
    "dedup records, a text in none": "ledgerentry/?q=zzzz",
    "one dedup record": "",
    "keys in doubt": "indoubt/",
    "events": "event/",
    "events of a kind": "event/?kind=ledger.exhausted",
}
ROOT = "/admin/once_fenced/"


class Taken(NamedTuple):
    """Seconds of one request."""

    waited: float
    worked: float
    """By this process; the rest was the stores'."""


def measure(times: int) -> dict[str, list[Taken]]:
    """Each request of each page, the first one left out: it loads templates and opens connections."""
    from django.contrib.auth.models import User
    from django.test import Client

    from example_project.shop.models import Account, Order

    client = Client()
    client.force_login(User.objects.create_superuser(secrets.token_hex(4)))
    Order.objects.get_or_create(id=1, defaults={"account": Account.objects.create(name="Ada"), "amount": 1})
    pages = PAGES | _found(client)
    return {name: [_taken(client, page) for _ in range(times + 1)][1:] for name, page in pages.items()}


def _found(client: Any) -> dict[str, str]:
    """Addresses that stand on other pages."""
    locks, records, queued, running = (
        client.get(ROOT + page).content.decode()
        for page in ("heldlock/", "ledgerentry/", "heldlock/?slot=queued", "heldlock/?slot=running&q=feed")
    )
    return {
        "held locks, second page": f"{ROOT}heldlock/" + _first(r'rel="next" href="([^"]+)"', locks),
        "one lock, with a fence": _first(r'href="([^"]+/heldlock/f_3A[^"]+/change/)"', locks),
        "one lock, queued": _first(r'href="([^"]+/heldlock/q_3A[^"]+/change/)"', queued),
        "one lock, running": _first(r'href="([^"]+/heldlock/r_3A[^"]+/change/)"', running),
        "one dedup record": _first(r'href="([^"]+/ledgerentry/[^"]+/change/)', records),
    }


def _first(pattern: str, text: str) -> str:
    return html.unescape(re.findall(pattern, text)[0])


def _taken(client: Any, page: str) -> Taken:
    began, worked = time.perf_counter(), time.process_time()
    response = client.get(page if page.startswith("/") else ROOT + page)
    taken = Taken(time.perf_counter() - began, time.process_time() - worked)
    assert response.status_code == 200, (page, response.status_code)
    problems = re.findall(r'class="errornote">(.*?)</p>', response.content.decode())
    assert not problems, f"{page}: nothing to measure: {problems}"
    return taken


def main() -> int:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--holds", type=int, default=100_000)
    arguments.add_argument("--rows", type=int, default=1_000_000)
    arguments.add_argument("--times", type=int, default=5)
    options = arguments.parse_args()
    with filled(options.holds, options.rows):
        print(
            f"{options.holds:,} holds, {options.rows:,} dedup records; load of the machine {os.getloadavg()[0]:.1f}\n"
        )
        print(f"{'page':40} {'shortest':>9} {'median':>9} {'longest':>9} {'worked':>9}")
        slow = [name for name, taken in measure(options.times).items() if _report(name, taken) > LIMIT]
    print(f"\nover {LIMIT * 1000:.0f} ms: {', '.join(slow) or 'none'}")
    return 1 if slow else 0


def _report(name: str, taken: list[Taken]) -> float:
    waited = [one.waited for one in taken]
    worked = statistics.median(one.worked for one in taken)
    columns = (min(waited), statistics.median(waited), max(waited), worked)
    print(f"{name:40} {' '.join(f'{seconds * 1000:6.0f} ms' for seconds in columns)}", flush=True)
    return min(waited)


@contextmanager
def filled(holds: int, rows: int) -> Iterator[None]:
    """The example project on servers with that much in them."""
    with servers() as running:
        name = f"pages_{secrets.token_hex(4)}"
        os.environ |= {
            "DJANGO_SETTINGS_MODULE": "example_project.settings",
            REDIS_VARIABLE: running.redis_url,
            POSTGRES_VARIABLE: running.create_database(name),
        }
        import django

        django.setup()
        from django.core.management import call_command
        from django.db import connection

        from celery_once_fenced import runtime

        try:
            call_command("migrate", verbosity=0)
            settings = runtime.current().settings
            fill_redis(settings.redis_url, settings.namespace, holds)
            fill_postgres(rows)
            yield
        finally:
            runtime.current().close()
            connection.close()
            running.drop_database(name)


if __name__ == "__main__":
    sys.exit(main())
