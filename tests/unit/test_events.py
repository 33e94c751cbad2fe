"""Observers, and the log that is one of them."""

from __future__ import annotations

import logging

import pytest

from celery_once_fenced.events import Event, emit, observing, subscribe, unsubscribe
from celery_once_fenced.observers import logging as log
from celery_once_fenced.observers.logging import log_event


def test_observer_sees_name_and_fields() -> None:
    seen: list[Event] = []
    with observing(seen.append):
        emit("lease.lost", key="k", task="t")
    assert seen == [Event("lease.lost", {"key": "k", "task": "t"})]


def test_observer_sees_nothing_after_its_block() -> None:
    seen: list[Event] = []
    with observing(seen.append):
        pass
    emit("lease.lost")
    assert seen == []


def test_subscribe_is_a_decorator_and_unsubscribe_undoes_it() -> None:
    seen: list[Event] = []

    @subscribe
    def observer(event: Event) -> None:
        seen.append(event)

    emit("first.seen")
    unsubscribe(observer)
    emit("second.unseen")
    assert [event.name for event in seen] == ["first.seen"]


def test_unsubscribing_a_stranger_is_an_error() -> None:
    with pytest.raises(ValueError, match="not in list"):
        unsubscribe(print)


def test_observer_that_raises_is_logged_and_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Event] = []

    def broken(event: Event) -> None:
        raise RuntimeError("broken")

    with observing(broken), observing(seen.append):
        emit("lease.lost")
    assert len(seen) == 1
    assert "failed on lease.lost" in caplog.text


def test_observer_may_leave_while_it_is_told() -> None:
    seen: list[str] = []

    def once(event: Event) -> None:
        seen.append("once")
        unsubscribe(once)

    subscribe(once)
    with observing(lambda event: seen.append("other")):
        emit("lease.lost")
    assert seen == ["once", "other"]


@pytest.mark.parametrize(
    ("name", "level"),
    [("lease.lost", "WARNING"), ("duplicate.suppressed", "INFO"), ("fence.acquired", "DEBUG")],
)
def test_event_is_logged_at_the_level_it_deserves(
    caplog: pytest.LogCaptureFixture, name: str, level: str
) -> None:
    with caplog.at_level(logging.DEBUG, "celery_once_fenced"):
        log_event(Event(name, {"key": "k"}))
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == (level, f"{name} key=k")
    assert record.__dict__["once_fenced"] == {"key": "k"}


def test_what_is_below_the_level_is_not_put_into_words(caplog: pytest.LogCaptureFixture) -> None:
    class Costly:
        def __str__(self) -> str:
            raise AssertionError("formatted for nobody")

    with caplog.at_level(logging.WARNING, "celery_once_fenced"):
        log_event(Event("duplicate.suppressed", {"key": Costly()}))
    assert caplog.records == []


def test_logging_starts_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("celery_once_fenced.events._observers", [])
    monkeypatch.setattr(log, "_started", False)
    log.start_logging()
    log.start_logging()
    with caplog.at_level(logging.INFO, "celery_once_fenced"):
        emit("duplicate.suppressed")
    assert len(caplog.records) == 1
