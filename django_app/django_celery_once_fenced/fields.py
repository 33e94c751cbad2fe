# ruff: noqa: ARG002 - the signatures are Django's
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import models

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
        return value if value is None else str(value)

    def get_prep_value(self, value: Any) -> bytes | None:
        text = self.to_python(value)
        return None if text is None else bytes.fromhex(text)

    def value_to_string(self, obj: models.Model) -> str:
        return self.value_from_object(obj) or ""
