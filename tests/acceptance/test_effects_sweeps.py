"""Who publishes what a worker left behind: every pool, prune, and a worker that finds its broker again (L9)."""

from __future__ import annotations

from contextlib import closing

import pytest
from click.testing import CliRunner
from django.db import connection

from celery_once_fenced import runtime
from celery_once_fenced.cli import once
from django_celery_once_fenced.models import Outbox
from example_project.servers import Servers
from tests.acceptance.correctness_posting import has_one_effect
from tests.acceptance.effects_site import Charge, EffectsSite
from tests.acceptance.workers import eventually
from tests.fixtures.proxy import TcpProxy


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_every_pool_sweeps(servers: Servers, shop: str, pool: str) -> None:
    with closing(EffectsSite.on(servers.redis_url, shop)) as site, site.worker(pool=pool, concurrency=2):
        left = left_behind(site)
        eventually(lambda: site.stage.runs(left) == 1, what="the sweep")
        eventually(lambda: Outbox.objects.filter(message__contains=left, confirmed_at=None).count() == 0)


def left_behind(site: EffectsSite) -> str:
    """A message that a worker has committed and not published."""
    label = f"left by {site.name}"
    message = site.runtime.post.pack(site.app.signature("good.follow", (label,)), f"id of {label}", "d" * 32)
    with connection.cursor() as cursor:
        cursor.execute(
            "select once_fenced_outbox_put_v1(%s, %s::bytea, %s, %s)",
            (site.name, b"d" * 32, f"id of {label}", message),
        )
    return label


def test_prune_publishes_what_was_left(servers: Servers, shop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    site = EffectsSite.on(servers.redis_url, shop)
    monkeypatch.setattr(runtime, "current", lambda: site.runtime)
    monkeypatch.setattr(site.runtime, "outbox_age", 0.0)
    label = left_behind(site)
    assert CliRunner().invoke(once, ["prune", "--grace", "1d"]).exit_code == 0
    (message,) = site.messages()
    assert message["headers"]["id"] == f"id of {label}"
    assert Outbox.objects.get(message__contains=label).confirmed_at is not None
    site.close()


# --- two apps on one database ------------------------------------------------------------------------------------------


def worker_publishes_what_its_own_app_has_left(own: EffectsSite, other: EffectsSite) -> None:
    """Each has a broker of its own; only the other one's worker is up."""
    theirs, ours = left_behind(own), left_behind(other)
    with other.worker(concurrency=1):
        eventually(lambda: other.stage.runs(ours) == 1, what="the sweep")
        eventually(lambda: Outbox.objects.filter(message__contains=ours, confirmed_at=None).count() == 0)
    assert other.stage.runs(theirs) == 0, "another app's worker has run it"
    assert Outbox.objects.get(message__contains=theirs).taken_at is None
    with own.worker(concurrency=1):
        eventually(lambda: own.stage.runs(theirs) == 1, what="the sweep of its own app")


def test_worker_publishes_what_its_own_app_has_left(servers: Servers, shop: str) -> None:
    own, other = (EffectsSite.on(servers.redis_url, shop) for _ in range(2))
    with closing(own), closing(other):
        worker_publishes_what_its_own_app_has_left(own, other)


def test_apps_that_share_a_namespace_are_caught(servers: Servers, shop: str) -> None:
    own = EffectsSite.on(servers.redis_url, shop)
    other = EffectsSite.on(servers.redis_url, shop).through(once_fenced={"namespace": own.name})
    with closing(own), closing(other), pytest.raises(AssertionError, match="another app's worker has run it"):
        worker_publishes_what_its_own_app_has_left(own, other)


# --- the broker is away -----------------------------------------------------------------------------------------------


def test_broker_that_is_away_at_publish_gets_it_later(servers: Servers, shop: str) -> None:
    proxy = TcpProxy(servers.redis_url)
    with closing(proxy):
        site = EffectsSite.on(servers.redis_url, shop, broker_url=proxy.url, task_publish_retry=False)
        direct = site.through(broker_url=servers.redis_url)
        with closing(site), site.worker(concurrency=2):
            charge = committed_without_a_broker(direct, proxy)
            label = f"{charge.label} sent"
            eventually(lambda: direct.stage.runs(label) == 1, 20, "the sweep")
            has_one_effect(charge)
        direct.disconnect()


def committed_without_a_broker(site: EffectsSite, proxy: TcpProxy) -> Charge:
    charge = site.prepared("hold", "")
    charge.acts = (f"post, hold, send follow {charge.label} sent",)
    charge.call()
    charge.has_run(1)
    proxy.cut()
    charge.release()
    eventually(lambda: charge.ledger.state == "succeeded", what="the commit")
    eventually(lambda: Outbox.objects.filter(message__contains=charge.label).count() == 1)
    proxy.resume()
    return charge
