"""Every error survives pickle and Celery's result backends, and says what happened (W8)."""

from __future__ import annotations

import json
import pickle

import pytest
from celery import Celery
from celery.backends.base import Backend

import celery_once_fenced
from celery_once_fenced import errors
from celery_once_fenced.errors import OnceError

SAMPLES: dict[str, tuple[tuple[object, ...], str]] = {
    "BusyError": (("report", 12.5), "report is held by another, for 12.5 s more unless it is renewed"),
    "ConfigError": (("lease={} is wrong",), "lease={} is wrong"),
    "DeferralOverflowError": (
        ("feed:1", 100),
        "feed:1 has 100 messages waiting for it, as many as max_deferred allows",
    ),
    "DeferralFailedError": (("t1", "no broker"), "could not defer task t1: no broker"),
    "DuplicateError": (("shop:1", "t1"), "shop:1 is held by task t1"),
    "ExhaustedError": (("shop:1", 5), "shop:1 was given up after 5 takeovers"),
    "FenceMismatchError": (
        ("account:1", "account:2"),
        "the row belongs to resource account:1, the grant is for",
    ),
    "FencedOffError": (("account:1", 7), "fenced off: token 7 for account:1 has been superseded"),
    "GrantError": (("not here",), "not here"),
    "InDoubtError": (("shop:1", "gateway", "2026-01-01"), "effect 'gateway' was started at 2026-01-01"),
    "KeyDerivationError": (("shop.post", "x is missing"), "a call of shop.post: x is missing"),
    "KeyReusedError": (("shop:1", "t1"), "shop:1 was already used by task t1"),
    "LeaseLostError": (("shop:1",), "the lease on shop:1 was lost"),
    "OnceError": (("anything",), "anything"),
    "OutcomeUnknownError": (("shop:1", "gateway"), "the outcome of effect 'gateway' of shop:1 is not known"),
    "RecordedError": (("shop:1", "ValueError", "no"), "shop:1 ended with ValueError: no"),
    "StoreUnavailableError": (("redis", "timed out"), "redis is unavailable: timed out"),
}

every_error = pytest.mark.parametrize("name", errors.__all__)


def sample(name: str) -> OnceError:
    cls: type[OnceError] = getattr(errors, name)
    return cls(*SAMPLES[name][0])


@pytest.fixture(scope="module")
def backend() -> Backend:
    app = Celery("errors", set_as_current=False, broker="memory://")
    return Backend(app=app, serializer="json")


def test_every_error_is_public() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert defined == set(errors.__all__) == set(SAMPLES)
    assert set(errors.__all__) <= set(celery_once_fenced.__all__)


@every_error
def test_message_says_what_happened(name: str) -> None:
    assert SAMPLES[name][1] in str(sample(name))


@every_error
def test_error_is_made_again_from_its_arguments(name: str) -> None:
    error = sample(name)
    again = type(error)(*error.args)
    assert (again.args, str(again), vars(again)) == (error.args, str(error), vars(error))


@every_error
def test_error_survives_pickle(name: str) -> None:
    error = sample(name)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.args, vars(again)) == (type(error), error.args, vars(error))


@every_error
def test_error_survives_a_json_result_backend(name: str, backend: Backend) -> None:
    error = sample(name)
    stored = json.loads(json.dumps(backend.prepare_exception(error)))
    again = backend.exception_to_python(stored)
    assert (type(again), again.args, vars(again)) == (type(error), error.args, vars(error))


@every_error
def test_error_is_rooted_in_one_class(name: str) -> None:
    assert isinstance(sample(name), OnceError)


def test_wrong_configuration_and_wrong_calls_are_what_python_calls_them() -> None:
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.KeyDerivationError, TypeError)


def test_value_with_braces_is_no_template() -> None:
    assert str(errors.DuplicateError("{1}", "{0}")) == "{1} is held by task {0}"
