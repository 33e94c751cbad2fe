# ruff: noqa: ARG002 - the signatures are Django's
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.core.exceptions import ValidationError
from django.db import models
from django.utils.translation import gettext_lazy as _

if TYPE_CHECKING:
    _BinaryField = models.BinaryField[Any, str | None]
else:
    _BinaryField = models.BinaryField


class DigestField(_BinaryField):
    """A key digest: ``bytea`` in the database, hexadecimal text for people, URLs and comparison with lease digests."""

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> str | None:
        return None if value is None else bytes(value).hex()

    def to_python(self, value: Any) -> str | None:
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value).hex()
        if value is None:
            return None
        if not _is_digest(value):
            raise ValidationError(_("%(value)r is not a hexadecimal digest."), params={"value": value})
        return str(value)

    def get_prep_value(self, value: Any) -> bytes | None:
        text = self.to_python(value)
        return None if text is None else bytes.fromhex(text)

    def value_to_string(self, obj: models.Model) -> str:
        return self.value_from_object(obj) or ""


def _is_digest(value: object) -> bool:
    try:
        bytes.fromhex(str(value))
    except ValueError:
        return False
    return True
