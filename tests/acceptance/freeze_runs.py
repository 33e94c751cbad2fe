"""The frozen worker, many times in a row: ``python -m tests.acceptance.freeze_runs 20``.

Prints for each run and place the seconds from the redelivery to the end of the successor, which must be less than the
lease + 5 s while the first is still frozen, and the two tokens; the first must be refused when it wakes up.  Exits 1
at the first promise that is not kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

from tests.fixtures.django_project import database_at  # sets Django up, before anything imports a model

# isort: split

from django.core.management import call_command

from example_project.servers import servers
from tests.acceptance.correctness_freeze import (
    GRACE,
    PLACES,
    Frozen,
    first_is_refused_when_it_wakes,
    freezes,
    frozen,
    site_for_freezes,
    successor_finishes_while_the_first_is_frozen,
)
from tests.acceptance.correctness_site import ShopSite
from tests.acceptance.shop_app import LEASE
from tests.acceptance.workers import eventually
from tests.fixtures.servers import fresh_database


@contextmanager
def shop() -> Iterator[ShopSite]:
    with servers() as running, fresh_database(running) as url, database_at(url):
        call_command("migrate", verbosity=0, interactive=False)
        with closing(site_for_freezes(running.redis_url, url)) as site:
            yield site


def run(site: ShopSite) -> dict[str, str]:
    """One run, with two workers of its own: what is to be said about each place."""
    with ExitStack() as stack:
        worker = stack.enter_context(site.worker(concurrency=len(PLACES)))
        postings = {place: (freezes(site, place=place), place) for place in PLACES}
        scene = stack.enter_context(frozen(site, worker, postings))
        took = {place: successor_finishes_while_the_first_is_frozen(one) for place, one in scene.items()}
        worker.sigcont()
        for one in scene.values():
            first_is_refused_when_it_wakes(one)
        eventually(site.idle)
        return {place: f"{took[place]:.2f} s {tokens(one)} refused" for place, one in scene.items()}


def tokens(one: Frozen) -> str:
    return " → ".join(str(event["token"]) for event in one.posting.events("fence.acquired"))


def main(times: int, tell: Callable[[str], object]) -> None:
    tell(f"limit {LEASE + GRACE:g} s\nrun  " + "".join(f"{place:24}" for place in PLACES))
    with shop() as site:
        for number in range(1, times + 1):
            said = run(site)
            tell(f"{number:3}  " + "".join(f"{said[place]:24}" for place in PLACES))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20, lambda line: print(line, flush=True))  # noqa: T201  # a program
