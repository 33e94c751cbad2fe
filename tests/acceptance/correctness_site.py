"""A place for workers of the correctness tier, and what became of one posting."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import psutil
from django.db import close_old_connections

from django_celery_once_fenced.models import Event, Fence, LedgerEntry
from example_project.shop.models import Account, Entry
from tests.acceptance.shop_app import AMOUNT, POSTGRES, Orders, build
from tests.acceptance.workers import Site, Worker, eventually

BALANCE = 100


class ShopSite(Site):
    """A site whose workers post entries in the shop.  The test process reaches the database by itself (``shop``)."""

    @cached_property
    def app(self) -> Any:
        return build(self.settings)

    @cached_property
    def orders(self) -> Orders:
        return Orders.of(self.app)

    def through(self, **changes: Any) -> ShopSite:
        return ShopSite(super().through(**changes).settings)

    def start(self, **options: Any) -> Worker:
        return super().start(**{"app": "tests.acceptance.shop_app", **options})

    def posting(
        self,
        name: str = "post",
        *acts: str,
        variant: str = "good",
        label: str | None = None,
        account: int | None = None,
        at: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Posting:
        """Call a task with a key, and unless one is named an account, of its own.

        ``at``: what its run is to do at which place (see ``shop_app``); only the first one to come there does it.
        """
        task, label = self.app.tasks[f"{variant}.{name}"], label or uuid.uuid4().hex[:8]
        if account is None:
            account = Account.objects.create(name=label, balance=BALANCE).pk
        posting = Posting(self, task, label, account, acts)
        for point, action in (at or {}).items():
            self.orders.give(posting.named(point), point, action)
        posting.call(**options)
        return posting


class Posting:
    """One call of a task with a key and an account, under checks that do not care who guards it."""

    def __init__(self, site: ShopSite, task: Any, label: str, account: int, acts: tuple[str, ...]) -> None:
        self.site = site
        self.task = task
        self.label = label
        self.account = account
        self.acts = acts
        self.result: Any = None
        self.at = 0.0

    def call(self, **options: Any) -> Any:
        self.at = time.monotonic()
        self.result = self.task.apply_async((self.label, self.account, *self.acts), **options)
        return self.result

    def again(self, **options: Any) -> Any:
        """Another call, the same in all."""
        return self.task.apply_async((self.label, self.account, *self.acts), **options)

    def named(self, point: str) -> str:
        """Orders for places in the body are given by label, for those in the plugin by digest."""
        guarded = hasattr(self.task, "blueprint") and point in ("granted", "completed")
        return self.digest if guarded else self.label
