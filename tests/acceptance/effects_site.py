"""A place for workers that call the gateway, and what became of one call."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from tests.acceptance.correctness_posting import Posting
from tests.acceptance.correctness_site import ShopSite
from tests.acceptance.effects_app import EVENT_POINTS, build
from tests.acceptance.effects_gateway import Gateway
from tests.acceptance.workers import Worker

SCRIPTS = {"in the body": "charge, post", "outside a transaction": "charge, open, post, close"}
"""The same work under ``atomic=True`` and ``atomic=False``."""


class Charge(Posting):
    """One call that charges and posts, and what the gateway's books say of it."""

    def named(self, point: str) -> str:
        """Orders for what the plugin tells go by digest, those in the body and for what is sent by label."""
        return self.digest if self.guarded and point in EVENT_POINTS.values() else self.label

    @property
    def requests(self) -> list[str]:
        return Gateway.of(self.site.app).requests(self.label)

    @property
    def charges(self) -> int:
        return Gateway.of(self.site.app).charges(self.label)

    @property
    def text(self) -> str:
        """The readable key."""
        return str(self._key.text)


class EffectsSite(ShopSite):
    """A site whose workers charge at the gateway."""

    @cached_property
    def app(self) -> Any:
        return build(self.settings)

    def through(self, **changes: Any) -> EffectsSite:
        return EffectsSite(super().through(**changes).settings)

    def start(self, **options: Any) -> Worker:
        return super().start(**{"app": "tests.acceptance.effects_app", **options})

    def prepared(
        self,
        name: str = "hold",
        *acts: str,
        variant: str = "good",
        account: int | None = None,
        at: Mapping[str, str] | None = None,
    ) -> Charge:
        made = super().prepared(name, *acts, variant=variant, account=account)
        charge = Charge(self, made.task, made.label, made.account, acts)
        for point, action in (at or {}).items():
            self.orders.give(charge.named(point), point, action)
        return charge

    def charge(self, name: str, *acts: str, **given: Any) -> Charge:
        """A call that is made: see :meth:`prepared`."""
        made = self.prepared(name, *acts, **given)
        made.call()
        return made


def charged_once(charge: Charge) -> None:
    """However often it was asked, the gateway has charged once: it was always the same key."""
    assert charge.charges == 1, f"charged {charge.charges} times"
    assert len(set(charge.requests)) == 1
