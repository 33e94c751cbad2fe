"""What is known of an app's tasks, for figures and explanations."""

from __future__ import annotations

import pytest
from celery import Celery

from celery_once_fenced import FencedTask, Once, SingletonTask
from celery_once_fenced.figures import policies


@pytest.fixture(autouse=True)
def no_other_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared tasks of other tests are no matter here."""
    monkeypatch.setattr("celery._state._on_app_finalizers", set())


def app_with(base: type) -> Celery:
    app = Celery("figures", set_as_current=False)
    app.conf.once_fenced = {"redis_url": "redis://127.0.0.1:1"}

    @app.task(base=base, once=Once(lease=45), name="shop.feed", shared=False)  # type: ignore[untyped-decorator]
    def feed() -> None: ...

    return app


def test_policies_are_those_of_the_guarded_tasks() -> None:
    assert {name: policy.lease for name, policy in policies(app_with(SingletonTask)).items()} == {
        "shop.feed": 45
    }


def test_an_app_that_cannot_make_its_tasks_has_no_policies_and_keeps_nobody_from_looking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("celery_once_fenced.runtime._database_factory", None)
    assert policies(app_with(FencedTask)) == {}
