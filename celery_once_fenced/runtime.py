"""What one Celery app has open: its settings, stores, admission and guard, made when first needed (W11).

The composition root: the only place where drivers are chosen.  Nothing connects here; stores open their connections
with their first question, so a process that only declares tasks opens none, and a forked child opens its own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from celery_once_fenced import outbox
from celery_once_fenced.admission import Admission
from celery_once_fenced.arrears import Arrears
from celery_once_fenced.config import Settings
from celery_once_fenced.correctness import Correctness
from celery_once_fenced.detached import Detached
from celery_once_fenced.errors import ConfigError, StoreUnavailableError
from celery_once_fenced.events import emit
from celery_once_fenced.guard import Guard
from celery_once_fenced.keepers import FenceKeeper, LeaseKeeper
from celery_once_fenced.ledger import Codec
from celery_once_fenced.observers.logging import start_logging
from celery_once_fenced.outbox import Post
from celery_once_fenced.stores import Database, LeaseStore, LedgerStore

if TYPE_CHECKING:
    from celery_once_fenced.stores.redis import RedisLeaseStore

__all__ = ["Runtime", "current", "current_app", "register_database", "runtime_of"]

DEFAULT_VISIBILITY_TIMEOUT = {
    "redis": 3600.0,
    "rediss": 3600.0,
    "sentinel": 3600.0,
    "valkey": 3600.0,
    "sqs": 1800.0,
}
"""Seconds after which kombu's transports deliver an unacknowledged message again, by URL scheme."""

READING_TIMEOUT = 5.0
"""Seconds that a reading of all holds may wait for one answer."""

DatabaseFactory = Callable[[str | None], Any]
"""Takes the Django alias that the settings name; gives a ``Database`` that also has ``conninfo() -> dict`` for the plugin's
own connections, or None where no alias is named and the default one cannot be fenced."""

_database_factory: DatabaseFactory | None = None
_runtimes: weakref.WeakKeyDictionary[Any, Runtime] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def register_database(factory: DatabaseFactory) -> None:
    """Tell the core how to reach databases by Django alias; called by the Django app when it is ready."""
    global _database_factory
    _database_factory = factory


def runtime_of(app: Any) -> Runtime:
    """The runtime of a Celery app; made from ``app.conf.once_fenced`` at the first call.

    Raises ``ConfigError`` when a setting is unknown or invalid.
    """
    app = app._get_current_object() if hasattr(app, "_get_current_object") else app
    with _lock:
        runtime = _runtimes.get(app)
        if runtime is None:
            runtime = _runtimes[app] = Runtime(app)
        return runtime


def current() -> Runtime:
    """The runtime for code outside tasks: of the current app, or of the one app that has settings (W4).

    Raises ``ConfigError`` where no app of this process has a ``once_fenced`` setting, or that is wrong.
    """
    return runtime_of(current_app())


def current_app() -> Any:
    """The app that :func:`current` takes, whether or not its settings are right.

    ``current_app`` of Celery is thread-local: a web thread that never used Celery sees a default app without
    configuration.
    """
    from celery import _state

    apps = [_state.get_current_app(), *_state._get_active_apps()]
    for app in apps:
        if app.conf.get("once_fenced") is not None:
            return app
    raise ConfigError(
        "no Celery app of this process has the setting once_fenced (CELERY_ONCE_FENCED in Django settings, read by "
        'app.config_from_object("django.conf:settings", namespace="CELERY")); import the module of your app first'
    )


