"""Lengths of time and numbers as a person reads them, in the reader's language."""

from __future__ import annotations

from datetime import UTC, datetime

from django.utils.translation import gettext_lazy as _

__all__ = ["lasting", "moment"]

_UNITS = (
    (86400.0, _("%.1f d")),
    (3600.0, _("%.1f h")),
    (60.0, _("%.1f min")),
    (1.0, _("%.1f s")),
)
_MILLISECONDS = _("%.0f ms")


def lasting(seconds: float) -> str:
    """In the largest unit that fits: ``45 ms``, ``2.5 s``, ``1.5 min``."""
    size = abs(seconds)
    if 0 < size < 1:
        return str(_MILLISECONDS) % (size * 1000)
    unit, text = next((unit for unit in _UNITS if size >= unit[0]), _UNITS[-1])
    return str(text) % (size / unit)


def moment(seconds: float) -> datetime | None:
    """Unix time as a moment; None where it is none: what stands in Redis may be anybody's."""
    try:
        return datetime.fromtimestamp(seconds, UTC) if seconds else None
    except (OverflowError, ValueError, OSError):
        return None
