"""Effects against a model and a gateway, with executions left anywhere: whatever the order of claims, starts, calls,
receipts, errors, lapses, takeovers, commits and decisions of people,

- the gateway charges a key at most once, and is asked again only under the same downstream key, and only where the
  policy or a person said so (L4); a certain failure renews the key,
- an outcome that is not known becomes known by a receipt or a probe and by nothing else; nothing commits until then,
- a superseded holder starts nothing, and a recorded step is not taken again (L5).
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from celery_once_fenced.errors import FencedOffError, OutcomeUnknownError
from celery_once_fenced.stores import EffectFinish, EffectStart, EffectStarted, Held, Operation, Resolution
from celery_once_fenced.stores.postgres import schema_sql
from tests.fixtures.ledger import Ledger, ledger_at, operation

POLICY = {"k0": "hold", "k1": "rerun", "k2": "fail", "k3": "probe", "k4": "rerun"}
ENDED = {"in_doubt": "in_doubt", "succeeded": "completed", "failed": "failed_final"}
ENDLESS = 10_000


@dataclass(eq=False)
class Run:
    """One execution, as its worker knows it."""

    key: str
    held: Held
    downstream: str = ""
    """What it was told to call with, and has not called with yet."""
    outcome: bool | None = None
    """Whether the gateway charged, once it has answered this run."""


@dataclass
class Effect:
    """The recorded step of a key."""

    state: str
    holder: str
    downstream: str


@dataclass
class Account:
    """A key: its entry, its step, and the gateway's books."""

    policy: str
    state: str = "none"
    owner: Run | None = None
    fence: Run | None = None
    lapsed: bool = False
    effect: Effect | None = None
    calls: list[str] = field(default_factory=list)
    charged: dict[str, bool] = field(default_factory=dict)
    """By downstream key: a provider that knows the key again answers as it did before."""
    repeats_allowed: bool = False

    @property
    def unknown(self) -> bool:
        return self.effect is not None and self.effect.state == "started"


