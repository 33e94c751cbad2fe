"""The app of the load's workers: the shop, whose ``charge`` is fenced, and the same charge in two weaker ways.

Both know the downstream key for one run only: nothing remembers it for the next.
"""

from __future__ import annotations

import uuid
from typing import Any

from celery_once_fenced import Once, SingletonTask
from example_project.celery_app import app

__all__ = ["app", "charge_bare", "charge_efficient"]

RETRY: dict[str, Any] = {"autoretry_for": (OSError,), "retry_backoff": True, "max_retries": 10}
"""As ``charge`` does where the gateway does not answer."""

# Workers take turns at looking for messages that nobody has acknowledged.  One that is frozen while it is its turn keeps
# the others from it for kombu's five minutes.
app.conf.broker_transport_options |= {"unacked_mutex_expire": 2}


@app.task(
    base=SingletonTask,
    once=Once(key="charge:{order_id}", unique="until_expired", window="1h"),
    acks_late=True,
    reject_on_worker_lost=True,
    **RETRY,
)
def charge_efficient(order_id: int, account_id: int, amount: int) -> str:
    """``charge`` in the efficiency tier: a call within the hour is a duplicate."""
    return _charge(order_id, account_id, amount)


@app.task(acks_late=True, reject_on_worker_lost=True, **RETRY)
def charge_bare(order_id: int, account_id: int, amount: int) -> str:
    """``charge`` as Celery runs it."""
    return _charge(order_id, account_id, amount)


def _charge(order_id: int, account_id: int, amount: int) -> str:
    from django.db import transaction
    from django.db.models import F

    from example_project.shop import gateway
    from example_project.shop.models import Account, Order

    receipt: dict[str, Any] = gateway.charge(order_id, amount, idempotency_key=str(uuid.uuid4()))
    with transaction.atomic():
        Order.objects.filter(pk=order_id).update(status="paid", receipt=receipt["id"])
        Account.objects.filter(pk=account_id).update(balance=F("balance") - amount)
    return str(receipt["id"])