class Runtime:
    """Settings, stores, admission and guard of one app in one process."""

    outbox_age = outbox.AGE
    """Seconds after which a message that nobody confirmed is published by a sweep, and between two sweeps."""

    def __init__(self, app: Any) -> None:
        start_logging()
        self._app = weakref.ref(app)
        self.settings = Settings.from_mapping(app.conf.get("once_fenced") or {})

    @property
    def app(self) -> Any:
        """The Celery app.  Raises ``ConfigError`` when it is gone."""
        app = self._app()
        if app is None:
            raise ConfigError("the Celery app of these settings is gone")
        return app

    @cached_property
    def leases(self) -> LeaseStore:
        from celery_once_fenced.stores.redis import RedisLeaseStore

        return self._on_redis(RedisLeaseStore, self.settings.socket_timeout)

    @property
    def readings(self) -> LeaseStore:
        """The leases as metrics and people read them: patiently, and with a breaker of their own, so that a long reading
        on a busy server does not let calls run unguarded.
        """
        return self._patient or self.leases

    @cached_property
    def _patient(self) -> LeaseStore | None:
        from celery_once_fenced.stores.redis import RedisLeaseStore

        if not isinstance(self.leases, RedisLeaseStore):  # a store in memory has nothing to wait for
            return None
        return self._on_redis(RedisLeaseStore, max(self.settings.socket_timeout, READING_TIMEOUT))

    def _on_redis(self, store: type[RedisLeaseStore], timeout: float) -> RedisLeaseStore:
        settings = self.settings
        return store(
            settings.redis_url,
            namespace=settings.namespace,
            socket_timeout=timeout,
            connect_timeout=settings.connect_timeout,
        )

    @property
    def has_database(self) -> bool:
        """Whether the correctness tier has a database to stand on."""
        return self.database is not None

    @cached_property
    def database(self) -> Database | None:
        settings = self.settings
        if settings.postgres_url is not None and settings.transaction is not None:
            from celery_once_fenced.stores.postgres_project import ProjectDatabase

            return ProjectDatabase(settings.transaction, settings.postgres_url)
        if settings.postgres_url is not None:
            from celery_once_fenced.stores.postgres import PsycopgDatabase

            return PsycopgDatabase(settings.postgres_url)
        found: Database | None = _database_factory and _database_factory(settings.database)
        return found

    @cached_property
    def ledger(self) -> LedgerStore | None:
        if self.database is None:
            return None
        from celery_once_fenced.stores.postgres import PostgresLedgerStore

        source = self.settings.postgres_url or self.database.conninfo  # type: ignore[attr-defined]
        return PostgresLedgerStore(source, connect_timeout=self.settings.connect_timeout)

    @cached_property
    def keeper(self) -> LeaseKeeper:
        return LeaseKeeper(self.leases)

    @cached_property
    def admission(self) -> Admission:
        return Admission(self.leases, self.arrears)

    @cached_property
    def arrears(self) -> Arrears:
        return Arrears(self.leases)

    @cached_property
    def guard(self) -> Guard:
        return Guard(
            self.leases,
            self._correctness(),
            keeper=self.keeper,
            backing=Detached(lambda: self),
            arrears=self.arrears,
        )

    def _correctness(self) -> Correctness | None:
        if self.database is None or self.ledger is None:
            return None
        return Correctness(
            self.ledger,
            self.database,
            self.codec,
            self.post,
            namespace=self.settings.namespace,
            keeper=self.fence_keeper,
        )

    @cached_property
    def fence_keeper(self) -> FenceKeeper:
        if self.ledger is None:
            raise ConfigError("there are no fences: name a database in the setting once_fenced")
        return FenceKeeper(self.ledger)

    @cached_property
    def codec(self) -> Codec:
        """Kombu's JSON, which every result backend and broker speaks (L6)."""
        from kombu.utils import json

        return json.dumps, json.loads

    @cached_property
    def post(self) -> Post:
        """The way of stored messages to the broker."""
        from celery_once_fenced.post import CeleryPost

        return CeleryPost(self.app)

    def sweep(self) -> None:
        """Publish what workers that died left in the outbox (L9).  Never raises."""
        if self.ledger is None:
            return
        try:
            outbox.sweep(self.ledger, self.post, self.settings.namespace, age=self.outbox_age)
        except StoreUnavailableError as error:
            emit("store.failed", operation="sweep", key="", why=str(error))

    @cached_property
    def visibility_timeout(self) -> float | None:
        """Seconds after which the broker delivers an unacknowledged message again; None where it never does by time."""
        app = self._app()
        if app is None:
            return None
        url = app.conf.broker_read_url or ""
        first = url if isinstance(url, str) else next(iter(url), "")  # a list names fallbacks
        default = DEFAULT_VISIBILITY_TIMEOUT.get(urlsplit(first).scheme.split("+")[0])
        given = (app.conf.broker_transport_options or {}).get("visibility_timeout")
        return default if given is None or default is None else float(given)

    @cached_property
    def bounds_producers(self) -> bool:
        """Whether taking a producer from Celery's pool has a time limit: then Celery is to do it, and to tell."""
        return getattr(self.app.conf, "broker_pool_acquire_timeout", None) is not None

    def redelivery_window(self, lease: float) -> float:
        """Seconds for which a settled delivery is remembered: the setting, or long enough for one redelivery (E8)."""
        if self.settings.redelivery_window is not None:
            return self.settings.redelivery_window
        return max(3600.0, 1.1 * (self.visibility_timeout or 0.0) + lease)

    def close(self) -> None:
        """Close every connection of this process."""
        for name in ("leases", "_patient", "ledger", "database"):
            store = self.__dict__.pop(name, None)
            if hasattr(store, "close"):
                store.close()
        for name in ("admission", "fence_keeper", "guard", "keeper"):
            self.__dict__.pop(name, None)
