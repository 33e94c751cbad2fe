"""Errors cross processes: by pickle, and by Celery's JSON results (W8)."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterator

import pytest
from celery import Celery, states

from celery_once_fenced import errors

ARGUMENTS = {"str": "shop.charge:order=42", "int": 3, "float": 1.5}


def every_error() -> Iterator[Exception]:
    for name in sorted(set(errors.__all__) - {"OnceError"}):
        cls = getattr(errors, name)
        parameters = inspect.signature(cls).parameters.values()
        yield cls(*(ARGUMENTS[parameter.annotation] for parameter in parameters))


def survives(error: Exception, crossing: Callable[[Exception], Exception]) -> None:
    again = crossing(error)
    assert type(again) is type(error)
    assert (again.args, vars(again)) == (error.args, vars(error))


def by_pickle(error: Exception) -> Exception:
    found: Exception = pickle.loads(pickle.dumps(error))
    return found


def by_json(error: Exception) -> Exception:
    backend = Celery("errors", backend="cache+memory://", set_as_current=False).backend
    backend.store_result("id", error, states.FAILURE)
    found: Exception = backend.get_result("id")
    return found


class Careless(Exception):  # noqa: N818  # as careless as they are written
    def __init__(self, key: str, task_id: str) -> None:
        super().__init__(f"{key} is held by {task_id}")


@pytest.mark.parametrize("crossing", [by_pickle, by_json])
@pytest.mark.parametrize("error", list(every_error()), ids=lambda error: type(error).__name__)
def test_error_survives_the_way_to_another_process(
    error: Exception, crossing: Callable[[Exception], Exception]
) -> None:
    survives(error, crossing)
    assert str(error)


@pytest.mark.parametrize("crossing", [by_pickle, by_json])
def test_an_error_that_formats_its_arguments_away_is_caught(
    crossing: Callable[[Exception], Exception],
) -> None:
    with pytest.raises((AssertionError, TypeError)):
        survives(Careless("key", "id"), crossing)
