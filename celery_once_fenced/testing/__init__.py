"""For tests of projects that use the plugin: the real semantics in eager mode, without a broker, a worker or Redis.

    with enforce_once() as once:
        with once.queueing():                   # as if no worker were up
            first = refresh_feed.delay(7)
            second = refresh_feed.delay(7)
        assert_suppressed(second, by=first)

See docs/how-to/test-your-tasks.  Needs nothing but the package itself; pytest finds its fixtures in ``pytest_plugin``.
"""

from __future__ import annotations

from celery_once_fenced.testing.asserts import assert_free, assert_held, assert_suppressed
from celery_once_fenced.testing.clock import Clock
from celery_once_fenced.testing.enforced import Enforced, enforce_once
from celery_once_fenced.testing.namespace import own_namespace
from celery_once_fenced.testing.results import EagerError, LaterResult

__all__ = [
    "Clock",
    "EagerError",
    "Enforced",
    "LaterResult",
    "assert_free",
    "assert_held",
    "assert_suppressed",
    "enforce_once",
    "own_namespace",
]
