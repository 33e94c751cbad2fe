"""System checks: each problem of the settings is an Error that says what to do; none asks a server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from django.core import checks
from django.test import override_settings

from celery_once_fenced import SingletonTask

GOOD: dict[str, Any] = {"redis_url": "redis://nowhere.invalid", "database": "default", "namespace": "shop"}


def found(**settings: Any) -> dict[str, checks.CheckMessage]:
    with override_settings(**settings):
        return {str(message.id): message for message in checks.run_checks(tags=["once_fenced"])}


def test_the_example_settings_are_clean() -> None:
    assert found() == {}


def test_an_unknown_name_is_an_error_with_a_did_you_mean() -> None:
    message = found(CELERY_ONCE_FENCED=GOOD | {"redis_ulr": "redis://"})["once_fenced.E001"]
    assert message.level == checks.ERROR
    assert "redis_ulr" in message.msg
    assert "redis_url" in message.msg
    assert message.hint


def test_every_problem_is_told_not_only_the_first() -> None:
    with override_settings(CELERY_ONCE_FENCED=GOOD | {"namespce": "x", "tsks": {}}):
        told = [message.msg for message in checks.run_checks(tags=["once_fenced"])]
    assert [name for name in ("namespce", "tsks") if any(name in message for message in told)] == [
        "namespce",
        "tsks",
    ]


def test_a_setting_that_is_no_dict_is_an_error() -> None:
    assert "once_fenced.E001" in found(CELERY_ONCE_FENCED=[("redis_url", "redis://")])


@pytest.mark.parametrize(
    "name", ["ONCE_FENCED", "CELERY_ONCE_FENCE", "CELERY_ONCE_FENCD", "CELERYONCEFENCED"]
)
def test_a_misspelt_setting_is_found(name: str) -> None:
    message = found(CELERY_ONCE_FENCED=None, **{name: GOOD})["once_fenced.E002"]
    assert name in message.msg
    assert "CELERY_ONCE_FENCED" in str(message.hint)


def test_the_setting_of_celery_once_is_not_taken_for_ours() -> None:
    assert found(CELERY_ONCE_FENCED=None, CELERY_ONCE={"backend": "x"}).keys() == {"once_fenced.W001"}


def test_an_alias_that_does_not_exist_is_an_error_naming_it() -> None:
    message = found(CELERY_ONCE_FENCED=GOOD | {"database": "ledgr"})["once_fenced.E003"]
    assert "'ledgr'" in message.msg
    assert "default" in message.msg


def test_an_alias_that_is_not_postgresql_is_an_error(sqlite: str) -> None:
    message = found(CELERY_ONCE_FENCED=GOOD | {"database": sqlite})["once_fenced.E003"]
    assert sqlite in message.msg
    assert "sqlite" in message.msg


def test_a_project_without_postgresql_may_use_the_efficiency_tier_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("django.db.backends.postgresql.base.DatabaseWrapper.vendor", "oracle")
    assert found(CELERY_ONCE_FENCED={"redis_url": "redis://nowhere.invalid"}) == {}


def test_an_isolation_level_that_cannot_be_fenced_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from django.db import connections

    monkeypatch.setitem(connections["default"].settings_dict, "OPTIONS", {"isolation_level": 4})
    assert found().keys() == {"once_fenced.E004"}


def test_two_databases_are_an_error() -> None:
    message = found(CELERY_ONCE_FENCED=GOOD | {"postgres_url": "postgresql://nowhere.invalid/x"})[
        "once_fenced.E001"
    ]
    assert "exclude each other" in message.msg


def test_the_core_package_in_installed_apps_is_an_error_naming_the_app() -> None:
    apps = ["django.contrib.contenttypes", "django_celery_once_fenced", "celery_once_fenced"]
    assert "django_celery_once_fenced" in str(found(INSTALLED_APPS=apps)["once_fenced.E005"].hint)


def test_a_celery_app_that_never_reads_the_dict_is_an_error_naming_the_namespace(
    stray_app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery._state._apps", {stray_app})
    stray_app.config_from_object("django.conf:settings")
    message = found()["once_fenced.E006"]
    assert "'stray'" in message.msg
    assert 'namespace="CELERY"' in str(message.hint)


def test_a_celery_app_with_the_namespace_is_fine(stray_app: Celery) -> None:
    stray_app.config_from_object("django.conf:settings", namespace="CELERY")
    assert found() == {}


@pytest.mark.usefixtures("stray_app")
def test_another_celery_app_of_the_project_need_not_read_it() -> None:
    assert found() == {}


def test_no_celery_app_at_all_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery._state._apps", set())
    assert found().keys() == {"once_fenced.W002"}


@pytest.fixture
def stray_app() -> Iterator[Celery]:
    app = Celery("stray", set_as_current=False)
    yield app
    app.close()


@pytest.fixture
def sqlite() -> Iterator[str]:
    """An alias of another kind."""
    from django.db import connections

    connections.settings["files"] = connections.settings["default"] | {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": ":memory:",
    }
    yield "files"
    del connections.settings["files"], connections["files"]


def test_options_of_a_task_that_cannot_be_kept_are_an_error_beside_the_database(
    stray_app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery._state._apps", {stray_app})
    monkeypatch.setattr("celery._state._on_app_finalizers", set())
    from django_celery_once_fenced.checks import check_set_up

    stray_app.conf.once_fenced = GOOD | {"tasks": {"stray.flip": {"tier": "correctness"}}}
    stray_app.task(name="stray.flip", base=SingletonTask, shared=False)(found)
    (message,) = check_set_up(databases=["another"])  # so that none is asked
    assert message.id == "once_fenced.E008"
    assert "replay_for" in message.msg
