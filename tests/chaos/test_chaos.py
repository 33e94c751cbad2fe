"""Random faults on real workers and servers: nothing is done twice, and nothing is lost.

``make chaos SECONDS=600 SEED=1`` runs it for longer, or as it ran before.  The same jobs under a plain lock, in the same
chaos and before the same judges, are the negative control.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from unittest import mock

import celery_once.backends.redis
import pytest
from django.db import connections

from tests.chaos.chaos import Chaos
from tests.chaos.judges import PLAIN, Evidence, takeovers, unfinished, violations
from tests.chaos.machinery import Machinery

SECONDS = float(os.environ.get("CHAOS_SECONDS") or 40)
SEED = int(os.environ.get("CHAOS_SEED") or secrets.randbelow(10**6))


@pytest.fixture
def machinery() -> Iterator[Machinery]:
    # celery-once keeps the first connection of its process for ever; another test's server would not be ours.
    with mock.patch.object(celery_once.backends.redis, "redis", None), ExitStack() as stack:
        yield Machinery.started(stack)


def gathered(machinery: Machinery) -> Evidence:
    return Evidence.gathered(machinery.postgres.url, machinery.gateway.seen())


def hits(machinery: Machinery, chaos: Chaos) -> dict[str, int]:
    """How often each kind of fault has come about, as their consequences show it."""
    connections.close_all()  # what the last crash of Postgres has left
    return {
        "a fence was taken over": takeovers(),
        "a commit was fenced off": machinery.refused_commits,
        "a session was evicted": machinery.evictions,
        "a child was killed inside an effect": chaos.faults["killed in a call"],
        "the reply to a COMMIT was lost": machinery.lost_replies,
    }


def test_nothing_is_done_twice_and_nothing_is_lost_whatever_fails(machinery: Machinery) -> None:
    chaos = Chaos(machinery, SEED)
    chaos.run(SECONDS, lambda: [name for name, times in hits(machinery, chaos).items() if not times])
    connections.close_all()
    chaos.come_to_rest()
    fenced = [job for job in chaos.jobs if job.task != PLAIN]
    plain = [job for job in chaos.jobs if job.task == PLAIN]
    lost = chaos.call_again(unfinished(fenced, gathered(machinery)))
    chaos.come_to_rest()
    found = gathered(machinery)
    repeats = len(found.gateway.requests) - len(found.gateway.charges)
    sys.stdout.write(
        f"\nseed {SEED}: {len(fenced)} jobs, {repeats} repeated requests, {len(lost)} lost by the broker; {len(plain)} jobs under a plain lock,"
        f" {len(violations(plain, found))} violations\ndone: {dict(chaos.faults)}\nhit: {hits(machinery, chaos)}\n"
    )
    broken = violations(fenced, found)
    for job in [job for job in fenced if any(str(job) in violation for violation in broken)]:
        sys.stdout.write("\n".join([f"\n{job}:", *machinery.told(chaos.calls[job])]))
    assert broken == []
    assert machinery.waiting() == 0, "the queue is not empty"
    assert violations(plain, found) != [], "the judges see nothing"
    assert all(hits(machinery, chaos).values()), "a kind of fault did not hit"
    assert repeats > 0
    assert len(lost) <= chaos.faults["kill_worker"]
