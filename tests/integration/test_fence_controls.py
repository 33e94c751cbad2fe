"""Negative controls: broken variants of the fence that look right, and the checks that catch them.

Each check is passed by the SQL as released and raises ``BrokenPromiseError`` on its broken variants, so none of them can be a
test that cannot fail.  A variant is an edit of the released script.  Eviction would hide some of the faults most of
the time (C9 ends the session that the fault needs), so the checks of the fence itself run without it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psycopg
import pytest

from celery_once_fenced.stores import Completion, Operation
from celery_once_fenced.stores.postgres import schema_sql
from example_project.servers import Servers
from tests.fixtures.ledger import Ledger, body, claim_of, eventually, fresh, ledger_at, operation, parked
from tests.fixtures.servers import fresh_database

Edits = tuple[tuple[str, str], ...]
Check = Callable[[Ledger], None]


class BrokenPromiseError(AssertionError):
    """The promise that a check stands for was broken."""


# --- what the checks need of every variant, the released one too ------------------------------------------------------

WITHOUT_EVICTION: Edits = (
    ("select count(*) filter (where pg_terminate_backend(a.pid, p_ms)) into ended", "select 0 into ended"),
    ("interval '2 seconds'", "interval '0.3 seconds'"),
)
SLOW_COMPLETE: Edits = (
    *WITHOUT_EVICTION,
    ("  select name into unknown from", "  perform pg_sleep(0.6);\n  select name into unknown from"),
)
SLOW_BEFORE_THE_LOCK: Edits = (
    (
        "    -- A resource without a row",
        "    if p_holder = 'slow' then perform pg_sleep(1); end if;\n    -- A resource without a row",
    ),
)
SLOW_BEFORE_THE_BIRTH: Edits = (
    (
        "      insert into once_fenced_fence (resource, token, holder, key_digest",
        "      if p_holder = 'slow' then perform pg_sleep(1); end if;\n      insert into once_fenced_fence (resource, token, holder, key_digest",
    ),
)

# --- the checks -------------------------------------------------------------------------------------------------------


def refuses_a_late_write(ledger: Ledger) -> None:
    """C6: what a holder writes after another key's holder of the resource has committed is refused."""
    resource = fresh("account")
    late = ledger.lapsed(operation(resource=resource))
    with body(ledger.url, late) as zombie:
        ledger.run(ledger.hold(operation(resource=resource)))
        with contextlib.suppress(psycopg.Error):
            zombie.complete().commit()
            raise BrokenPromiseError("a stale write was committed")


def issues_no_token_over_an_open_commit(ledger: Ledger) -> None:
    """C6: between complete and COMMIT nobody is granted the resource; else the older token would commit last."""
    resource = fresh("account")
    with parked(ledger.url, ledger.lapsed(operation(resource=resource))) as frozen:
        successor = ledger.claim(operation(resource=resource))
        frozen.commit()
    if successor.verdict == "granted":
        raise BrokenPromiseError("a token was issued, then an older one committed")


def issues_rising_tokens(ledger: Ledger) -> None:
    """C1: a claim that is granted later has the higher token, also when it was asked earlier."""
    ledger.run(
        ledger.hold(operation())
    )  # the first claim of all notes the timeline, and locks that row to its COMMIT
    slow, fast = (operation(resource="account") for _ in range(2))
    with ThreadPoolExecutor(1) as thread:
        later = thread.submit(ledger.claim, slow, "slow")
        eventually(lambda: ledger.execute("select 1 from pg_stat_activity where wait_event = 'PgSleep'"))
        earlier = ledger.hold(fast)
        ledger.run(earlier)
        granted = later.result()
    if granted.verdict != "granted" or (granted.token or 0) <= earlier.token:
        raise BrokenPromiseError(f"token {granted.token} after {earlier.token}")


def counts_a_lease_from_its_grant(ledger: Ledger) -> None:
    """C4: a claim that took long to be granted is granted for its whole lease, and keeps others out for it."""
    keeps_its_lease(ledger, operation())


def counts_a_lease_of_a_known_resource_from_its_grant(ledger: Ledger) -> None:
    """C4, where the row of the fence is not new."""
    known = ledger.hold(operation())
    ledger.run(known)
    keeps_its_lease(ledger, operation(resource=known.operation.resource))


def keeps_its_lease(ledger: Ledger, op: Operation) -> None:
    with psycopg.connect(ledger.url) as connection:
        connection.execute("select pg_sleep(0.5)")
        granted = connection.execute(
            "select verdict from once_fenced_claim_v1(%s, 'k', 's', 't', 't', null, %s, 'h', 'w', 0.4, 5, 'hold', 60, null, 'r', 'n')",
            (op.digest, op.resource),
        ).fetchone()
    assert granted == ("granted",)
    if ledger.claim(operation(resource=op.resource)).verdict != "busy":
        raise BrokenPromiseError("the lease was over when it was granted")


