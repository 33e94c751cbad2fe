"""Effects, ``atomic=False`` and the outbox without Django (C14): ``postgres_url`` in the settings, with psycopg or with
SQLAlchemy's sessions as ``transaction``.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest

from celery_once_fenced import InDoubtError, resolve, runtime
from example_project.servers import Servers
from tests.acceptance.correctness_orders import Orders
from tests.acceptance.effects_app import build
from tests.acceptance.effects_gateway import Gateway
from tests.acceptance.workers import Site, eventually
from tests.fixtures.ledger import Ledger, ledger_at

TRANSACTIONS = {"psycopg": {}, "sqlalchemy": {"transaction": "tests.acceptance.sqlalchemy_session.begin"}}
SCRIPTS = {"rerun": "charge, insert", "rerun_open": "charge, open, insert, close"}


class PlainSite(Site):
    """A site whose workers know no Django."""

    @cached_property
    def app(self) -> Any:
        return build(self.settings)

    def call(self, ledger: Ledger, name: str, *acts: str, at: Mapping[str, str] | None = None) -> Call:
        label = uuid.uuid4().hex[:8]
        for point, action in (at or {}).items():
            Orders.of(self.app).give(f"{label} sent" if point == "publishing" else label, point, action)
        acts = tuple(act.format(label=label) for act in acts)
        return Call(self, ledger, label, self.app.tasks[f"good.{name}"].delay(label, 1, *acts))


@dataclass
class Call:
    site: PlainSite
    ledger: Ledger
    label: str
    result: Any

    @property
    def requests(self) -> list[str]:
        return Gateway.of(self.site.app).requests(self.label)

    @property
    def writes(self) -> int:
        ((count,),) = self.ledger.execute("select count(*) from writes where resource = %s", (self.label,))
        return int(count)

    @property
    def sent(self) -> int:
        return self.site.stage.runs(f"{self.label} sent")


@pytest.fixture(scope="module")
def ledger(module_postgres_url: str) -> Iterator[Ledger]:
    with ledger_at(module_postgres_url) as opened:
        yield opened


@pytest.fixture(scope="module", params=TRANSACTIONS)
def site(servers: Servers, ledger: Ledger, request: pytest.FixtureRequest) -> Iterator[PlainSite]:
    settings = {"postgres_url": ledger.url, **TRANSACTIONS[request.param]}
    site = PlainSite.at(servers.redis_url, once_fenced=settings)
    assert isinstance(site, PlainSite)
    with site.worker(app="tests.acceptance.effects_app", concurrency=4):
        yield site
    site.close()


@pytest.fixture(scope="module")
def killed(site: PlainSite, ledger: Ledger) -> Mapping[tuple[str, str], Call]:
    """Killed once the gateway has charged, and between COMMIT and publish, all at once."""
    calls = {
        (name, "charged"): site.call(ledger, name, SCRIPTS[name], at={"charged": "die"}) for name in SCRIPTS
    }
    for name, script in SCRIPTS.items():
        sending = script.replace("insert", "insert, send each {label} sent")
        calls[name, "publishing"] = site.call(ledger, name, sending, at={"publishing": "die"})
    return calls


@pytest.mark.parametrize("name", SCRIPTS)
def test_step_interrupted_at_the_gateway_is_taken_again_with_the_same_key(
    killed: Mapping[tuple[str, str], Call], name: str
) -> None:
    call = killed[name, "charged"]
    call.result.get(timeout=20)
    assert (len(call.requests), len(set(call.requests)), call.writes) == (2, 1, 1)


@pytest.mark.parametrize("name", SCRIPTS)
def test_message_of_a_worker_killed_after_the_commit_is_swept(
    killed: Mapping[tuple[str, str], Call], name: str
) -> None:
    call = killed[name, "publishing"]
    call.result.get(timeout=20)
    eventually(lambda: call.sent == 1)
    assert call.writes == 1


@pytest.mark.parametrize(
    "script", ["insert, send each {label} sent, fail", "charge, open, insert, send each {label} sent, fail"]
)
def test_rolled_back_body_leaves_nothing(site: PlainSite, ledger: Ledger, script: str) -> None:
    call = site.call(ledger, "rerun_open" if "open" in script else "rerun", script)
    with pytest.raises(ValueError, match=call.label):
        call.result.get(timeout=10)
    eventually(site.idle)
    assert (call.writes, call.sent) == (0, 0)


def test_block_leaves_its_value_for_a_replay(site: PlainSite, ledger: Ledger) -> None:
    call = site.call(ledger, "hold_open", "open, insert, close, give done")
    again = site.app.tasks["good.hold_open"].delay(call.label, 1, "open, insert, close, give done")
    assert call.result.get(timeout=10) == again.get(timeout=10) == "done"
    assert call.writes == 1


def test_what_is_in_doubt_runs_again(
    site: PlainSite, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "current", lambda: site.runtime)
    call = site.call(ledger, "hold", "timeout", "charge, insert")
    with pytest.raises(InDoubtError) as doubt:
        call.result.get(timeout=10)
    assert resolve(doubt.value.key, "again", reason="try")
    eventually(lambda: call.writes == 1)
    assert (len(call.requests), len(set(call.requests))) == (2, 1)
