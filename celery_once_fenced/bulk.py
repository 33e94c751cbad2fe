"""Many calls of one task at once: asked for in batches of one round trip, published one by one (E18).

While Redis answers for one batch, the questions of the next are made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any, TypeVar

from celery import states
from celery.exceptions import SoftTimeLimitExceeded
from celery.result import EagerResult
from kombu.utils.uuid import uuid

from celery_once_fenced.admission import Call, Permit
from celery_once_fenced.header import Header
from celery_once_fenced.publication import Publication

if TYPE_CHECKING:
    from celery_once_fenced.tasks import SingletonTask

__all__ = ["NotSent", "run_many", "send_many"]

BATCH = 100
"""Calls for each round trip: a few milliseconds of a Redis that others use, too."""
Item = tuple[Sequence[Any] | None, Mapping[str, Any] | None]
T = TypeVar("T")


class NotSent(EagerResult):  # type: ignore[misc]  # untyped
    """The result of a call that could not be made: ``get()`` raises ``error``."""

    outcome = None

    def __init__(self, task_id: str, error: Exception, name: str) -> None:
        super().__init__(task_id, error, states.FAILURE, name=name)
        self.error = error


def send_many(task: SingletonTask, items: Iterable[Item], options: Mapping[str, Any]) -> list[Any]:
    """One result for each item, in order.  Never raises for one of them; items that cannot be read send nothing.

    Interrupted (a time limit, Ctrl-C), it frees what is held for calls that were not published.
    """
    items, results = list(items), []
    given = options.get("producer") or options.get("publisher")
    with task.app.producer_or_acquire(given) as producer:
        shared = {**options, "producer": producer, "publisher": None}
        batches = (_Batch(task, batch, shared) for batch in _batches(items, BATCH))
        batch = next(batches, None)
        while batch is not None:
            with batch:
                following = next(batches, None)
                results += batch.send()
            batch = following
    return results


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


Draft = tuple[Header, Call | None] | Exception
Asked = tuple[Publication, Any, Permit | Exception | None]


class _Batch:
    """Calls that are asked for together, when the block begins; left by an exception, it frees what was not published."""

    def __init__(self, task: SingletonTask, items: Sequence[Item], options: Mapping[str, Any]) -> None:
        calls = [_or_error(_arguments, item) for item in items]
        eager = task.app.conf.task_always_eager
        self._publications = [_publication(task, call, options, eager=eager) for call in calls]
        self._drafts = [
            call if isinstance(call, Exception) else _or_error(publication.draft)
            for call, publication in zip(calls, self._publications, strict=True)
        ]
        self._left: deque[Asked] = deque(zip(self._publications, self._drafts, repeat(None), strict=False))
        """Each call that was not published yet, with its answer; None: it was not read, or there was nothing to ask."""
        self._admission = task.blueprint.runtime.admission
        self._answers: Callable[[], list[Permit | Exception]] | None = None

    def __enter__(self) -> None:
        try:
            self._answers = self._admission.ask_many([*map(_call, filter(_asks, self._drafts))])
        except BaseException:
            self._take_back()
            raise

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None:
            self._read()  # what is held can be freed when it is held, not before
            self._take_back()

    def _take_back(self) -> None:
        for publication, draft, permit in self._left:
            if _asks(draft) and (permit is None or (isinstance(permit, Permit) and permit.may_hold)):
                publication.take_back(draft[0])

    def send(self) -> list[Any]:
        """Publish what may be published, and say what became of each call."""
        self._read()
        results = []
        while self._left:
            results.append(_complete(*self._left[0]))
            self._left.popleft()
        return results

    def _read(self) -> None:
        """Once: an interrupted reading is not taken up again."""
        answers, self._answers = self._answers, None
        if answers is None:
            return
        permits = iter(answers())
        read = [next(permits) if _asks(draft) else None for draft in self._drafts]
        self._left = deque(zip(self._publications, self._drafts, read, strict=True))


def _publication(task: SingletonTask, call: Any, options: Mapping[str, Any], *, eager: bool) -> Publication:
    args, kwargs = ((), {}) if isinstance(call, Exception) else call
    return Publication(task, args, kwargs, None, dict(options), eager=eager)


def _arguments(item: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    try:
        args, kwargs = item
        return tuple(args or ()), dict(kwargs or {})
    except (TypeError, ValueError):
        raise TypeError(f"apply_many() takes (args, kwargs) for each call, not {item!r:.100}") from None


def _asks(draft: Draft) -> bool:
    return not isinstance(draft, Exception) and draft[1] is not None


def _call(draft: Any) -> Call:
    call: Call = draft[1]
    return call


def _complete(publication: Publication, draft: Draft, permit: Permit | Exception | None) -> Any:
    if isinstance(draft, Exception):
        return _not_sent(publication, draft)
    if isinstance(permit, Exception):
        return _not_sent(publication, permit)
    result = _or_error(publication.complete, draft[0], permit)
    if isinstance(result, Exception):
        return _not_sent(publication, result)
    result.error = None
    return result


def run_many(task: SingletonTask, items: Iterable[Item], run: Any) -> list[Any]:
    """The same in eager mode: ``run(args, kwargs)`` for each item, whose errors are in its result."""
    return [_ran(task, run, item) for item in list(items)]


def _ran(task: SingletonTask, run: Any, item: Any) -> Any:
    call = _or_error(_arguments, item)
    result = call if isinstance(call, Exception) else _or_error(run, *call)
    if isinstance(result, Exception):
        return NotSent(uuid(), result, task.name)
    result.error = None
    return result


def _not_sent(publication: Publication, error: Exception) -> NotSent:
    return NotSent(publication.task_id, error, publication.task.name)


def _or_error(do: Any, *about: Any) -> Any:
    try:
        return do(*about)
    except SoftTimeLimitExceeded:  # that of the task that makes the calls
        raise
    except Exception as error:  # noqa: BLE001  # whatever else it is belongs to this item, and is in its result
        return error
