"""Tables that defend themselves: a stale holder's write is refused by the row it would change.

A fenced row belongs to one resource, since tokens of different resources cannot be compared, and remembers in
``fence_token`` the highest token that wrote it.  Two ways, one column:

- ``AddFence`` in a migration puts a trigger on the table.  It checks every write, by whatever statement, of every
  transaction that carries a token: the bodies of the correctness tier do.  ``mode="require"`` refuses all other writes
  too, except ``with unfenced(reason=…)``.
- ``Account.objects.fenced(grant)`` checks for itself, where there is no trigger or no such transaction.

Refusals are ``FencedOffError`` (the row has seen a newer token), ``FenceMismatchError`` (the grant is for another
resource) and ``GrantError`` (a token is required).
"""

from __future__ import annotations

from django_celery_once_fenced.fencing.models import (
    FencedManager,
    FencedModel,
    FencedQuerySet,
    FenceTokenField,
)
from django_celery_once_fenced.fencing.operations import AddFence, RemoveFence
from django_celery_once_fenced.fencing.refusals import translated
from django_celery_once_fenced.fencing.tokens import unfenced
from django_celery_once_fenced.fencing.writes import FencedWrites

__all__ = [
    "AddFence",
    "FenceTokenField",
    "FencedManager",
    "FencedModel",
    "FencedQuerySet",
    "FencedWrites",
    "RemoveFence",
    "translated",
    "unfenced",
]
