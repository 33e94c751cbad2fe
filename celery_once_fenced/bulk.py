"""Many calls of one task at once: asked for in batches of one round trip, published one by one (E18).

While one batch is published, Redis answers for the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from celery import states
from celery.result import EagerResult
from kombu.utils.uuid import uuid

from celery_once_fenced.admission import Call, Permit
from celery_once_fenced.header import Header
from celery_once_fenced.publication import Publication

if TYPE_CHECKING:
    from celery_once_fenced.tasks import SingletonTask

__all__ = ["NotSent", "run_many", "send_many"]

BATCH = 250
"""Calls for each round trip: a few milliseconds of a Redis that others use, too.  Those of two are held unpublished."""
Waiting = Callable[[], list[Any]]
"""A batch that was asked for: it waits for the answers, publishes, and gives the results."""
Item = tuple[Sequence[Any] | None, Mapping[str, Any] | None]
T = TypeVar("T")


class NotSent(EagerResult):  # type: ignore[misc]  # untyped
    """The result of a call that could not be made: ``get()`` raises ``error``."""

    outcome = None

    def __init__(self, task_id: str, error: Exception, name: str) -> None:
        super().__init__(task_id, error, states.FAILURE, name=name)
        self.error = error


def send_many(task: SingletonTask, items: Iterable[Item], options: Mapping[str, Any]) -> list[Any]:
    """One result for each item, in order.  Never raises for one of them; items that cannot be read send nothing."""
    items = list(items)
    with task.app.producer_pool.acquire(block=True) as producer:
        shared = {**options, "producer": producer}
        asked = (_ask_for(task, batch, shared) for batch in _batches(items, BATCH))
        return [result for results in _one_ahead(asked) for result in results()]


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def _one_ahead(items: Iterator[T]) -> Iterator[T]:
    """The same, each one after the next was made."""
    before = list(islice(items, 1))
    for item in items:
        yield from before
        before = [item]
    yield from before


def _ask_for(task: SingletonTask, batch: Sequence[Item], options: Mapping[str, Any]) -> Waiting:
    calls = [_or_error(_arguments, item) for item in batch]
    publications = [_publication(task, call, options) for call in calls]
    drafts = [
        call if isinstance(call, Exception) else _or_error(publication.draft)
        for call, publication in zip(calls, publications, strict=True)
    ]
    answers = task.blueprint.runtime.admission.ask_many(list(_calls(drafts)))
    return partial(_complete_all, publications, drafts, answers)


def _complete_all(
    publications: Sequence[Publication],
    drafts: Sequence[Any],
    answers: Callable[[], list[Permit | Exception]],
) -> list[Any]:
    permits = iter(answers())
    return [
        _complete(publication, draft, permits)
        for publication, draft in zip(publications, drafts, strict=True)
    ]


def _publication(task: SingletonTask, call: Any, options: Mapping[str, Any]) -> Publication:
    args, kwargs = ((), {}) if isinstance(call, Exception) else call
    return Publication(task, args, kwargs, None, dict(options))


def _arguments(item: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    try:
        args, kwargs = item
        return tuple(args or ()), dict(kwargs or {})
    except (TypeError, ValueError):
        raise TypeError(f"apply_many() takes (args, kwargs) for each call, not {item!r:.100}") from None


def _calls(drafts: Iterable[Any]) -> Iterator[Call]:
    for draft in drafts:
        if not isinstance(draft, Exception) and draft[1] is not None:
            yield draft[1]


def _complete(
    publication: Publication,
    draft: tuple[Header, Call | None] | Exception,
    permits: Iterator[Permit | Exception],
) -> Any:
    if isinstance(draft, Exception):
        return _not_sent(publication, draft)
    header, call = draft
    permit = next(permits) if call is not None else None
    if isinstance(permit, Exception):
        return _not_sent(publication, permit)
    result = _or_error(publication.complete, header, permit)
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
    except Exception as error:  # noqa: BLE001  # whatever it is belongs to this item, and is in its result
        return error
