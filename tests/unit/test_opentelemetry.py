"""What OpenTelemetry is told, as its own SDK exports it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import messaging_attributes

from celery_once_fenced.events import emit, observing, unsubscribe
from celery_once_fenced.observers.opentelemetry import (
    CONVENTIONS,
    OUTCOMES,
    SYSTEM,
    OpenTelemetryObserver,
    start_tracing,
)
from tests.fixtures.deliveries import Bench
from tests.unit.test_guard import post
from tests.unit.test_reference_pages import documented

EVENT = {"key": "ab", "task": "shop.feed", "task_id": "t1", "token": 8}


@pytest.fixture
def exported() -> Iterator[tuple[TracerProvider, InMemorySpanExporter]]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider, exporter
    provider.shutdown()


def traced(
    exported: tuple[TracerProvider, InMemorySpanExporter], *events: tuple[str, dict[str, Any]]
) -> ReadableSpan:
    """The span in which the events happened."""
    provider, exporter = exported
    with observing(OpenTelemetryObserver()), provider.get_tracer("test").start_as_current_span("run"):
        for name, fields in events:
            emit(name, **fields)
    (span,) = exporter.get_finished_spans()
    return span


def test_an_event_is_an_event_of_the_current_span(exported: Any) -> None:
    span = traced(exported, ("fence.acquired", EVENT))
    (event,) = span.events
    assert event.name == "fence.acquired"
    assert dict(event.attributes or {}) == {
        "once_fenced.key": "ab",
        "once_fenced.task": "shop.feed",
        "messaging.message.id": "t1",
        "once_fenced.token": 8,
    }


def test_what_identifies_the_job_is_an_attribute_of_the_span(exported: Any) -> None:
    span = traced(exported, ("fence.acquired", EVENT), ("execution.deferred", {"key": "ab", "seconds": 2.0}))
    assert dict(span.attributes or {}) == {
        "messaging.system": "celery",
        "messaging.message.id": "t1",
        "once_fenced.key": "ab",
        "once_fenced.task": "shop.feed",
        "once_fenced.token": 8,
        "once_fenced.outcome": "execution.deferred",
    }


def test_the_last_outcome_stands(exported: Any) -> None:
    span = traced(exported, ("fence.rejected", {"key": "ab"}), ("ledger.replayed", {"key": "ab"}))
    assert (span.attributes or {})["once_fenced.outcome"] == "ledger.replayed"


def test_values_that_are_no_attributes_are_written_out(exported: Any) -> None:
    span = traced(exported, ("lease.lost", {"key": "ab", "holder": None}))
    assert (span.events[0].attributes or {})["once_fenced.holder"] == "None"


def test_a_real_run_can_be_searched_for(exported: Any) -> None:
    provider, exporter = exported
    with observing(OpenTelemetryObserver()), provider.get_tracer("test").start_as_current_span("run"):
        Bench().run(post(), lambda grant: grant.token)
    (span,) = exporter.get_finished_spans()
    attributes = span.attributes or {}
    assert (attributes["once_fenced.outcome"], attributes["once_fenced.token"]) == ("ledger.succeeded", 1)
    assert attributes["messaging.message.id"]
    assert [event.name for event in span.events][:1] == ["fence.acquired"]


def test_without_a_span_nothing_happens() -> None:
    with observing(OpenTelemetryObserver()):
        emit("lease.lost", **EVENT)


def test_a_span_that_is_not_recorded_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Costly:
        def __str__(self) -> str:
            raise AssertionError("written out for nobody")

    with observing(OpenTelemetryObserver()):
        emit("lease.lost", key=Costly())


def test_events_are_counted_by_name_and_task_where_a_meter_is_given() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    with observing(OpenTelemetryObserver(provider)):
        emit("lease.lost", **EVENT)
        emit("lease.lost", **EVENT)
        emit("store.failed", key="ab")
    data = reader.get_metrics_data()
    assert data is not None
    (metric,) = data.resource_metrics[0].scope_metrics[0].metrics
    counted = {tuple(sorted(point.attributes.items())): point.value for point in metric.data.data_points}
    assert metric.name == "once_fenced.events"
    assert counted == {
        (("once_fenced.event", "lease.lost"), ("once_fenced.task", "shop.feed")): 2,
        (("once_fenced.event", "store.failed"),): 1,
    }
    provider.shutdown()


def test_tracing_is_started_for_all_events_of_the_process(exported: Any) -> None:
    provider, exporter = exported
    observer = start_tracing()
    with provider.get_tracer("test").start_as_current_span("run"):
        emit("lease.lost", **EVENT)
    unsubscribe(observer)
    emit("lease.lost", **EVENT)
    (span,) = exporter.get_finished_spans()
    assert [event.name for event in span.events] == ["lease.lost"]


def test_names_are_those_of_the_conventions_and_of_the_events() -> None:
    conventional = {
        value for name, value in vars(messaging_attributes).items() if name.startswith("MESSAGING_")
    }
    assert {*CONVENTIONS.values(), *SYSTEM} <= conventional
    assert documented("events.md", "Events") >= OUTCOMES


def test_the_library_is_loaded_by_those_who_ask_for_it_alone() -> None:
    import subprocess
    import sys

    code = (
        "import sys, celery_once_fenced.tasks, celery_once_fenced.cli\n"
        "print([name for name in sys.modules if name.startswith(('opentelemetry', 'prometheus_client'))])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"
