"""The settings dict, ``app.conf.once_fenced`` or ``CELERY_ONCE_FENCED``: checked, typed and frozen.

``problems`` says everything that is wrong at once; ``Settings.from_mapping`` raises it, Django's system
checks list it. Addresses hold passwords, so no address appears in an error unmasked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from celery_once_fenced.durations import parse_duration
from celery_once_fenced.errors import ConfigError
from celery_once_fenced.options import Once
from celery_once_fenced.policy import Policy, resolve
from celery_once_fenced.wording import did_you_mean

if TYPE_CHECKING:
    from celery_once_fenced.keys import KeyText

__all__ = ["Settings", "mask_url", "policy_for", "problems", "unknown_tasks"]

_SCHEMES = ("redis://", "rediss://", "unix://")
_NAMESPACE = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
_SHORTEST_TIMEOUT = 0.001


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """All settings of one app.  Made by ``from_mapping``; ``Settings(redis_url=…)`` alone checks nothing."""

    redis_url: str = field(repr=False)
    """Where leases live: ``redis://``, ``rediss://`` or ``unix://``."""
    database: str | None = None
    """Django database alias of fence and ledger; excludes ``postgres_url``."""
    postgres_url: str | None = field(default=None, repr=False)
    """Address of fence and ledger without Django."""
    transaction: str | Callable[..., Any] | None = None
    """What opens the body's transaction without Django: a maker of context managers, or its path (C14).  Goes with
    ``postgres_url``, in the same database.
    """
    namespace: str = "once"
    """First part of every Redis key, and whose stored messages are published: 1 to 64 of ``A-Za-z0-9_.-``."""
    defaults: Once = field(default_factory=Once)
    """Options for all tasks, weaker than what a task says itself."""
    tasks: Mapping[str, Once] = field(default_factory=lambda: MappingProxyType({}))
    """Options by task name, stronger than what the task says itself."""
    redelivery_window: float | None = None
    """Seconds that a settled delivery is remembered; 0 = off; None: the larger of 1 h and 1.1 times the
    visibility timeout + lease, computed where the broker is known (E8)."""
    socket_timeout: float = 0.5
    """Seconds that Redis may take for an answer."""
    connect_timeout: float = 1.0
    """Seconds that a connection to Redis may take."""
    key_text: KeyText = "plain"
    """``hash``: no argument values in readable keys (K5)."""

    @classmethod
    def from_mapping(
        cls, settings: Mapping[str, object], *, default_redis_url: str | None = None
    ) -> Settings:
        """Check and freeze a settings dict, which is not changed.

        Args:
            settings: What the user wrote.
            default_redis_url: Used where ``redis_url`` is absent, e.g. the broker's if that is Redis.

        Raises:
            ConfigError: with all problems at once.
        """
        found = problems(settings, default_redis_url=default_redis_url)
        if found:
            raise ConfigError("once_fenced: " + "; ".join(found))
        values = {name: value for name, value in settings.items() if value is not None}
        values.setdefault("redis_url", default_redis_url)
        return cls(**{name: _typed(name, value) for name, value in values.items()})


def _typed(name: str, value: Any) -> Any:
    match name:
        case "redis_url":
            return value if isinstance(value, str) else value[0]
        case "defaults":
            return _once(value)
        case "tasks":
            return MappingProxyType({task: _once(options) for task, options in value.items()})
        case "redelivery_window" | "socket_timeout" | "connect_timeout":
            return parse_duration(value, option=name)
    return value


def _once(options: Once | Mapping[str, object]) -> Once:
    return options if isinstance(options, Once) else Once.from_mapping(options)


def policy_for(
    settings: Settings, task: str, once: Sequence[Once] = (), *, hard_limit: float | None = None
) -> Policy:
    """The policy of one task: ``tasks`` > ``once=`` on the task > its base classes > ``defaults`` > built-in.

    Args:
        settings: Those of the app.
        task: Its name.
        once: What the task and its base classes declare, the strongest first.
        hard_limit: The hard time limit in seconds, where it is known: the default of ``max_hold``.

    Raises:
        ConfigError: options that do not go together (E20, W7).
    """
    layers = [layer for layer in (settings.tasks.get(task), *once) if layer is not None]
    return resolve(layers, task=task, hard_limit=hard_limit, defaults=settings.defaults)


def unknown_tasks(settings: Settings, registered_names: Iterable[str]) -> list[str]:
    """Sentences about entries of ``tasks`` that name no registered task: they would silently do nothing."""
    known = set(registered_names)
    return [
        f"tasks[{name!r}] names no registered task{did_you_mean(name, sorted(known))}"
        for name in settings.tasks
        if name not in known
    ]


def mask_url(url: str) -> str:
    """``url`` with ``***`` for its passwords: in the address, the query, or a key=value connection string."""
    url = re.sub(r"(://[^:@/?#]*:).*@", r"\1***@", url, flags=re.DOTALL)
    return re.sub(r"(?i)(pass(?:word|wd)?\s*=\s*)('(?:[^'\\]|\\.)*'|[^\s&]+)", r"\1***", url)


