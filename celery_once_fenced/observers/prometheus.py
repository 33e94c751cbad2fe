"""The shared counters as Prometheus metrics, for any registry of prometheus-client (the extra ``prometheus``).

    from prometheus_client import REGISTRY
    from celery_once_fenced.observers.prometheus import OnceCollector
    from celery_once_fenced.runtime import current

    REGISTRY.register(OnceCollector(current))

One process answers for all of them, because they count in the stores: no multi-process mode, and nothing is lost when
a pool's child ends.  Labels are the task, the slot, the table and the store; never a key or a resource, of which there
is no end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakSet

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from celery_once_fenced.figures import Figures, Source, TaskFigures, read, subjects
from celery_once_fenced.stores.counters import COUNTERS, HOLD_BOUNDS, HOLD_FIELDS, HOLD_SUM

__all__ = ["OnceCollector", "exposition"]

PREFIX = "once_fenced"
_registered: WeakSet[Any] = WeakSet()
"""Apps whose tasks are known to be registered."""
SLOTS = {"q": "queued", "r": "running"}


class OnceCollector:
    """Reads the stores at every scrape, and only then.

    Args:
        source: Gives the runtime to read: ``celery_once_fenced.runtime.current``, or ``lambda: runtime_of(app)``.
    """

    def __init__(self, source: Callable[[], Source]) -> None:
        self._source = source

    def describe(self) -> Iterable[Metric]:
        """What there will be, without asking a server: registering must not need one."""
        return _families(Figures(at=0.0), {})

    def collect(self) -> Iterator[Metric]:
        source = self._source()
        figures = read(source)
        _register_tasks(source.app)
        leases = {subject.task: subject.lease for subject in subjects(source.app, figures)}
        return _families(figures, leases, has_ledger=source.ledger is not None)


def _register_tasks(app: Any) -> None:
    """Import the modules of tasks, as a worker does: in a web process some may be missing until they are called."""
    if app not in _registered:
        app.loader.import_default_modules()
        _registered.add(app)


def exposition(source: Callable[[], Source], accept: str = "") -> tuple[bytes, str]:
    """All metrics as text, and its content type: OpenMetrics where the HTTP header ``Accept`` asks for it."""
    registry = CollectorRegistry()
    registry.register(OnceCollector(source))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def _families(figures: Figures, leases: dict[str, float], *, has_ledger: bool = True) -> Iterator[Metric]:
    tasks = figures.tasks()
    yield _up(figures, has_ledger)
    if "redis" not in figures.silent:
        yield from _counters(tasks)
        yield _durations(tasks)
        yield from _held(tasks)
    if has_ledger and "postgres" not in figures.silent:
        yield from _ledger(figures)
    yield _gauge(
        "lease_seconds", "Lease of a task, as declared", ["task"], ((n,) for n in leases), leases.values()
    )


def _gauge(
    name: str, text: str, labels: list[str], keys: Iterable[tuple[str, ...]], values: Iterable[float]
) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=labels)
    for key, value in zip(keys, values, strict=True):
        family.add_metric(key, value)
    return family


def _up(figures: Figures, has_ledger: bool) -> Metric:
    stores = ["redis", "postgres"] if has_ledger else ["redis"]
    answered = (float(store not in figures.silent) for store in stores)
    return _gauge("up", "Whether the store answered", ["store"], ((store,) for store in stores), answered)


def _counters(tasks: list[TaskFigures]) -> Iterator[Metric]:
    for counter, text in COUNTERS.items():
        family = CounterMetricFamily(f"{PREFIX}_{counter}", text, labels=["task"])
        for task in tasks:
            family.add_metric([task.task], task.counters.get(counter, 0))
        yield family


def _durations(tasks: list[TaskFigures]) -> Metric:
    family = HistogramMetricFamily(
        f"{PREFIX}_hold_seconds", "Time from start to end of a run", labels=["task"]
    )
    for task in tasks:
        if task.runs:
            family.add_metric([task.task], list(_buckets(task)), task.counters.get(HOLD_SUM, 0) / 1000)
    return family


def _buckets(task: TaskFigures) -> Iterator[tuple[str, float]]:
    """Cumulative, as Prometheus has them; the store counts each run in one."""
    total = 0
    for bound, name in zip((*map(str, HOLD_BOUNDS), "+Inf"), HOLD_FIELDS, strict=True):
        total += task.counters.get(name, 0)
        yield bound, total


def _held(tasks: list[TaskFigures]) -> Iterator[Metric]:
    names = [(task.task,) for task in tasks]
    slots = [(task.task, slot) for task in tasks for slot in SLOTS.values()]
    held = [getattr(task, slot) for task in tasks for slot in SLOTS.values()]
    late = [task.overdue for task in tasks]
    oldest = [task.oldest or 0.0 for task in tasks]
    longest = [task.longest or 0.0 for task in tasks]
    yield _gauge("holds", "Keys that are held now", ["task", "slot"], slots, held)
    yield _gauge("overdue_holds", "Running holds far older than the p99 of their task", ["task"], names, late)
    yield _gauge("oldest_hold_seconds", "Age of the oldest running hold", ["task"], names, oldest)
    yield _gauge("longest_run_seconds", "The longest run so far", ["task"], names, longest)


def _ledger(figures: Figures) -> Iterator[Metric]:
    counts = figures.ledger
    doubts = counts.in_doubt if counts is not None else {}
    rows = counts.rows if counts is not None else {}
    waiting = [] if counts is None else [float(counts.unpublished)]
    age = [] if counts is None else [counts.oldest_unpublished]
    names, one = ((name,) for name in doubts), [()] * len(waiting)
    yield _gauge(
        "in_doubt_entries", "Keys that wait for a person to decide them", ["task"], names, doubts.values()
    )
    yield _gauge("unpublished_messages", "Outgoing messages that were not confirmed yet", [], one, waiting)
    yield _gauge("oldest_unpublished_message_seconds", "Age of the oldest of them", [], one, age)
    tables = ((table,) for table in rows)
    yield _gauge("table_rows", "Rows, as the planner estimates them", ["table"], tables, rows.values())