def takes_locks_in_one_order(ledger: Ledger) -> None:
    """C7: complete and claim of one key never wait for each other."""
    held = ledger.lapsed(operation())
    with body(ledger.url, held) as running, ThreadPoolExecutor(1) as thread:
        completing = thread.submit(running.complete)
        eventually(lambda: ledger.execute("select 1 from pg_stat_activity where wait_event = 'PgSleep'"))
        verdict = raw_claim(ledger, held.operation.digest, held.operation.resource)
        try:
            completing.result()
        except psycopg.errors.DeadlockDetected:
            verdict = "deadlock"
    if verdict == "deadlock":
        raise BrokenPromiseError("complete and claim waited for each other")


def raw_claim(ledger: Ledger, digest: bytes, resource: str) -> str:
    """A claim without the store's retries."""
    ask = "select verdict from once_fenced_claim_v1(%s, 'k', 's', 't', 't', null, %s, 'h', 'w', 60, 5, 'hold', 60, null, 'r', 'n')"
    try:
        return str(ledger.execute(ask, (digest, resource))[0][0])
    except psycopg.errors.DeadlockDetected:
        return "deadlock"


def claims_past_a_frozen_commit(ledger: Ledger) -> None:
    """C9: a successor does not wait for the row lock of a holder that is frozen between complete and COMMIT."""
    held = ledger.lapsed(operation())
    with parked(ledger.url, held):
        store = Ledger(ledger.url, timeout=1.5).store
        try:
            verdict = store.claim(claim_of(held.operation)).verdict
        except Exception as waited:
            raise BrokenPromiseError("claim waited for a frozen row") from waited
        finally:
            store.close()
    if verdict != "granted":
        raise BrokenPromiseError(verdict)


def never_goes_back(ledger: Ledger) -> None:
    """C3: the next token of a resource is higher, whatever was released and pruned in between."""
    resource = fresh("account")
    for _ in range(3):
        held = ledger.hold(operation(resource=resource))
        ledger.run(held, Completion("1", None, 0))
    ledger.store.prune(-1)
    again = ledger.hold(operation(resource=resource))
    if again.token <= held.token:
        raise BrokenPromiseError(f"token {again.token} after {held.token}")


def renews_beside_a_busy_row(ledger: Ledger) -> None:
    """C8: one row that is locked does not keep the other leases of the process from being renewed."""
    busy, other = sorted(
        (ledger.hold(operation()) for _ in range(2)), key=lambda held: held.operation.resource
    )
    answers: list[str] = []
    with parked(ledger.url, busy):
        renewing = threading.Thread(target=lambda: answers.extend(ledger.renew(busy, other)))
        renewing.start()
        renewing.join(1.0)
        found = list(answers)
    renewing.join()
    if found != ["locked", "renewed"]:
        raise BrokenPromiseError(f"answers while one row was busy: {found}")


# --- the broken variants ----------------------------------------------------------------------------------------------

CHECK_THE_FENCE = """\
  update once_fenced_fence set holder = null, expires_at = null
   where resource = p_resource and token = p_token and holder = p_holder;
  if not found then
    raise exception 'fenced off: token % has been superseded', p_token using errcode = 'OF001';
  end if;
"""
LOOK_FOR_EFFECTS = "  select name into unknown from"
FINISH_THE_ENTRY = """\
  update once_fenced_ledger
     set state = 'succeeded'"""
LOOK_AT_THE_FENCE = """\
    select * into f from once_fenced_fence where resource = p_resource;
    if not found then
      insert"""
LOCK_THE_ENTRY = """\
  perform 1 from once_fenced_ledger where key_digest = p_digest for no key update;
"""


def checked_by(statement: str) -> Edits:
    """Complete that checks its fence by ``statement`` alone."""
    check = f"""\
  {statement};
  if not found then raise exception 'fenced off' using errcode = 'OF001'; end if;
"""
    return ((CHECK_THE_FENCE + LOOK_FOR_EFFECTS, check + LOOK_FOR_EFFECTS),)


