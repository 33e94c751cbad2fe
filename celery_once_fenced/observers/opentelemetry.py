"""Events for OpenTelemetry: on the span that is current, and as a counter where a meter provider is given.

    from celery_once_fenced.observers.opentelemetry import start_tracing

    start_tracing()

Needs ``opentelemetry-api`` (the extra ``opentelemetry``); spans are made by whoever instruments Celery and the web
framework.  Every event becomes an event of the current span, under its own name; what identifies the job becomes
attributes of the span as well, so that traces can be searched for a key.  Attributes follow the semantic conventions of
messaging where these have a name; the rest begins with ``once_fenced.``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry import metrics, trace

from celery_once_fenced.events import Event, subscribe

__all__ = ["OpenTelemetryObserver", "start_tracing"]

NAME = "celery_once_fenced"
SYSTEM = {"messaging.system": "celery"}
CONVENTIONS: Mapping[str, str] = {"task_id": "messaging.message.id"}
"""Fields of events that the semantic conventions have a name for; every other one is ``once_fenced.<field>``."""
IDENTIFYING = frozenset({"key", "task", "task_id", "token", "holder_task", "verdict"})
"""Fields that also become attributes of the span."""
OUTCOME = "once_fenced.outcome"
"""Attribute of the span: the last event that says what became of the call or the execution."""
OUTCOMES = frozenset(
    {
        "call.unguarded",
        "duplicate.answered",
        "duplicate.suppressed",
        "execution.deferred",
        "execution.dropped",
        "execution.republished",
        "execution.skipped",
        "execution.unguarded",
        "fence.rejected",
        "ledger.replayed",
        "ledger.succeeded",
    }
)


class OpenTelemetryObserver:
    """An observer of events.  ``meter_provider``: counts events by name and task; without it, nothing is counted here.

    The counters that all processes share are in the stores, and :mod:`~celery_once_fenced.observers.prometheus` shows
    those; this one counts what its own process saw.
    """

    def __init__(self, meter_provider: metrics.MeterProvider | None = None) -> None:
        self._counter: metrics.Counter | None = None
        if meter_provider is not None:
            self._counter = meter_provider.get_meter(NAME).create_counter(
                "once_fenced.events", unit="{event}", description="Events of this process"
            )

    def __call__(self, event: Event) -> None:
        span = trace.get_current_span()
        if span.is_recording():
            span.add_event(
                event.name, {_attribute(name): _value(value) for name, value in event.fields.items()}
            )
            span.set_attributes(_of_span(event))
        if self._counter is not None:
            task = event.fields.get("task")
            self._counter.add(
                1, {"once_fenced.event": event.name, **({"once_fenced.task": str(task)} if task else {})}
            )


def start_tracing(meter_provider: metrics.MeterProvider | None = None) -> OpenTelemetryObserver:
    """Observe all events of this process, and of those forked from it, from now on.  ``unsubscribe`` undoes it."""
    observer = OpenTelemetryObserver(meter_provider)
    subscribe(observer)
    return observer


def _of_span(event: Event) -> dict[str, Any]:
    known = {_attribute(name): _value(event.fields[name]) for name in IDENTIFYING & event.fields.keys()}
    return {**(SYSTEM if known else {}), **known, **({OUTCOME: event.name} if event.name in OUTCOMES else {})}


def _attribute(field: str) -> str:
    return CONVENTIONS.get(field, f"once_fenced.{field}")


def _value(value: object) -> str | bool | int | float:
    """Attributes are primitives; events have nothing else but None."""
    return value if isinstance(value, str | bool | int | float) else str(value)
