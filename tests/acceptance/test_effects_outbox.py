"""What a body sends goes out if and only if it commits, whoever dies in between (L9)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
from django.db import transaction

from django_celery_once_fenced.models import LedgerEntry, Outbox
from example_project.servers import Servers
from tests.acceptance.correctness_posting import has_one_effect
from tests.acceptance.effects_site import EffectsSite
from tests.acceptance.workers import eventually

KINDS = ("follow", "each", "single", "plain")
GUARDED = ("follow", "each", "single")


@pytest.fixture(scope="module")
def site(servers: Servers, shop: str) -> Iterator[EffectsSite]:
    site = EffectsSite.on(servers.redis_url, shop)
    with site.worker(concurrency=5):
        yield site
    site.close()


class Sender:
    """A call whose body sends something, under a label of its own."""

    def __init__(self, site: EffectsSite, kind: str, *, at: str = "", end: str = "", then: str = "") -> None:
        self.charge = site.prepared("hold", "")
        self.label = f"{self.charge.label} sent"
        self.charge.acts = (f"post, {kind.format(label=self.label)}{end}", *([then] if then else []))
        if at:
            site.orders.give(self.label, at, "die")
        self.charge.call()

    @property
    def runs(self) -> int:
        return self.charge.site.stage.runs(self.label)

    @property
    def published(self) -> int:
        return self.charge.site.stage.events(self.label).count("sent")

    @property
    def delivered(self) -> int:
        return self.charge.site.stage.events(self.label).count("delivered")

    @property
    def pending(self) -> int:
        return Outbox.objects.filter(message__contains=self.label, confirmed_at=None).count()

    def is_over(self, within: float = 20.0) -> Sender:
        """The body has committed, and everything is published and settled."""
        self.charge.value(within)
        eventually(lambda: self.pending == 0, within, "the outbox")
        eventually(lambda: self.delivered >= self.published and self.charge.site.idle(), within, "its end")
        return self


@pytest.fixture(scope="module")
def killed(site: EffectsSite) -> Mapping[tuple[str, str], Sender]:
    """Killed between COMMIT and publish, and between publish and confirm, all at once."""
    calls = {
        (kind, at): Sender(site, f"send {kind} {{label}}", at=at)
        for kind in KINDS
        for at in ("publishing", "sent")
    }
    calls["naive", "publishing"] = Sender(site, "naive {label}", at="publishing")
    return calls


# --- killed -----------------------------------------------------------------------------------------------------------


def goes_out_once(sender: Sender) -> None:
    sender.is_over()
    assert sender.runs == 1, f"it ran {sender.runs} times"
    has_one_effect(sender.charge)


@pytest.mark.parametrize("kind", KINDS)
def test_killed_between_commit_and_publish_it_is_swept_and_goes_out_once(
    killed: Mapping[tuple[str, str], Sender], kind: str
) -> None:
    goes_out_once(killed[kind, "publishing"])


def test_an_on_commit_hook_is_caught(killed: Mapping[tuple[str, str], Sender]) -> None:
    with pytest.raises(AssertionError, match="it ran 0 times"):
        goes_out_once(killed["naive", "publishing"])


@pytest.mark.parametrize("kind", GUARDED)
def test_killed_between_publish_and_confirm_a_guarded_one_runs_once(
    killed: Mapping[tuple[str, str], Sender], kind: str
) -> None:
    sender = killed[kind, "sent"]
    goes_out_once(sender)
    assert sender.published >= 2


def test_an_unguarded_one_that_is_published_twice_is_caught(
    killed: Mapping[tuple[str, str], Sender],
) -> None:
    with pytest.raises(AssertionError, match="it ran 2 times"):
        goes_out_once(killed["plain", "sent"])


# --- what commits, and what does not ----------------------------------------------------------------------------------


def test_it_is_published_under_the_id_that_send_answered(site: EffectsSite) -> None:
    sender = Sender(site, "send follow {label}").is_over()
    task_id = sender.charge.result.get(timeout=1)
    assert site.app.AsyncResult(task_id).get(timeout=10) == sender.label
    assert (sender.published, sender.runs) == (1, 1)


@pytest.mark.parametrize("end", ["fail", "retry"])
def test_rolled_back_body_sends_nothing(site: EffectsSite, end: str) -> None:
    sender = Sender(site, "send follow {label}", end=f", {end}", then="post")
    if end == "fail":
        assert isinstance(sender.charge.ends("FAILURE"), ValueError)
    else:
        sender.charge.value()
    eventually(site.idle)
    assert (sender.published, Outbox.objects.filter(message__contains=sender.label).count()) == (0, 0)


def test_rolled_back_savepoint_takes_its_message_along(site: EffectsSite) -> None:
    sender = Sender(site, "savepoint send follow {label}", end=", send follow {label} too").is_over()
    assert sender.published == 0


def test_block_of_a_task_without_a_transaction_sends_when_it_commits(site: EffectsSite) -> None:
    label = "follow of open"
    charge = site.charge("hold_open", f"open, post, send follow {label}, hold, close, hold")
    charge.has_run(1)
    assert site.stage.events(label) == []
    charge.release().value()
    eventually(lambda: site.stage.runs(label) == 1)


def test_send_outside_a_block_is_refused(site: EffectsSite) -> None:
    assert "grant.atomic()" in str(site.charge("hold_open", "send follow x").ends("FAILURE"))


def test_retry_of_a_body_sends_only_what_its_last_attempt_sent(site: EffectsSite) -> None:
    charge = site.prepared("hold", "")
    label = f"{charge.label} sent"
    charge.acts = (f"send follow {label} a, retry", f"post, send follow {label} b")
    charge.call()
    charge.value()
    eventually(lambda: site.stage.runs(f"{label} b") == 1)
    assert site.stage.events(f"{label} a") == []


# --- canvases ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "steps"),
    [("chain", ("one", "two")), ("group", ("one", "two")), ("chord", ("one", "two", "tail"))],
)
def test_canvas_is_sent_as_a_whole(site: EffectsSite, kind: str, steps: tuple[str, ...]) -> None:
    sender = Sender(site, f"send {kind} {{label}}")
    sender.charge.value()
    for step in steps:
        label = f"{sender.label} {step}"
        eventually(lambda label=label: site.stage.runs(label) == 1, what=label)  # type: ignore[misc]


@pytest.mark.parametrize("kind", ["chain", "group", "chord"])
def test_canvas_that_is_published_twice_runs_its_guarded_first_steps_once(
    site: EffectsSite, kind: str
) -> None:
    sender = Sender(site, f"hold, send {kind} {{label}}")
    first, second = f"{sender.label} one", f"{sender.label} two"
    site.orders.give(first, "sent", "die")
    sender.charge.release().value()
    eventually(lambda: sender.pending == 0, what="the outbox")
    eventually(lambda: site.stage.runs(second) >= 1, what=second)
    eventually(lambda: site.stage.events(first).count("delivered") >= 2 and site.idle())
    assert site.stage.events(first).count("sent") >= 2
    assert (site.stage.runs(first), site.stage.runs(second)) == (1, 1)


def test_two_first_steps_with_one_key_are_two_calls(site: EffectsSite) -> None:
    sender = Sender(site, "send pair {label}").is_over()
    eventually(lambda: sender.runs == 2, what="both of the pair")


# --- without a worker -------------------------------------------------------------------------------------------------


def test_direct_call_takes_its_steps_sends_on_commit_and_records_nothing(site: EffectsSite) -> None:
    charge = site.prepared("hold_open", "")
    label = f"{charge.label} sent"
    with transaction.atomic():
        charge.task(charge.label, charge.account, f"charge, open, post, send follow {label}, close")
        assert site.stage.events(label) == []
    eventually(lambda: site.stage.runs(label) == 1)
    assert (len(charge.requests), charge.entries) == (1, 1)
    assert LedgerEntry.objects.filter(key=charge.text).count() == 0


def test_direct_call_that_is_rolled_back_sends_nothing(site: EffectsSite) -> None:
    charge = site.prepared("hold", "")
    label = f"{charge.label} sent"
    with transaction.atomic():
        charge.task(charge.label, charge.account, f"post, send follow {label}")
        transaction.set_rollback(True)
    eventually(site.idle)
    assert (site.stage.events(label), charge.entries) == ([], 0)