# --- what may be wrong --------------------------------------------------------------------------------------


def problems(settings: object, *, default_redis_url: str | None = None) -> list[str]:
    """All that is wrong with a settings dict, as sentences; empty: nothing."""
    if not isinstance(settings, Mapping):
        return [f"the settings must be a dict, not {type(settings).__name__}"]
    return [*_unknown(settings), *_missing(settings, default_redis_url), *_wrong(settings)]


def _unknown(settings: Mapping[object, object]) -> Iterator[str]:
    known = [item.name for item in fields(Settings)]
    for name in settings:
        if name in CHECKS:
            continue
        hint = did_you_mean(name, known)
        if not hint and name in Once.__dataclass_fields__:
            hint = "; it is an option of tasks: write it into defaults or tasks"
        yield f"{name!r} is no setting{hint or '; the settings are ' + ', '.join(known)}"


def _missing(settings: Mapping[str, object], default_redis_url: str | None) -> Iterator[str]:
    if settings.get("redis_url") is None and default_redis_url is None:
        yield "redis_url is not set; write where the leases live, such as redis://localhost:6379/2"
    if settings.get("database") is not None and settings.get("postgres_url") is not None:
        yield "database and postgres_url exclude each other: a Django alias, or an address without Django"
    if settings.get("transaction") is not None and settings.get("database") is not None:
        yield "database and transaction exclude each other: with a Django alias the transaction is Django's"
    elif settings.get("transaction") is not None and settings.get("postgres_url") is None:
        yield "transaction needs postgres_url, too: claims and renewals go through connections of the plugin's own"


def _wrong(settings: Mapping[str, object]) -> Iterator[str]:
    for name, check in CHECKS.items():
        value = settings.get(name)
        if value is not None:
            yield from check(name, value)


_Check = Callable[[str, Any], Iterator[str]]


def _redis_url(name: str, value: object) -> Iterator[str]:
    if isinstance(value, list | tuple):
        yield f"{name} lists {len(value)} URLs, but Redlock is not available in this version; give one URL"
    elif not isinstance(value, str):
        yield f"{name} must be text, not {type(value).__name__}"
    elif not value.startswith(_SCHEMES):
        yield f"{name} must begin with redis://, rediss:// or unix://{_scheme(value)}"
    elif not value.startswith("unix://") and not (urlsplit(value).path.strip("/") or "0").isdecimal():
        # redis-py would take database 0 without a word, which may be the broker's.
        yield f"{name} ends in {urlsplit(value).path!r}, which is no number of a database, such as /2"


def _scheme(url: str) -> str:
    scheme, separator, _ = url.partition("://")
    return f", not {scheme}://" if separator and scheme.isalnum() else ""


def _text(name: str, value: object) -> Iterator[str]:
    if not isinstance(value, str) or not value:
        yield f"{name} must be text that is not empty"


def _transaction(name: str, value: object) -> Iterator[str]:
    if not callable(value) and not (isinstance(value, str) and "." in value):
        yield f"{name} must be a callable that makes context managers, or its path, as in 'shop.db.session'"


def _namespace(name: str, value: object) -> Iterator[str]:
    if not isinstance(value, str) or not _NAMESPACE.fullmatch(value):
        yield f"{name}={value!r} must be 1 to 64 letters, digits, dots, dashes or underscores"


def _defaults(name: str, value: object) -> Iterator[str]:
    yield from (f"{name}: {problem}" for problem in Once.problems(value))
    scope = value.given().get("scope") if isinstance(value, Once) else _option(value, "scope")
    if scope is not None:
        yield f"{name}: 'scope' for all tasks would make one key of many; set it on the tasks that share it"


def _option(options: object, name: str) -> object:
    return options.get(name) if isinstance(options, Mapping) else None


def _tasks(name: str, value: object) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield f"{name} must be a dict of task names, not {type(value).__name__}"
        return
    for task, options in value.items():
        if not isinstance(task, str):
            yield f"{name}[{task!r}]: a task is named by text, such as 'shop.tasks.rebuild'"
        yield from (f"{name}[{task!r}]: {problem}" for problem in Once.problems(options))


def _window(name: str, value: object) -> Iterator[str]:
    try:
        parse_duration(value, option=name)
    except ConfigError as error:
        yield str(error)


def _timeout(name: str, value: object) -> Iterator[str]:
    wrong = list(_window(name, value))
    yield from wrong
    if not wrong and parse_duration(value, option=name) < _SHORTEST_TIMEOUT:
        yield f"{name}={value!r} is too short; it must be at least 0.001 s"


def _key_text(name: str, value: object) -> Iterator[str]:
    if value not in ("plain", "hash"):
        yield f"{name}={value!r} must be 'plain' or 'hash'"


CHECKS: Mapping[str, _Check] = {
    "redis_url": _redis_url,
    "database": _text,
    "postgres_url": _text,
    "transaction": _transaction,
    "namespace": _namespace,
    "defaults": _defaults,
    "tasks": _tasks,
    "redelivery_window": _window,
    "socket_timeout": _timeout,
    "connect_timeout": _timeout,
    "key_text": _key_text,
}