class EffectMachine(RuleBasedStateMachine):
    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger
        self.eye = psycopg.connect(ledger.url, autocommit=True)
        prefix = uuid.uuid4().hex[:8]
        self.operations: dict[str, Operation] = {key: operation(f"{prefix} {key}") for key in POLICY}
        self.accounts = {key: Account(policy) for key, policy in POLICY.items()}
        for account in self.accounts.values():
            account.repeats_allowed = account.policy in ("rerun", "probe")
        self.runs: list[Run] = []
        """Executions that are not over, zombies among them."""
        self.late: list[Run] = []
        """Executions that are over, with a call or a receipt still under way."""

    # --- what workers do ----------------------------------------------------------------------------------------------

    @rule(
        key=st.sampled_from(sorted(POLICY)),
        step=st.sampled_from(["charged", "declined", "no receipt", "not called"]),
        ends=st.sampled_from(["fail", "fail", "commit", "goes on"]),
    )
    def whole_attempt(self, key: str, step: str, ends: str) -> None:
        """The ordinary way, so that what comes of it is reached often; the other rules do its parts in any order."""
        self.claim(key, after_a_lapse=True)
        run = self.accounts[key].fence
        if run is None:
            return
        self.start_(run)
        if run.downstream and step != "not called":
            self.call_(run, charges=step != "declined", receipt_arrives=step != "no receipt")
        if ends == "fail":
            self.fail_(run)
        elif ends == "commit":
            self.commit_(run)

    @rule(key=st.sampled_from(sorted(POLICY)), after_a_lapse=st.booleans())
    def only_claim(self, key: str, after_a_lapse: bool) -> None:
        self.claim(key, after_a_lapse)

    def claim(self, key: str, after_a_lapse: bool) -> None:
        account, holder = self.accounts[key], uuid.uuid4().hex
        if after_a_lapse and account.fence is not None:
            assert self.ledger.expire(self.operations[key].resource)
            account.lapsed = True
        answer = self.ledger.claim(
            self.operations[key], holder, max_takeovers=ENDLESS, on_unknown=account.policy
        )
        assert answer.verdict == self.claimed(account)
        if answer.verdict == "granted":
            run = Run(key, Held(self.operations[key], holder, answer.token or 0, answer.attempt))
            account.state, account.owner, account.fence, account.lapsed = "running", run, run, False
            self.runs.append(run)

    def claimed(self, account: Account) -> str:
        """What the model says of a claim; an unknown outcome is decided here for hold and fail."""
        if account.state in ENDED:
            return ENDED[account.state]
        if account.fence is not None and not account.lapsed:
            return "busy"
        if account.unknown and account.policy in ("hold", "fail"):
            account.state = "in_doubt" if account.policy == "hold" else "failed"
            account.owner = account.fence = None
            return ENDED[account.state]
        return "granted"

    @precondition(lambda self: self.runs)
    @rule(which=st.integers(0, 5), reply_is_lost=st.booleans())
    def start(self, which: int, reply_is_lost: bool) -> None:
        self.start_(self.one(which), reply_is_lost)

    def start_(self, run: Run, reply_is_lost: bool = False) -> None:
        account, effect = self.account(run), self.account(run).effect
        if run.downstream:
            return  # a name is used once in an execution
        answer = self.ask_to_start(run)
        if account.fence is not run:
            assert answer.verdict == "fenced"
        elif effect is None or effect.state in ("failed", "released") or self.reruns(account, run):
            self.go(run, answer)
        elif effect.state == "done":
            assert answer.verdict == "done"
        else:
            assert (answer.verdict, answer.downstream_key) == ("unknown", effect.downstream)
            assert answer.holder == effect.holder
            self.probe(run, answer)
        if reply_is_lost and run.downstream:
            again = self.ask_to_start(run)
            assert (again.verdict, again.holder) == ("unknown", run.held.holder)
            assert again.downstream_key == run.downstream

    def reruns(self, account: Account, run: Run) -> bool:
        return account.unknown and account.policy == "rerun" and account.effect.holder != run.held.holder  # type: ignore[union-attr]

    def ask_to_start(self, run: Run, own: str | None = None) -> EffectStarted:
        return self.ledger.store.effect_start(EffectStart(run.held, "gateway", POLICY[run.key], own))

    def go(self, run: Run, answer: EffectStarted) -> None:
        account = self.account(run)
        before = account.effect
        assert answer.verdict == "go"
        assert answer.downstream_key
        if before is not None:
            assert (answer.downstream_key == before.downstream) == (before.state != "failed")
        run.downstream = answer.downstream_key
        account.effect = Effect("started", run.held.holder, run.downstream)

    def probe(self, run: Run, answer: EffectStarted) -> None:
        account = self.account(run)
        if account.policy != "probe" or answer.holder == run.held.holder or account.effect is None:
            return
        if account.charged.get(account.effect.downstream):
            assert self.finish_as(run, answer.holder or "", charged=True)
        else:
            self.go(run, self.ask_to_start(run, "rerun"))

    @precondition(lambda self: any(run.downstream for run in [*self.runs, *self.late]))
    @rule(
        which=st.integers(0, 5), charges=st.sampled_from([True, True, False]), receipt_arrives=st.booleans()
    )
    def call(self, which: int, charges: bool, receipt_arrives: bool) -> None:
        """The gateway is asked, perhaps by a zombie; without a receipt the outcome stays unknown."""
        calling = [run for run in [*self.runs, *self.late] if run.downstream and run.outcome is None]
        if not calling:
            return
        self.call_(calling[which % len(calling)], charges, receipt_arrives)

    def call_(self, run: Run, charges: bool, receipt_arrives: bool) -> None:
        account = self.account(run)
        account.calls.append(run.downstream)
        run.outcome = account.charged.setdefault(run.downstream, charges)
        if receipt_arrives:
            self.report(run)

    @precondition(lambda self: any(run.outcome is not None for run in [*self.runs, *self.late]))
    @rule(which=st.integers(0, 5))
    def a_receipt_comes_late(self, which: int) -> None:
        told = [run for run in [*self.runs, *self.late] if run.outcome is not None]
        self.report(told[which % len(told)])

    def report(self, run: Run) -> None:
        effect = self.account(run).effect
        assert effect is not None
        counts = effect.state in ("started", "released") and effect.holder == run.held.holder
        assert self.finish_as(run, run.held.holder, charged=bool(run.outcome), counts=counts) == counts

    def finish_as(self, run: Run, holder: str, *, charged: bool, counts: bool = True) -> bool:
        state: Any = "done" if charged else "failed"
        result = '"receipt"' if charged else None
        if counts and self.account(run).effect is not None:
            self.account(run).effect.state = state  # type: ignore[union-attr]
        return self.ledger.store.effect_finish(
            EffectFinish(self.operations[run.key].digest, "gateway", holder, state, result)
        )

    @precondition(lambda self: self.runs)
    @rule(which=st.integers(0, 5))
    def commit(self, which: int) -> None:
        self.commit_(self.one(which))

    def commit_(self, run: Run) -> None:
        account = self.account(run)
        if account.fence is not run:
            self.refused(run, FencedOffError)
        elif account.unknown:
            self.refused(run, OutcomeUnknownError)
        else:
            self.ledger.run(run.held)
            account.state, account.owner, account.fence = "succeeded", None, None
            self.runs.remove(run)

    def refused(self, run: Run, error: type[Exception]) -> None:
        with pytest.raises(error):
            self.ledger.run(run.held)
        self.fail_(run)

    @precondition(lambda self: self.runs)
    @rule(which=st.integers(0, 5))
    def fail(self, which: int) -> None:
        self.fail_(self.one(which))

    def fail_(self, run: Run) -> None:
        """Its worker is told what is true."""
        account = self.account(run)
        reply = self.ledger.abandon(run.held, on_unknown=account.policy, message="again")
        if account.owner is not run:
            assert reply.state == ("succeeded" if account.state == "succeeded" else "taken_over")
        else:
            account.owner = account.fence = None
            account.state = {"hold": "in_doubt", "fail": "failed"}.get(
                account.policy if account.unknown else "", "retryable"
            )
            assert reply.state == account.state
        self.runs.remove(run)
        if run.downstream:
            self.late.append(run)

    # --- what people do -----------------------------------------------------------------------------------------------

    @rule(
        key=st.sampled_from(sorted(POLICY)),
        state=st.sampled_from(["retryable", "retryable", "succeeded", "failed"]),
    )
    def resolve(self, key: str, state: Any) -> None:
        account = self.accounts[key]
        resolved = self.ledger.store.resolve(
            Resolution(
                self.operations[key].digest,
                state,
                "1" if state == "succeeded" else None,
                None,
                3600,
                "a",
                "b",
            )
        )
        assert resolved.done == (account.state == "in_doubt")
        if not resolved.done:
            return
        account.state = state
        if state == "retryable":
            account.repeats_allowed = True
            if account.unknown:
                account.effect.state = "released"  # type: ignore[union-attr]

    # --- the promise --------------------------------------------------------------------------------------------------

    @invariant()
    def a_key_is_charged_at_most_once(self) -> None:
        for account in self.accounts.values():
            assert sum(account.charged.values()) <= 1, "charged twice"
            if not account.repeats_allowed:
                assert len(account.calls) == len(set(account.calls)), "asked again"

    @invariant()
    def the_ledger_holds_what_was_reported(self) -> None:
        rows = self.eye.execute(
            "select key_digest, state, holder, downstream_key from once_fenced_effect where key_digest = any(%s)",
            ([op.digest for op in self.operations.values()],),
        )
        recorded = {bytes(digest): Effect(*columns) for digest, *columns in rows}
        assert recorded == {
            self.operations[key].digest: account.effect
            for key, account in self.accounts.items()
            if account.effect is not None
        }

    def teardown(self) -> None:
        self.eye.close()

    # --- parts --------------------------------------------------------------------------------------------------------

    def one(self, which: int) -> Run:
        return self.runs[which % len(self.runs)]

    def account(self, run: Run) -> Account:
        return self.accounts[run.key]


