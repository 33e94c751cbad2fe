"""Writes that check for themselves: lock the rows, refuse if any has seen a newer token, then write and stamp.

Three steps, because a single ``UPDATE … WHERE fence_token <= token`` cannot be judged by its number of rows: with one
row stale and one not, it changes one, and the stale write has passed in part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar, cast

from django.db import connections, models, router

from celery_once_fenced.errors import FencedOffError, FenceMismatchError, GrantError
from celery_once_fenced.grant import Grant
from celery_once_fenced.templates import Template, render_resource
from django_celery_once_fenced.fencing.columns import named
from django_celery_once_fenced.fencing.tokens import carrying

__all__ = ["FencedWrites", "Stamp"]

_Row_co = TypeVar("_Row_co", bound=models.Model, covariant=True)
COLUMN = "fence_token"


class Stamp(int):
    """A token that is to be written, unlike one that was read."""


class FencedWrites(Generic[_Row_co]):
    """What ``.fenced(grant)`` answers.  It has no write that does not check.

    Every write is one transaction, or savepoint, of its own.  It raises ``FencedOffError`` where a row has seen a
    newer token, and ``FenceMismatchError`` where the model's ``fence_resource`` says that a row is another resource's;
    then nothing is written.
    """

    def __init__(self, rows: models.QuerySet[Any], grant: Grant) -> None:
        if grant.token is None or grant.resource is None:
            raise GrantError(
                f"fenced() needs a fencing token, and the grant of {grant.key} has none: it is not of the correctness "
                "tier, or the task was called directly"
            )
        self._rows = rows
        self._grant = grant
        self._model: Any = rows.model
        self._token: int = grant.token
        self._resource: str = grant.resource
        self._alias: str = getattr(rows, "_db", None) or router.db_for_write(rows.model)
        self._template = Template.parse(self._model.fence_resource, option="fence_resource")
        self._fields = named(self._template, self._model._meta.concrete_fields, self._model._meta.label)

    def filter(self, *conditions: Any, **lookups: Any) -> FencedWrites[_Row_co]:
        """The same for fewer rows."""
        return self._narrowed(self._rows.filter(*conditions, **lookups))

    def exclude(self, *conditions: Any, **lookups: Any) -> FencedWrites[_Row_co]:
        """The same for fewer rows."""
        return self._narrowed(self._rows.exclude(*conditions, **lookups))

    def update(self, **values: Any) -> int:
        """As ``QuerySet.update``: returns the number of rows."""
        with self._checked(self._rows) as found:
            changed: int = (
                self._rows.using(self._alias).filter(pk__in=found).update(**values, **{COLUMN: self._token})
            )
            if any(field.name in values or field.attname in values for field in self._fields.values()):
                self._belong_still(found, changed)
            return changed

    def delete(self) -> tuple[int, dict[str, int]]:
        """As ``QuerySet.delete``, with what it cascades to."""
        with self._checked(self._rows, goes=True) as found:
            return self._rows.using(self._alias).filter(pk__in=found).delete()

    def save(self, instance: Any, *, update_fields: Collection[str] | None = None) -> None:
        """Write one instance: an update where its row exists, otherwise an insert."""
        fields = None if update_fields is None else {*update_fields, COLUMN}
        with self._checked(self._everything.filter(pk=instance.pk)) as found, self._stamped([instance]):
            # Found out under the lock and then insisted on: a row inserted since was not looked at.
            new = not found and fields is None
            instance.save(using=self._alias, force_insert=new, force_update=not new, update_fields=fields)

    def create(self, **values: Any) -> _Row_co:
        """As ``QuerySet.create``."""
        instance = self._model(**values)
        with self._checked(self._everything.none()), self._stamped([instance]):
            instance.save(using=self._alias, force_insert=True)
        return cast(_Row_co, instance)

    def bulk_update(
        self, instances: Iterable[Any], fields: Iterable[str], batch_size: int | None = None
    ) -> int:
        """As ``QuerySet.bulk_update``: returns the number of rows."""
        listed = list(instances)
        rows = self._everything.filter(pk__in=[one.pk for one in listed])
        with self._checked(rows), self._stamped(listed):
            return rows.bulk_update(listed, {*fields, COLUMN}, batch_size)

    def bulk_create(self, instances: Iterable[Any], batch_size: int | None = None) -> list[_Row_co]:
        """As ``QuerySet.bulk_create``, for new rows only: one that exists could not be locked first.  Under ``AddFence``
        a plain ``bulk_create(update_conflicts=True)`` is checked by the trigger.
        """
        listed = list(instances)
        with self._checked(self._everything.none()), self._stamped(listed):
            return cast("list[_Row_co]", self._everything.bulk_create(listed, batch_size))

    # --- lock, check, stamp -------------------------------------------------------------------------------------------

    @property
    def _everything(self) -> models.QuerySet[Any]:
        return cast("models.QuerySet[Any]", self._model._base_manager.using(self._alias))

    def _narrowed(self, rows: models.QuerySet[Any]) -> FencedWrites[_Row_co]:
        return FencedWrites(rows, self._grant)

    @contextmanager
    def _checked(self, rows: models.QuerySet[Any], *, goes: bool = False) -> Iterator[list[Any]]:
        """Lock what ``rows`` match, check it, and yield the keys: what matches only later was not checked."""
        with carrying(self._token, self._resource, self._alias):
            # Rows that others only refer to need not wait, unless the row goes away.
            weaker = not goes and connections[self._alias].vendor == "postgresql"
            matching = self._everything.filter(pk__in=rows.values("pk")).order_by("pk")
            yield self._look(matching.select_for_update(no_key=weaker))

    def _look(self, rows: models.QuerySet[Any]) -> list[Any]:
        attributes = [field.attname for field in self._fields.values()]
        found = list(rows.values_list("pk", COLUMN, *attributes))
        for _, seen, *values in found:
            self._belongs(values)
            if seen is not None and seen > self._token:
                raise FencedOffError(self._resource, self._token)
        return [pk for pk, *_ in found]

    def _belong_still(self, keys: list[Any], changed: int) -> None:
        if len(self._look(self._everything.filter(pk__in=keys))) < changed:  # the key is part of the resource
            raise FenceMismatchError(f"another {self._model._meta.label}", self._resource)

    def _belongs(self, values: Iterable[object]) -> None:
        if not self._fields:
            return
        of_row = render_resource(self._template, dict(zip(self._fields, values, strict=True)))
        if of_row != self._resource:
            raise FenceMismatchError(of_row, self._resource)

    @contextmanager
    def _stamped(self, instances: list[Any]) -> Iterator[None]:
        for one in instances:
            one.fence_token = Stamp(self._token)
        try:
            yield
        finally:
            for one in instances:
                one.fence_token = self._token
        for one in instances:  # only now have all of them a key
            self._belongs(field.to_python(getattr(one, field.attname)) for field in self._fields.values())
