"""What must hold of the tables and of the gateway's log when everything has come to rest, whoever guarded the work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import psycopg
from django.db.models import Sum

from django_celery_once_fenced.models import LedgerEntry
from example_project.gateway import GatewayLog
from example_project.shop.models import Account

BALANCE = 1_000_000
PLAIN = "chaos.charge_under_plain_lock"
TERMINAL = ("succeeded", "failed", "in_doubt")
CHARGING = ("chaos.charge", "chaos.charge_or_hold", PLAIN)


@dataclass(frozen=True)
class Job:
    """One operation that was called, at least once."""

    number: int
    task: str
    account: int
    amount: int


@dataclass(frozen=True)
class Evidence:
    """What was found."""

    gateway: GatewayLog
    writes: Counter[int]
    """Committed writes of each job."""
    tokens: dict[int, list[int]]
    """Tokens of the committed writes to each account, in the order of their commits."""
    states: dict[int, str]
    """Of the entries in the ledger, by job."""

    @classmethod
    def gathered(cls, url: str, gateway: GatewayLog) -> Evidence:
        tokens: dict[int, list[int]] = {}
        writes: Counter[int] = Counter()
        with psycopg.connect(url) as connection:
            rows = connection.execute(
                "select number, account_id, token from chaos_write order by pg_xact_commit_timestamp(xmin)"
            )
            for number, account, token in rows:
                writes[number] += 1
                tokens.setdefault(account, []).append(token)
        states = {
            int(key.rpartition(":")[2]): state
            for key, state in LedgerEntry.objects.values_list("key", "state")
        }
        return cls(gateway, writes, tokens, states)


def violations(jobs: Sequence[Job], found: Evidence) -> list[str]:
    """Everything that is not as promised of these jobs, in words."""
    return [*of_each(jobs, found), *of_balances(jobs, found), *of_tokens(jobs, found)]


def of_each(jobs: Sequence[Job], found: Evidence) -> Iterator[str]:
    keys: dict[int, set[str]] = {}
    for request in found.gateway.requests:
        keys.setdefault(request.order, set()).add(request.key)
    for job in jobs:
        state = "succeeded" if job.task == PLAIN else found.states.get(job.number, "lost")
        writes, charges = found.writes[job.number], found.gateway.charged[job.number]
        wanted = 1 if state == "succeeded" else 0
        if state not in TERMINAL:
            yield f"{job} is neither finished nor in doubt: {state}"
        if writes != wanted:
            yield f"{job} ({state}) was written {writes} times"
        if job.task in CHARGING and not wanted <= charges <= 1:
            yield f"{job} ({state}) was charged {charges} times"
        if len(keys.get(job.number, ())) > 1:
            yield f"{job} came to the gateway under several keys"


def of_balances(jobs: Sequence[Job], found: Evidence) -> Iterator[str]:
    amounts: Counter[int] = Counter()
    for job in jobs:
        amounts[job.account] += job.amount * (
            job.task == PLAIN or found.states.get(job.number) == "succeeded"
        )
    for account in Account.objects.filter(pk__in=amounts):
        if account.balance != BALANCE - amounts[account.pk]:
            yield f"account {account.pk} has {account.balance}, not {BALANCE - amounts[account.pk]}"


def of_tokens(jobs: Sequence[Job], found: Evidence) -> Iterator[str]:
    for account in {job.account for job in jobs if job.task != PLAIN}:
        for former, later in pairwise(found.tokens.get(account, [])):
            if later <= former:
                yield f"account {account}: a write under token {later} was committed after one under {former}"


def unfinished(jobs: Sequence[Job], found: Evidence) -> set[int]:
    """The numbers of the jobs that are neither finished nor in doubt."""
    return {job.number for job in jobs if found.states.get(job.number) not in TERMINAL}


def takeovers() -> int:
    """How often a fence was taken over."""
    return LedgerEntry.objects.aggregate(Sum("takeovers"))["takeovers__sum"] or 0
