"""What a load came to: counted in the tables, the gateway's log, the callers' answers and the workers' logs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from django.db import connection
from django.db.models import Sum

from example_project.gateway import GatewayLog
from example_project.shop.models import Account, Order

__all__ = ["BALANCE", "Counts", "Fleet", "deadlocks", "pending", "table", "unfinished"]

BALANCE = 100_000


@dataclass(frozen=True)
class Fleet:
    """One tier's part: its task, its orders, what its callers got and what its workers logged."""

    task: str
    orders: Sequence[int]
    answers: Mapping[str, int]
    logs: Sequence[str]

    def logged(self, event: str, *words: str) -> int:
        """How often the workers told an event of the task."""
        wanted = (f" {event} ", f"task={self.task} ", *words)
        lines = (f"{line} " for log in self.logs for line in log.splitlines())
        return sum(all(word in line for word in wanted) for line in lines)


@dataclass(frozen=True)
class Counts:
    """A column of the table; the order of the fields is the order of its rows."""

    orders: int
    enqueued: int
    suppressed: int
    deferred: int
    run: int
    taken_over: int
    fenced_off: int
    of_these_evicted: int
    replayed: int
    gateway_requests: int
    repeats_under_the_same_key: int
    charges: int
    keys_per_order: int
    charges_per_key: str
    charges_per_order: str
    orders_unpaid: int
    receipts_sent: int
    balances_off_by: int

    @classmethod
    def of(cls, fleet: Fleet, log: GatewayLog, evicted: bool) -> Counts:
        from django_celery_once_fenced.models import LedgerEntry

        orders = set(fleet.orders)
        requests = [request for request in log.requests if request.order in orders]
        keys = {(request.order, request.key) for request in requests}
        charged = [log.charged[order] for order in orders]
        booked = Counter(log.bookings)
        ledger = LedgerEntry.objects.filter(task_name=fleet.task).aggregate(Sum("attempt"), Sum("takeovers"))
        return cls(
            orders=len(orders),
            enqueued=fleet.answers["enqueued"],
            suppressed=fleet.answers["duplicate"],
            deferred=fleet.logged("execution.deferred"),
            run=ledger["attempt__sum"] or len(requests),
            taken_over=ledger["takeovers__sum"] or 0,
            fenced_off=fleet.logged("fence.rejected"),
            of_these_evicted=int(evicted),
            replayed=fleet.logged("ledger.replayed"),
            gateway_requests=len(requests),
            repeats_under_the_same_key=len(requests) - len(keys),
            charges=sum(charged),
            keys_per_order=max(Counter(order for order, _ in keys).values(), default=0),
            charges_per_key=_range([booked[key] for _, key in keys]),
            charges_per_order=_range(charged),
            orders_unpaid=Order.objects.filter(pk__in=orders).exclude(status="paid").count(),
            receipts_sent=Order.objects.filter(pk__in=orders).aggregate(Sum("receipts_sent"))[
                "receipts_sent__sum"
            ],
            balances_off_by=_off(orders),
        )


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def _off(orders: set[int]) -> int:
    """By how much all balances together differ from what the orders cost."""
    accounts = Account.objects.filter(orders__in=orders).annotate(cost=Sum("orders__amount"))
    return sum(abs(BALANCE - account.cost - account.balance) for account in accounts)


def pending() -> Mapping[str, int]:
    """What is unfinished in the plugin's tables, by what it is; empty when nothing is."""
    from django_celery_once_fenced.models import Effect, Fence, LedgerEntry, Outbox

    found = {
        "entries": LedgerEntry.objects.exclude(state="succeeded").count(),
        "effects": Effect.objects.exclude(state="done").count(),
        "messages": Outbox.objects.filter(confirmed_at=None).count(),
        "fences held": Fence.objects.exclude(expires_at=None).count(),
    }
    return {name: count for name, count in found.items() if count}


def unfinished() -> list[str]:
    """The entries that have not succeeded, in words."""
    from django_celery_once_fenced.models import LedgerEntry

    entries = LedgerEntry.objects.exclude(state="succeeded")
    return [f"{entry.key}: {entry.state} in attempt {entry.attempt}, {entry.error}" for entry in entries]


def deadlocks() -> int:
    """How many PostgreSQL has resolved in this database."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_clear_snapshot()")
        cursor.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
        return int(cursor.fetchone()[0])


def table(columns: Mapping[str, Counts]) -> str:
    """The counts of several tiers beside each other."""
    lines = [f"{'':28}" + "".join(f"{name:>14}" for name in columns)]
    for row in fields(Counts):
        values = (getattr(counts, row.name) for counts in columns.values())
        lines.append(f"{row.name.replace('_', ' '):28}" + "".join(f"{value!s:>14}" for value in values))
    return "\n".join(lines)
