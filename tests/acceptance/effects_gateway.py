"""The other system: it keeps a log of its own of every request, and takes a repeated key for the same charge."""

from __future__ import annotations

import os
from typing import Any

import redis

from tests.acceptance.stage import SETTING


class DeclinedError(Exception):
    """The gateway refused: for certain nothing was charged."""


class Gateway:
    """A payment gateway with its books in Redis, out of every worker's reach.  One for each process and app."""

    def __init__(self, url: str, prefix: str) -> None:
        self._redis = redis.Redis.from_url(url, decode_responses=True)
        self._prefix = prefix

    @classmethod
    def of(cls, app: Any) -> Gateway:
        made = app.__dict__.setdefault("_acceptance_gateways", {})
        if os.getpid() not in made:
            made[os.getpid()] = cls(**app.conf[SETTING])
        gateway: Gateway = made[os.getpid()]
        return gateway

    def charge(self, label: str, key: str) -> dict[str, str]:
        """Charge once per key; answers with the receipt.  Refuses as often as it was told to."""
        self._redis.rpush(f"{self._prefix}requests:{label}", key)
        if self._redis.lpop(f"{self._prefix}refusals:{label}"):
            raise DeclinedError(label)
        self._redis.sadd(f"{self._prefix}charges:{label}", key)
        self._redis.sadd(f"{self._prefix}charged", key)
        return {"receipt": f"{label} {key}"}

    def knows(self, key: str) -> bool:
        return bool(self._redis.sismember(f"{self._prefix}charged", key))

    def refuses(self, label: str) -> None:
        """The next request of this label is refused."""
        self._redis.rpush(f"{self._prefix}refusals:{label}", 1)

    # --- the judge ----------------------------------------------------------------------------------------------------

    def requests(self, label: str) -> list[str]:
        """The key of every request, in order."""
        return list(self._redis.lrange(f"{self._prefix}requests:{label}", 0, -1))

    def charges(self, label: str) -> int:
        return int(self._redis.scard(f"{self._prefix}charges:{label}"))

    # --- what a naive task keeps --------------------------------------------------------------------------------------

    def mark(self, label: str, seconds: float) -> bool:
        """Set a mark that goes away by itself; False while it is there."""
        return bool(self._redis.set(f"{self._prefix}mark:{label}", 1, nx=True, px=int(seconds * 1000)))

    def close(self) -> None:
        self._redis.close()
