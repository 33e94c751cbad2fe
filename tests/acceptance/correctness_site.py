"""A place for workers of the correctness tier."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from example_project.shop.models import Account
from tests.acceptance.correctness_orders import Orders
from tests.acceptance.correctness_posting import BALANCE, Posting
from tests.acceptance.shop_app import POSTGRES, build
from tests.acceptance.workers import PARKED, QUEUE, Site, Worker

APP = "tests.acceptance.shop_app"


class ShopSite(Site):
    """A site whose workers post entries in the shop.  The test process reaches the database by itself (``shop``)."""

    @classmethod
    def on(cls, redis_url: str, postgres_url: str, **options: Any) -> ShopSite:
        """See ``Site.at``; workers reach PostgreSQL at ``postgres_url``, which may be a proxy's."""
        once_fenced = {"tasks": {"flipped.post": {"tier": "correctness", "replay_for": 0}}}
        return cls(
            Site.at(redis_url, once_fenced=once_fenced, **{POSTGRES: postgres_url}, **options).settings
        )

    def through(self, **changes: Any) -> ShopSite:
        return ShopSite(super().through(**changes).settings)

    @cached_property
    def app(self) -> Any:
        return build(self.settings)

    @cached_property
    def orders(self) -> Orders:
        return Orders.of(self.app)

    def start(self, **options: Any) -> Worker:
        return super().start(**{"app": APP, **options})

    def prepared(
        self,
        name: str = "post",
        *acts: str,
        variant: str = "good",
        account: int | None = None,
        at: Mapping[str, str] | None = None,
    ) -> Posting:
        """A call that is yet to be made, with a key, and unless one is named an account, of its own.

        ``at``: what its run is to do at which place (see ``shop_app``); only the first one to come there does it.
        """
        label = uuid.uuid4().hex[:8]
        if account is None:
            account = Account.objects.create(name=label, balance=BALANCE).pk
        posting = Posting(self, self.app.tasks[f"{variant}.{name}"], label, account, acts)
        for point, action in (at or {}).items():
            self.orders.give(posting.named(point), point, action)
        return posting

    def posting(
        self, name: str = "post", *acts: str, options: Mapping[str, Any] | None = None, **given: Any
    ) -> Posting:
        """A call that is made: see :meth:`prepared`; ``options`` are those of ``apply_async``."""
        posting = self.prepared(name, *acts, **given)
        posting.call(**(options or {}))
        return posting

    def redeliver(self, task_id: str) -> None:
        """Deliver a message that is with a worker once more, as the broker does after its visibility timeout."""
        taken = [json.loads(line)[0] for line in self.redis.hvals(f"{self.name}.unacked")]
        (message,) = [one for one in taken if one["headers"]["id"] == task_id]
        self.deliver(message, redelivered=True)

    def caught(self) -> dict[str, Any]:
        """The message of a call to the queue ``parked``, before any worker sees it."""
        return json.loads(str(self.redis.lpop(f"{self.name}.{PARKED}")))

    def forget_settled(self) -> None:
        """Delete all tombstones, as if no delivery had been settled."""
        for key in self.redis.scan_iter(match=f"{{{self.name}:*done:*", count=1000):
            self.redis.delete(key)

    def pending(self, task_id: str) -> int:
        """How many copies of a message wait in the queue, or are with a worker that has not acknowledged them."""
        waiting = self.messages(QUEUE)
        taken = [json.loads(line)[0] for line in self.redis.hvals(f"{self.name}.unacked")]
        return sum(message["headers"]["id"] == task_id for message in [*waiting, *taken])
