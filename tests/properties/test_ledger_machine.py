"""Fence and ledger against a model, with bodies left anywhere: whatever the order of claims, writes, completes,
commits, lost replies, errors, lapses, takeovers, forced releases and prunes,

- tokens of a resource rise with every grant, and no committed write carries one that was superseded (C1, C3, C6),
- the writes of a key are committed at most once (L1),
- abandon says what is true (C13), and every key ends.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)

from celery_once_fenced.stores import Claimed, Held, Operation
from celery_once_fenced.stores.postgres import schema_sql
from tests.fixtures.ledger import Body, Ledger, eventually, ledger_at, operation

RESOURCE_OF = {"k0": "r0", "k1": "r0", "k2": "r0", "k3": "r0", "k4": "r0", "k5": "r1", "k6": "r1"}
ENDLESS = 10_000
"""Takeovers allowed: exhaustion has tests of its own."""


@dataclass(eq=False)
class Run:
    """One execution, as its worker knows it."""

    key: str
    held: Held
    body: Body | None = None
    parked: bool = False
    """Complete is done and holds the row locks."""
    lapsed: bool = False


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger
        prefix = uuid.uuid4().hex[:8]
        self.operations: dict[str, Operation] = {
            key: operation(f"{prefix} {key}", f"{prefix} {resource}") for key, resource in RESOURCE_OF.items()
        }
        self.issued = dict.fromkeys(RESOURCE_OF.values(), 0)
        self.holding: dict[str, Run | None] = dict.fromkeys(RESOURCE_OF.values())
        self.entry: dict[str, Run] = {}
        self.ended: dict[str, str] = {}
        self.running: list[Run] = []
        """Executions that are not over, zombies among them."""

    # --- what workers do ----------------------------------------------------------------------------------------------

    @rule(key=st.sampled_from(sorted(RESOURCE_OF)), after_a_lapse=st.booleans())
    def claim(self, key: str, after_a_lapse: bool) -> None:
        if after_a_lapse:
            self.lapse(RESOURCE_OF[key])
        holder = uuid.uuid4().hex
        answer = self.ledger.claim(self.operations[key], holder, max_takeovers=ENDLESS)
        assert answer.verdict == self.expected(key)
        if answer.verdict == "granted":
            run = Run(key, Held(self.operations[key], holder, 0, 0))
            self.granted(run, answer)
            self.running.append(run)

    def expected(self, key: str) -> str:
        current = self.holding[RESOURCE_OF[key]]
        if key in self.ended:
            return self.ended[key]
        return "busy" if current is not None and not current.lapsed else "granted"

    def granted(self, run: Run, answer: Claimed) -> None:
        resource, before = RESOURCE_OF[run.key], self.entry.get(run.key)
        assert (answer.token or 0) > self.issued[resource]
        assert answer.attempt == (1 if before is None else before.held.attempt + (before is not run))
        run.held = Held(run.held.operation, run.held.holder, answer.token or 0, answer.attempt)
        run.lapsed = False
        self.issued[resource] = run.held.token
        self.holding[resource] = self.entry[run.key] = run

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 5), steps=st.sampled_from([1, 1, 2, 3]), reply_is_lost=st.booleans())
    def go_on(self, which: int, steps: int, reply_is_lost: bool) -> None:
        """Begin, complete, COMMIT: the next one to three of them.  A zombie's are refused."""
        run = self.one(which)
        for _ in range(steps):
            if run in self.running:
                self.step(run, reply_is_lost)

    def step(self, run: Run, reply_is_lost: bool) -> None:
        if run.body is None:
            run.body = Body(self.ledger.url, run.held)
            self.unless_refused(run, run.body.begin)
        elif not run.parked:
            if self.unless_refused(run, run.body.complete):
                run.parked = True
        elif self.unless_refused(run, run.body.commit):
            self.committed(run, reply_is_lost)

    def committed(self, run: Run, reply_is_lost: bool) -> None:
        assert run.held.token == self.issued[RESOURCE_OF[run.key]]
        self.holding[RESOURCE_OF[run.key]] = None
        self.ended[run.key] = "completed"
        if reply_is_lost:
            self.abandon(run, "retryable")
        self.over(run)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 5), final=st.sampled_from([False, False, True]), rolled_back=st.booleans())
    def fail(self, which: int, final: bool, rolled_back: bool) -> None:
        """Not rolled back: the client is gone and its session hangs on the server."""
        run = self.one(which)
        if rolled_back and run.body is not None:
            run.body.close()
        self.abandon(run, "failed" if final else "retryable")
        self.over(run)

    # --- what happens to them -----------------------------------------------------------------------------------------

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 5))
    def a_claim_is_repeated_because_its_reply_was_lost(self, which: int) -> None:
        run = self.one(which)
        if self.current(run) and run.body is None:
            answer = self.ledger.claim(run.held.operation, run.held.holder, max_takeovers=ENDLESS)
            assert answer.verdict == "granted"
            self.granted(run, answer)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 5))
    def renew(self, which: int) -> None:
        run = self.one(which)
        answer = "lost" if not self.current(run) else "locked" if run.parked else "renewed"
        assert self.ledger.renew(run.held) == [answer]
        if answer == "renewed":
            run.lapsed = False

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 5))
    def release_by_force(self, which: int) -> None:
        run = self.one(which)
        token = self.ledger.store.force_release(run.held.operation.resource, run.held.holder, "test")
        assert (token is not None) == self.current(run)
        if token is not None:
            assert token > self.issued[RESOURCE_OF[run.key]]
            self.issued[RESOURCE_OF[run.key]] = token
            self.holding[RESOURCE_OF[run.key]] = None

    @rule(after_a_lapse=st.booleans())
    def prune(self, after_a_lapse: bool) -> None:
        for resource in self.holding if after_a_lapse else ():
            self.lapse(resource)
        while self.ledger.store.prune(-1):
            pass
        for resource, run in self.holding.items():
            if run is not None and run.lapsed and not run.parked:
                self.holding[resource] = None

    # --- the model ----------------------------------------------------------------------------------------------------

    def current(self, run: Run) -> bool:
        return self.holding[RESOURCE_OF[run.key]] is run

    def one(self, which: int) -> Run:
        return self.running[which % len(self.running)]

    def lapse(self, resource: str) -> None:
        """A row that complete has locked cannot be reached; such a lease has lapsed before or not at all."""
        run = self.holding[resource]
        if run is not None and not run.parked:
            assert self.ledger.expire(run.held.operation.resource)
            run.lapsed = True

    def unless_refused(self, run: Run, step: Callable[[], object]) -> bool:
        """The step must succeed where the run holds the fence; elsewhere it is refused, and the run is over."""
        if self.current(run):
            step()
            return True
        with pytest.raises(psycopg.Error):
            step()
        self.abandon(run, "retryable")
        self.over(run)
        return False

    def over(self, run: Run) -> None:
        self.running.remove(run)
        if run.body is not None:
            with suppress(psycopg.Error):
                run.body.close()

    def abandon(self, run: Run, state: str) -> None:
        reply = self.ledger.abandon(run.held, state)
        assert (reply.state, reply.ours) == self.truth(run, state)
        if self.current(run):
            assert reply.fence_ours
            self.holding[RESOURCE_OF[run.key]] = None
        if reply.state == "failed":
            self.ended[run.key] = "failed_final"

    def truth(self, run: Run, state: str) -> tuple[str, bool]:
        ours = self.entry.get(run.key) is run
        if self.ended.get(run.key) == "completed":
            return "succeeded", ours
        if not ours:
            return "taken_over", False
        return state if self.current(
            run
        ) else "retryable", True  # a final error counts only under an own fence

    def teardown(self) -> None:
        for run in list(self.running):
            self.over(run)
        for run in filter(None, self.holding.values()):
            run.parked = False
            eventually(
                partial(self.ledger.expire, run.held.operation.resource)
            )  # its session ends in its own time
        for key, op in self.operations.items():
            if key not in self.ended:
                self.ledger.run(self.ledger.hold(op, max_takeovers=ENDLESS))
                self.ended[key] = "completed"
            assert self.ledger.claim(op).verdict == self.ended[key]
            assert len(self.ledger.writes(op)) == (self.ended[key] == "completed")


def check(ledger: Ledger, **options: Any) -> None:
    run_state_machine_as_test(
        lambda: LedgerMachine(ledger),
        settings=settings(
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
            derandomize=True,
            report_multiple_bugs=False,
            **options,
        ),
    )


def test_fence_and_ledger_keep_their_promises_in_every_order(postgres_url: str) -> None:
    with ledger_at(postgres_url) as ledger:
        check(ledger, max_examples=40)


@pytest.mark.parametrize(
    ("released", "broken"),
    [
        ("if highest is not null then", "if false then"),
        (
            "where resource = p_resource and token = p_token and holder = p_holder;\n  if not found",
            "where false;\n  if false",
        ),
    ],
    ids=["prune without floor", "fence unchecked"],
)
def test_a_broken_variant_does_not_pass(postgres_url: str, released: str, broken: str) -> None:
    script = schema_sql()
    assert released in script
    with ledger_at(postgres_url, script.replace(released, broken)) as ledger, pytest.raises(AssertionError):
        check(ledger, max_examples=30, phases=[Phase.generate])
