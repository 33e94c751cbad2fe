"""Settings alone move a task to the correctness tier, with all it promises; what cannot be kept is refused.

Rules L11 and W7.  ``flipped.post`` is a plain ``SingletonTask`` that two settings move; ``efficiency.post`` is the same
task where nobody did.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from celery_once_fenced import FencedTask, SingletonTask
from celery_once_fenced.errors import ConfigError, GrantError
from example_project.servers import Servers
from tests.acceptance.correctness_posting import BALANCE, Posting, Zombie, ends_with_one_effect
from tests.acceptance.correctness_site import ShopSite
from tests.acceptance.shop_app import AMOUNT
from tests.acceptance.workers import QUEUE, eventually


@pytest.fixture(scope="module")
def site(servers: Servers, shop: str) -> Iterator[ShopSite]:
    site = ShopSite.on(servers.redis_url, shop)
    with site.worker(concurrency=6):
        yield site
    site.close()


# --- the promise ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scene:
    """All that take a while, begun at once: a posting whose first body dies, and zombies whose leases are over."""

    killed: Posting
    zombies: Mapping[str, Zombie]


@pytest.fixture(scope="module")
def scene(site: ShopSite) -> Scene:
    killed = site.posting(variant="flipped", at={"completed": "die"})
    places = {"flipped begun": "begun", "flipped written": "written", "flipped completed": "completed"}
    places["efficiency begun"] = "begun"
    postings = {
        name: site.posting(variant=name.split()[0], at={place: "freeze"}) for name, place in places.items()
    }
    zombies = {name: Zombie.of(posting, places[name]) for name, posting in postings.items()}
    return Scene(killed, {name: zombie.lapses() for name, zombie in zombies.items()})


def zombie_is_fenced_off(zombie: Zombie) -> None:
    zombie.posting.site.redeliver(zombie.posting.result.id)
    assert zombie.posting.value(within=30) == BALANCE - AMOUNT
    zombie.wakes()
    eventually(lambda: zombie.posting.ended_in(zombie.pid))
    ends_with_one_effect(zombie.posting, within=30)


@pytest.mark.parametrize("place", ["begun", "written", "completed"])
def test_zombie_of_a_flipped_task_is_fenced_off(scene: Scene, place: str) -> None:
    zombie_is_fenced_off(scene.zombies[f"flipped {place}"])


def test_the_same_task_without_the_setting_is_caught(scene: Scene) -> None:
    with pytest.raises(AssertionError, match="posted 2 times"):
        zombie_is_fenced_off(scene.zombies["efficiency begun"])


def test_killed_body_of_a_flipped_task_is_done_once(scene: Scene) -> None:
    ends_with_one_effect(scene.killed, within=30)
    assert scene.killed.runs == 2


def test_binding_makes_a_flipped_task_durable(site: ShopSite) -> None:
    task = site.app.tasks["flipped.post"]
    assert (task.acks_late, task.reject_on_worker_lost) == (True, True)


# --- each call is an operation of its own -----------------------------------------------------------------------------


def second_call_runs_and_a_redelivery_of_the_first_does_not(site: ShopSite, name: str, variant: str) -> None:
    posting = site.prepared(name, variant=variant)
    posting.call(queue="parked")
    message = site.caught()
    site.deliver(message, queue=QUEUE)
    assert posting.value() == BALANCE - AMOUNT
    assert posting.again().get(timeout=10) == BALANCE - 2 * AMOUNT, "the second call was answered"
    eventually(site.idle)
    site.forget_settled()
    site.deliver(message, redelivered=True)
    eventually(lambda: posting.deliveries == 3 and site.idle())
    assert posting.entries == 2, f"posted {posting.entries} times"
    assert posting.ends("SUCCESS") == BALANCE - AMOUNT


@pytest.mark.parametrize(("name", "variant"), [("post", "flipped"), ("each", "good")])
def test_second_call_runs_and_a_redelivery_of_the_first_does_not(
    site: ShopSite, name: str, variant: str
) -> None:
    second_call_runs_and_a_redelivery_of_the_first_does_not(site, name, variant)


def test_a_redelivery_that_runs_is_caught(site: ShopSite) -> None:
    with pytest.raises(AssertionError, match="posted 3 times"):
        second_call_runs_and_a_redelivery_of_the_first_does_not(site, "post", "efficiency")


def test_a_second_call_that_is_answered_is_caught(site: ShopSite) -> None:
    with pytest.raises(AssertionError, match="was answered"):
        second_call_runs_and_a_redelivery_of_the_first_does_not(site, "post", "good")


def test_retry_of_a_call_is_the_same_operation(site: ShopSite) -> None:
    posting = site.posting("each", "post, retry", "post")
    assert posting.value() == BALANCE - AMOUNT
    assert (posting.runs, posting.entries) == (2, 1)


# --- what cannot be kept ----------------------------------------------------------------------------------------------


def refused(
    site: ShopSite, options: Mapping[str, Any], base: type[Any] = SingletonTask, **task_options: Any
) -> str:
    """What is said when a task is bound under these settings."""
    app = site.through(once_fenced={"tasks": {"shop.refresh": options}}).app
    with pytest.raises(ConfigError) as error:
        app.task(name="shop.refresh", base=base, shared=False, **task_options)(_refresh).bind(app)
    return str(error.value)


def _refresh() -> None:
    """The body of a task that is never run."""


def test_a_flip_without_replay_for_is_refused(site: ShopSite) -> None:
    assert "replay_for" in refused(site, {"tier": "correctness"})
    assert "replay_for" in refused(site, {}, FencedTask)


@pytest.mark.parametrize("option", ["acks_late", "reject_on_worker_lost"])
def test_a_flip_of_a_task_that_may_lose_its_message_is_refused(site: ShopSite, option: str) -> None:
    said = refused(site, {"tier": "correctness", "replay_for": 0}, **{option: False})
    assert f"{option}=False" in said


def test_worker_does_not_start_with_a_flip_that_cannot_be_kept(site: ShopSite) -> None:
    broken = site.through(once_fenced={"tasks": {"flipped.post": {"tier": "correctness"}}})
    with pytest.raises(RuntimeError, match="replay_for"), broken.worker():
        """It has not become ready."""


def test_calls_past_the_guard_are_refused(site: ShopSite) -> None:
    posting = site.prepared(variant="flipped")
    with pytest.raises(GrantError, match="once=False"):
        posting.call(once=False)
    with pytest.raises(GrantError, match="replace"):
        posting.task.replace(site.app.signature("unguarded.collect"))
