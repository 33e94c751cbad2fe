"""``FencedModel``: the column, and the way to writes that check for themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from django.db import models
from django.db.models import F
from django.utils.translation import gettext_lazy as _

from celery_once_fenced.grant import Grant, current_grant
from django_celery_once_fenced.fencing.writes import FencedWrites, Stamp

if TYPE_CHECKING:
    _BigIntegerField = models.BigIntegerField[Any, int | None]
else:
    _BigIntegerField = models.BigIntegerField

__all__ = ["FenceTokenField", "FencedManager", "FencedModel", "FencedQuerySet"]

_Row_co = TypeVar("_Row_co", bound=models.Model, covariant=True)


class FenceTokenField(_BigIntegerField):
    """The highest token that wrote the row; empty: none has yet.  What an instance holds of it is never written back:
    a copy starts empty, and an old instance cannot lower it.
    """

    # Not in migrations: these are the package's to change.
    FIXED: ClassVar = {
        "null": True,
        "blank": True,
        "editable": False,
        "verbose_name": _("fencing token"),
        "help_text": _("The highest token that wrote this row."),
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | self.FIXED)

    def deconstruct(self) -> tuple[str, str, Any, Any]:
        name, _path, args, kwargs = super().deconstruct()
        kept = {option: value for option, value in kwargs.items() if option not in self.FIXED}
        return name, "django_celery_once_fenced.fencing.FenceTokenField", args, kept

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:
        value = getattr(model_instance, self.attname)
        if isinstance(value, Stamp):
            return value
        return None if add else F(self.attname)


class FencedQuerySet(models.QuerySet[_Row_co]):
    """For a queryset class of one's own."""

    def fenced(self, grant: Grant | None = None) -> FencedWrites[_Row_co]:
        """Writes to these rows that are refused where a row has seen a newer token than that of ``grant``.

        Args:
            grant: Default: the current one.

        Raises:
            GrantError: there is none, or it has no token (efficiency tier, direct or eager call).
        """
        return FencedWrites(self, grant or current_grant())


class FencedManager(models.Manager.from_queryset(FencedQuerySet)):  # type: ignore[misc]  # as Django has it
    """``objects`` of a :class:`FencedModel`."""


class FencedModel(models.Model):
    """Base of models whose rows are written under a fence; ``AddFence`` in a migration adds the trigger."""

    fence_resource: ClassVar[str] = ""
    """The resource of a row, as ``AddFence`` has it: ``"account:{id}"``.  ``.fenced()`` then refuses a grant for
    another resource; left empty, it takes the rows for the grant's.
    """

    fence_token = FenceTokenField()

    objects: ClassVar[Any] = FencedManager()

    class Meta:
        abstract = True
