"""A Django project with two databases and a router: the alias in the settings has fence, ledger and the body's transaction."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import psycopg
import pytest

from example_project.servers import Servers
from tests.acceptance.correctness_orders import Orders
from tests.acceptance.shop_app import POSTGRES
from tests.acceptance.two_databases_app import SECOND, build
from tests.acceptance.workers import Site
from tests.fixtures.ledger import WRITES, ledger_at
from tests.fixtures.servers import fresh_database


class TwoDatabases(Site):
    @cached_property
    def app(self) -> Any:
        return build(self.settings)


@pytest.fixture(scope="module")
def urls(servers: Servers, module_postgres_url: str) -> Iterator[Mapping[str, str]]:
    """Addresses by alias.  The default one has no tables of the plugin's."""
    with fresh_database(servers) as url, ledger_at(module_postgres_url):
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(WRITES)
        yield {"default": url, "second": module_postgres_url}


@pytest.fixture(scope="module")
def site(servers: Servers, urls: Mapping[str, str]) -> Iterator[TwoDatabases]:
    named = {POSTGRES: urls["default"], SECOND: urls["second"]}
    site = TwoDatabases.at(servers.redis_url, once_fenced={"database": "second"}, **named)
    assert isinstance(site, TwoDatabases)
    with site.worker(app="tests.acceptance.two_databases_app", concurrency=2):
        yield site
    site.close()


def killed_body_writes_once(site: TwoDatabases, urls: Mapping[str, str], alias: str) -> None:
    label = uuid.uuid4().hex[:8]
    Orders.of(site.app).give(label, "written", "die")
    assert site.app.tasks["good.write"].delay(label, alias).get(timeout=20) == alias
    assert site.stage.runs(label) == 2
    with psycopg.connect(urls[alias]) as connection:
        rows = connection.execute("select 1 from writes where resource = %s", (label,)).fetchall()
    assert len(rows) == 1, f"written {len(rows)} times"


def test_alias_in_the_settings_wins(site: TwoDatabases, urls: Mapping[str, str]) -> None:
    killed_body_writes_once(site, urls, "second")


def test_writes_to_another_database_are_caught(site: TwoDatabases, urls: Mapping[str, str]) -> None:
    """What is not promised: they are in no transaction of the plugin's."""
    with pytest.raises(AssertionError, match="written 2 times"):
        killed_body_writes_once(site, urls, "default")


def test_plugin_has_nothing_in_the_other_database(site: TwoDatabases, urls: Mapping[str, str]) -> None:
    found = {}
    for alias, url in urls.items():
        with psycopg.connect(url) as connection:
            found[alias] = connection.execute(
                "select to_regclass('once_fenced_ledger') is not null"
            ).fetchone()
    assert found == {"default": (False,), "second": (True,)}