def check(ledger: Ledger, **options: Any) -> None:
    run_state_machine_as_test(
        lambda: EffectMachine(ledger),
        settings=settings(
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
            derandomize=True,
            report_multiple_bugs=False,
            **options,
        ),
    )


def test_effects_keep_their_promises_in_every_order(postgres_url: str) -> None:
    with ledger_at(postgres_url) as ledger:
        check(ledger, max_examples=50)


BROKEN = {
    "key renewed although the outcome is unknown": (
        "case state when 'failed' then gen_random_uuid()::text else downstream_key end",
        "gen_random_uuid()::text",
    ),
    "key kept after a certain failure": (
        "case state when 'failed' then gen_random_uuid()::text else downstream_key end",
        "downstream_key",
    ),
    "claim looks at no effect": ("if policy = 'hold' then", "if false then"),
    "anybody's receipt counts": (
        "and state in ('started', 'released') and holder = p_holder;",
        "and state in ('started', 'released');",
    ),
    "commits with an unknown outcome": (
        "if found then\n    raise exception 'an effect",
        "if false then\n    raise exception 'an effect",
    ),
    "started without the fence": (
        "if not found then\n    verdict := 'fenced';",
        "if false then\n    verdict := 'fenced';",
    ),
    "recorded step taken again": ("when x.state = 'done' then 'done'", "when x.state = 'done' then 'again'"),
    "run again with the step unreleased": (
        "update once_fenced_effect set state = 'released'",
        "update once_fenced_effect set state = 'started'",
    ),
}


@pytest.mark.parametrize(("released", "broken"), BROKEN.values(), ids=BROKEN)
def test_a_broken_variant_does_not_pass(postgres_url: str, released: str, broken: str) -> None:
    script = schema_sql()
    assert script.count(released) == 1
    caught = pytest.raises((AssertionError, pytest.fail.Exception))
    with ledger_at(postgres_url, script.replace(released, broken)) as ledger, caught:
        check(ledger, max_examples=200, phases=[Phase.generate])
