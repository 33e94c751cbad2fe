"""System checks: what is wrong with the settings, said before a worker starts.  None of the first kind asks a server."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.conf import settings
from django.core import checks
from django.db import DatabaseError

from celery_once_fenced import config, doctor
from celery_once_fenced.errors import ConfigError
from celery_once_fenced.runtime import runtime_of
from django_celery_once_fenced import conf, install
from django_celery_once_fenced.fencing.checks import check_guards
from django_celery_once_fenced.store import postgresql

if TYPE_CHECKING:
    from django.core.checks import CheckMessage

TAG = "once_fenced"
_KINDS = {"error": checks.Error, "warning": checks.Warning}
_LEFT_TO_DJANGO = doctor.UNANSWERED | {"E001", "E026"}
"""Findings of the doctor that have a check of their own here, or must not keep ``migrate`` from running."""
_NO_DATABASE = frozenset({"E003", "E024"})
"""Findings after which there is no database to ask."""
READ_COMMITTED = 2  # psycopg.IsolationLevel.READ_COMMITTED; the number spares the import.


@checks.register(TAG)
def check_setting(**_kwargs: Any) -> list[CheckMessage]:
    """E001: the dict is wrong.  E002: its name is misspelt.  W001: there is none."""
    value = getattr(settings, conf.SETTING, None)
    if value is None:
        return [*_misspelt()] or [_missing()]
    return [*_misspelt()] + [
        checks.Error(
            f"{conf.SETTING}: {problem}",
            hint=f"Correct {conf.SETTING} in your settings.",
            id="once_fenced.E001",
        )
        for problem in config.problems(value)
    ]


@checks.register(TAG)
def check_database(**_kwargs: Any) -> list[CheckMessage]:
    """E003: no such alias, or not PostgreSQL.  E004: it has an isolation level that cannot be fenced."""
    try:
        connection = postgresql(conf.alias())
    except ConfigError as error:
        # Nobody named it: a project without PostgreSQL may use the efficiency tier alone.
        return [checks.Error(f"{error}.", id="once_fenced.E003")] if conf.mapping().get("database") else []
    level = connection.settings_dict["OPTIONS"].get("isolation_level", READ_COMMITTED)
    return [] if level == READ_COMMITTED else [_isolated(level)]


@checks.register(TAG)
def check_installed(**_kwargs: Any) -> list[CheckMessage]:
    """E005: the core package stands where the Django app should."""
    if not apps.is_installed("celery_once_fenced"):
        return []
    return [
        checks.Error(
            "celery_once_fenced is in INSTALLED_APPS, but it is no Django app.",
            hint='Write "django_celery_once_fenced" there instead.',
            id="once_fenced.E005",
        )
    ]


@checks.register(TAG)
def check_celery(**_kwargs: Any) -> list[CheckMessage]:
    """E006: no Celery app reads the dict.  W002: there is no Celery app to read it (W4)."""
    if not conf.mapping():
        return []
    apps_of_project = conf.celery_apps()
    if not apps_of_project:
        return [
            checks.Warning(
                f"No Celery app is loaded with Django, so nothing reads {conf.SETTING} in this process.",
                hint="Import the Celery app in the project's __init__.py, as Celery's Django guide shows.",
                id="once_fenced.W002",
            )
        ]
    # One that reads it is enough: a project may have another app for other things.
    if any(app.conf.get("once_fenced") for app in apps_of_project):
        return []
    names = ", ".join(repr(app.main) for app in apps_of_project)
    return [
        checks.Error(
            f"The Celery app {names} does not read {conf.SETTING}.",
            hint='Give it app.config_from_object("django.conf:settings", namespace="CELERY").',
            id="once_fenced.E006",
        )
    ]


@checks.register(checks.Tags.database)
def check_set_up(databases: Sequence[str] | None = None, **_kwargs: Any) -> list[CheckMessage]:
    """E008, E020 and above, W020 and above: what the doctor finds in the project's apps.  Asks Redis and the database.

    Not among the plain checks: Celery runs those when a worker starts, before it binds the tasks, and an app whose
    binding has failed once counts as bound.  The worker itself must fail.
    """
    if not databases:
        return []
    asked = conf.alias() in databases and install.is_migrated(conf.alias())
    return [
        _KINDS[finding.level](f"{finding.text}.", hint=f"{finding.remedy}.", id=f"{TAG}.{finding.id}")
        for app in conf.celery_apps()
        if app.conf.get("once_fenced")
        for finding in _examined(app, asked)
        if finding.id not in _LEFT_TO_DJANGO
    ]


def _examined(app: Any, asked: bool) -> list[doctor.Finding]:
    """Leaves no connection open: a test runner, which runs the checks too, could not drop its database."""
    try:
        return list(doctor.examine(app, database=asked))
    finally:
        with suppress(ConfigError):
            ledger = runtime_of(app).ledger if asked else None
            if ledger is not None:
                ledger.close()


def for_the_doctor(found: frozenset[str] = frozenset()) -> Iterator[doctor.Finding]:
    """What the other checks of this app find, on every database, for ``once doctor``, which has ``found`` by then."""
    findings = [_finding(message) for message in checks.run_checks(tags=[TAG])]
    # A database that did not answer the doctor is not asked again: Django's own connection would wait without end.
    if not _NO_DATABASE & (found | {finding.id for finding in findings}):
        with suppress(DatabaseError):
            for check in (check_functions, check_guards):
                findings += map(_finding, check(app_configs=None, databases=[conf.alias()]))
    yield from findings


def _finding(message: CheckMessage) -> doctor.Finding:
    identity = str(message.id).removeprefix(f"{TAG}.")
    return doctor.Finding(
        identity, str(message.msg).rstrip("."), str(message.hint or "see the text").rstrip(".")
    )


@checks.register(checks.Tags.database)
def check_functions(databases: Sequence[str] | None = None, **_kwargs: Any) -> list[CheckMessage]:
    """W003: the migration is recorded as applied, yet its functions are not there.  Asks the database."""
    alias = conf.alias()
    missing = install.missing_functions(alias) if alias in (databases or ()) else set()
    if not missing:
        return []
    return [
        checks.Warning(
            f"The database {alias!r} lacks SQL functions of once_fenced: {', '.join(sorted(missing))}.",
            hint=(
                "The migrations ran while the setting named another database, or the functions were lost in a restore: "
                f"migrate once_fenced zero --fake --database {alias}, then migrate once_fenced --database {alias}."
            ),
            id="once_fenced.W003",
        )
    ]


def _isolated(level: object) -> CheckMessage:
    return checks.Error(
        f"The database {conf.alias()!r} has the isolation level {level!r}, under which every fenced task is refused.",
        hint="Remove isolation_level from its OPTIONS; a body locks what it reads with select_for_update().",
        id="once_fenced.E004",
    )


def _missing() -> CheckMessage:
    return checks.Warning(
        f"{conf.SETTING} is not set.",
        hint=f'Set {conf.SETTING} = {{"redis_url": "redis://…", "database": "default"}}.',
        id="once_fenced.W001",
    )


def _misspelt() -> Iterator[CheckMessage]:
    for name in dir(settings):
        if name.isupper() and name != conf.SETTING and _resembles(name):
            yield checks.Error(
                f"The setting {name} is never read.",
                hint=f"Did you mean {conf.SETTING}?",
                id="once_fenced.E002",
            )


def _resembles(name: str) -> bool:
    """Whether somebody who wrote ``name`` meant our setting.  ``CELERY_ONCE`` is celery-once's own."""
    bare = name.removeprefix("CELERY").replace("_", "")
    return difflib.SequenceMatcher(a=bare, b="ONCEFENCED").ratio() > 0.8