SUB_SELECT = checked_by(
    "perform 1 where p_token = (select token from once_fenced_fence where resource = p_resource)"
)
KEY_SHARE = checked_by(
    "perform 1 from once_fenced_fence where resource = p_resource and token = p_token for key share"
)
ONLY_AT_BEGIN = checked_by("perform 1")
IN_THE_LEDGER = checked_by(
    "perform 1 from once_fenced_ledger where key_digest = p_digest and token = p_token for update"
)
TRANSACTION_TIME: Edits = (
    (
        "key = p_key, worker = p_worker, acquired_at = clock_timestamp(),\n           expires_at = clock_timestamp()",
        "key = p_key, worker = p_worker, acquired_at = clock_timestamp(),\n           expires_at = now()",
    ),
)
TRANSACTION_TIME_AT_BIRTH: Edits = (
    (
        "              clock_timestamp(), clock_timestamp() + make",
        "              clock_timestamp(), now() + make",
    ),
)
BARE_SEQUENCE: Edits = (
    (
        "create or replace function once_fenced_claim_v1",
        "create sequence bare; create or replace function once_fenced_claim_v1",
    ),
    ("  higher bigint;\n  again", "  higher bigint := nextval('bare');\n  again"),
    ("      higher := once_fenced_token_v1(0);\n", ""),
    ("      again := once_fenced_token_v1(0);\n", "      again := higher;\n"),
    ("    higher := once_fenced_token_v1(f.token);\n", ""),
)
ENTRY_BEFORE_FENCE: Edits = (
    (CHECK_THE_FENCE + LOOK_FOR_EFFECTS, LOCK_THE_ENTRY + LOOK_FOR_EFFECTS),
    (FINISH_THE_ENTRY, CHECK_THE_FENCE + FINISH_THE_ENTRY),
)
UPSERT_FIRST: Edits = (
    (
        LOOK_AT_THE_FENCE,
        """\
    insert into once_fenced_fence (resource, token) values (p_resource, 0)
    on conflict (resource) do update set token = once_fenced_fence.token;
"""
        + LOOK_AT_THE_FENCE,
    ),
)
DELETE_ON_RELEASE: Edits = (
    (
        CHECK_THE_FENCE + LOOK_FOR_EFFECTS,
        CHECK_THE_FENCE.replace(
            "update once_fenced_fence set holder = null, expires_at = null", "delete from once_fenced_fence"
        )
        + LOOK_FOR_EFFECTS,
    ),
)
PRUNE_WITHOUT_FLOOR: Edits = (("  if highest is not null then", "  if false then"),)
PLAIN_RENEWAL: Edits = (("for no key update of f skip locked", "for no key update of f"),)


@dataclass(frozen=True)
class Control:
    name: str
    check: Check
    broken: Edits
    always: Edits = ()


CONTROLS = (
    Control("check in a sub-select", issues_no_token_over_an_open_commit, SUB_SELECT, WITHOUT_EVICTION),
    Control("check FOR KEY SHARE", issues_no_token_over_an_open_commit, KEY_SHARE, WITHOUT_EVICTION),
    Control("check in an earlier transaction", refuses_a_late_write, ONLY_AT_BEGIN, WITHOUT_EVICTION),
    Control("token in the ledger only", refuses_a_late_write, IN_THE_LEDGER, WITHOUT_EVICTION),
    Control("bare sequence", issues_rising_tokens, BARE_SEQUENCE, SLOW_BEFORE_THE_LOCK),
    Control("bare sequence for a new row", issues_rising_tokens, BARE_SEQUENCE, SLOW_BEFORE_THE_BIRTH),
    Control("now()", counts_a_lease_of_a_known_resource_from_its_grant, TRANSACTION_TIME),
    Control("now() for a new row", counts_a_lease_from_its_grant, TRANSACTION_TIME_AT_BIRTH),
    Control("entry before fence", takes_locks_in_one_order, ENTRY_BEFORE_FENCE, SLOW_COMPLETE),
    Control("upsert before eviction", claims_past_a_frozen_commit, UPSERT_FIRST),
    Control("delete on release", never_goes_back, DELETE_ON_RELEASE),
    Control("prune without floor", never_goes_back, PRUNE_WITHOUT_FLOOR),
    Control("renewal that waits", renews_beside_a_busy_row, PLAIN_RENEWAL),
)


@contextlib.contextmanager
def variant(servers: Servers, edits: Edits) -> Iterator[Ledger]:
    script = schema_sql()
    for old, new in edits:
        assert script.count(old) == 1, f"found {script.count(old)} times: {old}"
        script = script.replace(old, new)
    with fresh_database(servers) as url, ledger_at(url, script) as ledger:
        yield ledger


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_the_broken_variant_is_caught(control: Control, servers: Servers) -> None:
    with variant(servers, control.broken + control.always) as ledger, pytest.raises(BrokenPromiseError):
        control.check(ledger)


@pytest.mark.parametrize(
    ("check", "always"),
    sorted({(c.check, c.always) for c in CONTROLS}, key=lambda pair: pair[0].__name__),
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_the_released_functions_pass(check: Check, always: Edits, servers: Servers) -> None:
    with variant(servers, always) as ledger:
        check(ledger)
