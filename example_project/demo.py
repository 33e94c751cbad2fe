"""The main job on real servers and real workers, told as it happens; then the load, while workers and servers fail.

``python -m example_project.demo`` exits 1 if anything is not as promised.  ``--job`` leaves the load away; ``--admin``,
too, and leaves the servers running afterwards, with the admin at a printed address and log-in, until Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import secrets
import socket
import subprocess
import sys
from typing import Any

from example_project.load import the_load
from example_project.story import LEASE, VISIBILITY_TIMEOUT, Story, stage, until
from example_project.workers import CeleryWorker

APP = "example_project.demo_worker"
ACCOUNT = 7
ADMIN_PORT = 8000


def worker(name: str, *, pause: str = "", seconds: float = 0.5) -> CeleryWorker:
    """A worker that has yet to be started; ``pause`` is the table whose first write it stops before, for a moment."""
    if not pause:
        return CeleryWorker(name, APP)
    variables = {"DEMO_PAUSE": pause, "DEMO_PAUSE_SECONDS": str(seconds)}
    return CeleryWorker(name, APP, variables)


def until_paused(paused: CeleryWorker) -> None:
    until(
        lambda: "demo: paused" in paused.log(), 30, f"worker {paused.node} did not reach the place to stop at"
    )


# --- the acts ---------------------------------------------------------------------------------------------------------


def the_rush(story: Story) -> None:
    from example_project.shop.models import Feed

    story.title("The rush: a hundred calls of the same job, from four processes")
    feed = Feed.objects.create(name="news")
    callers = [_caller(feed.pk, 25) for _ in range(4)]
    with worker("rush", pause="shop_feed", seconds=3.0):
        for caller in callers:
            _line(caller)
        story.tell("four processes stand ready; each calls refresh_feed.delay(1) twenty-five times")
        for caller in callers:
            _go(caller)
        answers = [json.loads(_line(caller)) for caller in callers]
    for caller in callers:
        caller.communicate(timeout=60)
    feed.refresh_from_db()
    statuses = [status for answer in answers for status in answer["statuses"]]
    values = [value for answer in answers for value in answer["values"]]
    story.tell(f"enqueued: {statuses.count('enqueued')}, duplicates: {statuses.count('duplicate')}")
    story.promise("one run", feed.refreshed == 1)
    story.promise("ninety-nine suppressed", statuses.count("duplicate") == 99)
    story.promise("every caller has the result", values == [1] * 100)


def _caller(feed_id: int, calls: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "example_project.demo_caller", str(feed_id), str(calls)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def the_freeze(story: Story) -> None:
    from example_project.shop.tasks import post_entry

    story.title("The freeze: a worker stops in the middle of its transaction, and wakes too late")
    _open_account(story, post_entry)
    with worker("A", pause="shop_entry") as a:
        result = post_entry.delay(70, ACCOUNT, 10)
        until_paused(a)
        a.pause()
        first = _token()
        story.tell(
            f"worker A holds account:{ACCOUNT} with token {first}, has written, and is frozen (SIGSTOP)"
        )
        story.tell(
            f"its lease is {LEASE} s; the broker delivers the message again after {VISIBILITY_TIMEOUT} s"
        )
        with worker("B"):
            until(lambda: _token() > first, 40, "worker B did not take over")
            value = result.get(timeout=30)
            event = _takeover()
            story.tell(
                f"worker B took over: token {event.old_token} of {event.old_worker} → token {event.token} of {event.worker};"
                " A's session is ended, B commits"
            )
            story.promise("token 7, then token 8", (event.old_token, event.token) == (7, 8))
            story.promise("balance 90 while A is still frozen", _balance() == 90 and value == 90)
            a.resume()
            story.tell("worker A wakes (SIGCONT) and tries to commit")
            until(lambda: "fence.rejected" in a.log(), 20, "worker A was not refused")
            story.tell(f"worker A: {_refusal(a.log())}")
            story.promise("refused by Postgres, balance still 90", _balance() == 90)
            story.promise("the result is B's", result.get(timeout=5) == 90 and result.state == "SUCCESS")


def _open_account(story: Story, post_entry: Any) -> None:
    from example_project.shop.models import Account

    Account.objects.create(pk=ACCOUNT, name="Ada", balance=160)
    with worker("clerk"):
        for number in range(1, 7):
            post_entry.delay(number, ACCOUNT, 10).get(timeout=30)
    story.tell(f"six entries of 10 posted; balance {_balance()}; account:{ACCOUNT} has seen token {_token()}")


def the_plain_lock(story: Story) -> None:
    from example_project.demo_worker import post_entry_under_plain_lock
    from example_project.shop.models import Account, Entry

    story.title("The very same script on a plain Redis lock (celery-once)")
    Account.objects.filter(pk=ACCOUNT).update(balance=100)
    with worker("A", pause="shop_entry") as a:
        result = post_entry_under_plain_lock.delay(71, ACCOUNT, 10)
        until_paused(a)
        a.pause()
        story.tell("worker A has written and is frozen (SIGSTOP); its lock runs out")
        with worker("B", pause="shop_account") as b:
            until_paused(b)
            story.tell(
                "worker B got the message again; its update waits for the row that frozen A has locked"
            )
            a.resume()
            story.tell("worker A wakes (SIGCONT) and commits; then B commits too")
            until(lambda: Entry.objects.filter(number=71).count() == 2, 20, "the second copy did not commit")
            result.get(timeout=10)
            story.promise("balance 80: the entry was posted twice", _balance() == 80)


# --- what the acts look at --------------------------------------------------------------------------------------------


def _balance() -> int:
    from example_project.shop.models import Account

    return Account.objects.get(pk=ACCOUNT).balance


def _token() -> int:
    from django_celery_once_fenced.models import Fence

    return Fence.objects.get(resource=f"account:{ACCOUNT}").token


def _takeover() -> Any:
    from django_celery_once_fenced.models import Event

    return Event.objects.filter(kind="fence.taken_over").latest("id")


def _refusal(log: str) -> str:
    found = re.search(r"fence\.rejected .*?token=(\d+) why=(\w+) then=(\w+)", log)
    return (
        "no refusal in its log"
        if found is None
        else f"fenced off, token {found[1]} ({found[2]}): {found[3]}s the result"
    )


# --- the stage --------------------------------------------------------------------------------------------------------


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--job", action="store_true", help="the first act alone: the main job, no load")
    arguments.add_argument(
        "--admin",
        action="store_true",
        help="the first act, then leave it running, with the admin, until Ctrl-C",
    )
    options = arguments.parse_args()
    try:
        return _play(Story(), with_load=not (options.job or options.admin), with_admin=options.admin)
    except KeyboardInterrupt:
        print("\ninterrupted; the servers and workers are stopped")
        return 130


def _play(story: Story, *, with_load: bool, with_admin: bool) -> int:
    with stage(story) as running:
        the_rush(story)
        the_freeze(story)
        the_plain_lock(story)
        if with_load:
            the_load(story, running)
        code = story.end()
        if with_admin:
            _serve_admin()
    return code


def _free_port(wanted: int) -> int:
    """The port that is wanted, or where somebody has it, any."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _serve_admin() -> None:
    from django.contrib.auth import get_user_model
    from django.core.management import call_command

    password, port = secrets.token_urlsafe(9), _free_port(ADMIN_PORT)
    get_user_model().objects.create_superuser("admin", "", password)
    print(
        f"\nadmin: http://127.0.0.1:{port}/admin/   user: admin   password: {password}   (Ctrl-C ends it)",
        flush=True,
    )
    with contextlib.suppress(KeyboardInterrupt):
        call_command("runserver", f"127.0.0.1:{port}", use_reloader=False)


if __name__ == "__main__":
    sys.exit(main())
