"""The efficiency lease, seen from its holder: how long to believe it, when to renew it, how long to step aside.

A lease is granted by Redis with a time to live and dies by itself.  The holder never asks Redis whether it still
has it; it believes its own clock, conservatively:

* **held** from the moment the answer arrives until the *trust window* ends.  The window is counted from *before* the
  request was sent, and is shorter than the TTL by a margin for clock drift (E4; the same margin as
  https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/).
* **renewed** at every third of the TTL: a successful renewal moves the window, a failed one does not (E5).
* **lost** when the window has ended, or the store named another holder.  Lost is final: a later successful renewal
  does not bring it back (E5), and it is told to the body, never turned into a failure of its own (E7).

Everything here is a pure function of time or of the answer given; the clock is passed in.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Clock", "Lease", "boot_clock", "deferral", "queued_hold", "trust_window"]

Clock = Callable[[], float]

DRIFT = 0.01
"""Share of the TTL by which two clocks may drift apart."""
RESOLUTION = 0.002
"""Seconds: Redis expires keys with a precision of a millisecond, and rounds."""
BACKOFF_FIRST = 0.25
BACKOFF_MOST = 32.0
SHORTEST_DEFERRAL = 0.05
RETRY_AFTER = 0.5
"""Seconds at most between two tries of a renewal that failed."""
_BOOTTIME: int | None = getattr(time, "CLOCK_BOOTTIME", None)


def boot_clock() -> float:
    """Seconds on a clock that goes on while the machine is suspended, where the platform has one (E4)."""
    return time.monotonic() if _BOOTTIME is None else time.clock_gettime(_BOOTTIME)


def trust_window(ttl: float) -> float:
    """Seconds, from before the request was sent, for which a lease of ``ttl`` seconds may be believed (E4)."""
    return ttl - (ttl * DRIFT + RESOLUTION)


class Lease:
    """One granted lease, as its holder keeps it.  Only ``renewed``, ``refused`` and ``failed`` move it."""

    # No data class: this module is imported with the package, and ``dataclasses`` takes longer than all of Celery's part.

    __slots__ = ("due", "refused_", "renew_until", "trusted_until", "ttl")

    def __init__(self, ttl: float, trusted_until: float, due: float, renew_until: float) -> None:
        self.ttl = ttl
        self.trusted_until = trusted_until
        self.due = due
        """When to renew next."""
        self.renew_until = renew_until
        """No renewal after this (``max_hold``): a hung body does not hold for ever (E6)."""
        self.refused_ = False

    @classmethod
    def granted(cls, ttl: float, *, sent: float, max_hold: float | None) -> Lease:
        until = float("inf") if max_hold is None else sent + max_hold
        return cls(ttl, sent + trust_window(ttl), sent + ttl / 3, until)

    def lost(self, now: float) -> bool:
        """Whether the lease can no longer be believed; once true, for ever true."""
        if now > self.trusted_until:
            self.refused_ = True
        return self.refused_

    def remaining(self, now: float) -> float:
        """Seconds of trust left, 0.0 when lost."""
        return 0.0 if self.lost(now) else self.trusted_until - now

    def renewed(self, *, sent: float, now: float) -> None:
        if not self.lost(now):
            self.trusted_until = sent + trust_window(self.ttl)
            self.due = sent + self.ttl / 3

    def refused(self) -> None:
        self.refused_ = True

    def failed(self, now: float) -> None:
        self.due = now + min(self.ttl / 10, RETRY_AFTER)

    def over(self, now: float) -> bool:
        """Nothing more to renew: lost, or held as long as it may be."""
        return self.lost(now) or now >= self.renew_until


def deferral(
    left: float, *, visibility_timeout: float | None, tries: int, twin: bool, jitter: float
) -> float:
    """Seconds after which a message that stepped aside comes back (D2).

    ``left`` is what is left of the lease in the way.  A twin waits for it; anything else also backs off from a
    quarter of a second, doubling with ``tries``, up to 32 s.  Never more than half the broker's visibility timeout:
    beyond it every waiting copy would itself be delivered again.  ``jitter`` in [0, 1) lengthens by up to a tenth.
    """
    backoff = left if twin else min(left, BACKOFF_FIRST * 2 ** min(tries, 16), BACKOFF_MOST)
    seconds = max(backoff, SHORTEST_DEFERRAL) * (1 + jitter / 10)
    return seconds if visibility_timeout is None else min(seconds, visibility_timeout / 2)


def queued_hold(hold: float, *, delay: float, expires: float | None) -> float:
    """Seconds for which a queued call holds its key: the hold after its delay, but not beyond its expiry (E15)."""
    seconds = hold + max(delay, 0.0)
    return seconds if expires is None else max(min(seconds, expires), 0.001)
