from __future__ import annotations

from typing import Any

from celery import shared_task
from django.db.models import F, Sum
from django.utils import timezone

from celery_once_fenced import FencedTask, Once, SingletonTask
from example_project.shop import gateway
from example_project.shop.models import Account, Catalogue, Entry, Feed, Order, Product, Total


@shared_task(
    base=FencedTask, once=Once(key="post:{entry_id}", resource="account:{account_id}", replay_for="30d")
)
def post_entry(entry_id: int, account_id: int, amount: int) -> int:
    """Take an amount off an account.  Run twice, it would take it off twice."""
    Account.objects.filter(pk=account_id).update(balance=F("balance") - amount)
    Entry.objects.create(number=entry_id, account_id=account_id, amount=amount)
    return Account.objects.get(pk=account_id).balance


@shared_task(
    bind=True,
    base=FencedTask,
    once=Once(
        key="charge:{order_id}",
        resource="account:{account_id}",
        replay_for="30d",
        atomic=False,
        on_unknown="rerun",  # the gateway knows a repetition by its key
    ),
    autoretry_for=(OSError,),  # it cannot be reached, or did not answer
    retry_backoff=True,
    max_retries=10,
)
def charge(self: Any, order_id: int, account_id: int, amount: int) -> str:
    """Have the gateway charge an order, then mark it as paid.  Run twice, the customer would pay twice."""
    receipt = self.grant.effect("gateway", lambda key: gateway.charge(order_id, amount, idempotency_key=key))
    with self.grant.atomic():
        Order.objects.filter(pk=order_id).update(status="paid", receipt=receipt["id"])
        Account.objects.filter(pk=account_id).update(balance=F("balance") - amount)
        self.grant.send(send_receipt.s(order_id))
    return str(receipt["id"])


@shared_task(base=FencedTask, once=Once(key="receipt:{order_id}", replay_for="30d"))
def send_receipt(order_id: int) -> None:
    """Note that the customer was sent the receipt."""
    Order.objects.filter(pk=order_id).update(receipts_sent=F("receipts_sent") + 1)


@shared_task(base=SingletonTask)
def refresh_feed(feed_id: int) -> int:
    """Fetch a feed again.  Run twice, it would only waste the work."""
    Feed.objects.filter(pk=feed_id).update(refreshed=F("refreshed") + 1)
    return Feed.objects.get(pk=feed_id).refreshed


@shared_task(base=SingletonTask, once=Once(key=()))
def rebuild_catalogue() -> int:
    """Write the price list anew.  The settings put it into the correctness tier; nothing here knows."""
    text = "\n".join(
        f"{name}: {price}" for name, price in Product.objects.order_by("name").values_list("name", "price")
    )
    Catalogue.objects.get_or_create(pk=1)
    Catalogue.objects.filter(pk=1).update(text=text, edition=F("edition") + 1)
    return Catalogue.objects.get(pk=1).edition


@shared_task(base=FencedTask, once=Once(key=(), replay_for="12h"))
def nightly_totals() -> int:
    """Note the sum of all balances.  Two beats send this at three in the morning; one total is written.

    Tomorrow's run is more than twelve hours away, so it is another one.
    """
    amount = Account.objects.aggregate(sum=Sum("balance"))["sum"] or 0
    Total.objects.create(day=timezone.localdate(), amount=amount)
    return int(amount)
