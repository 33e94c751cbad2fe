"""One attempt of an operation: what a body may do between a granted claim and its commit.

Two shapes, one commit (L12)::

    atomic=True    begin ─ body ─ complete(result) ─ COMMIT
    atomic=False   body ─┬─ begin ─ grant.atomic() block ─ complete ─ COMMIT ─┬─ rest of the body ─ record(result)
                         └─ (no block opened) ─────── begin ─ complete(result) ─ COMMIT

In both the block is left through complete, and what it wrote, the ledger's ``succeeded`` and the messages of
``grant.send()`` become durable together or not at all.  After the COMMIT nothing turns the attempt into a failure (L8).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from celery_once_fenced.effects import Effects, Policy, Step
from celery_once_fenced.errors import FencedOffError, GrantError, StoreUnavailableError
from celery_once_fenced.events import emit
from celery_once_fenced.grant import Grant, granted
from celery_once_fenced.keepers import FenceKeeper, KeptFence
from celery_once_fenced.ledger import Codec, Encoded, ResultOmitted
from celery_once_fenced.outbox import Outbox
from celery_once_fenced.run import Body, Execution
from celery_once_fenced.stores import Completion, Database, Held, LedgerStore, Transaction

__all__ = ["Attempt"]

NOT_RECORDED = Encoded(ResultOmitted("not_recorded"), None, "not_recorded")
"""What complete leaves where the body goes on after its block; the result is added when there is one (L12)."""

WRITES = frozenset({"INSERT", "UPDATE", "DELETE", "MERGE", "COPY", "TRUNCATE"})


class Attempt:
    """One granted attempt.  Not for several threads at once, as the body is one."""

    def __init__(
        self,
        ex: Execution,
        held: Held,
        keeper: FenceKeeper,
        kept: KeptFence,
        *,
        ledger: LedgerStore,
        database: Database,
        outbox: Outbox,
        codec: Codec,
    ) -> None:
        self.held = held
        self.committed = False
        self.value: object = NOT_RECORDED.value
        """What the task returns, should the commit turn out to have happened (L8)."""
        self._ex = ex
        self._ledger = ledger
        self._database = database
        self._outbox = outbox
        self._codec = codec
        self._transaction: Transaction | None = None
        self._keeper = keeper
        self._kept = kept
        self._opened = False
        self._spoiled: BaseException | None = None
        self._effects = Effects(ledger, held, ex.policy.on_unknown, codec)
        self._grant = Grant(
            ex.key.text,
            resource=ex.resource,
            token=held.token,
            attempt=held.attempt,
            belief=kept,
            ask=self._ask,
            backing=self,
        )

    def run(self, body: Body) -> None:
        """Run the body to its commit.  Raises what the body, complete or COMMIT raises."""
        with granted(self._grant):
            if self._ex.policy.atomic:
                with self._committing() as complete:
                    complete(Encoded.of(body(self._grant), self._codec))
            else:
                self._run_open(body)

    def _run_open(self, body: Body) -> None:
        encoded = Encoded.of(body(self._grant), self._codec)
        if self.committed:
            self._record(encoded)
            return
        if self._spoiled is not None:
            raise self._spoiled
        with self._committing() as complete:
            complete(encoded)

    # --- what the grant hands on ------------------------------------------------------------------------------------------

    @contextmanager
    def atomic(self) -> Iterator[Any]:
        """See ``Grant.atomic``."""
        if self._ex.policy.atomic:
            raise GrantError(
                f"{self._ex.task} runs in one transaction as a whole: declare Once(atomic=False) to open grant.atomic()"
            )
        if self._opened:
            raise GrantError(
                f"{self._ex.task} has opened grant.atomic() before: an execution commits once (L12)"
            )
        self._opened = True
        try:
            with self._committing() as complete:
                yield self._grant.connection
                complete(NOT_RECORDED)
        except BaseException as error:
            # A body that goes on all the same must not be recorded as done without what it wrote (C13, L10).
            if isinstance(error, FencedOffError) or self._database.connection_lost(error):
                self._spoiled = error
            raise

    def effect(
        self, name: str, fn: Step, failed: tuple[type[BaseException], ...], own: Policy | None
    ) -> object:
        """See ``Grant.effect``."""
        if self.committed:
            raise GrantError(
                f"effect {name!r} is called after the commit: nothing would remember it; call it before"
            )
        return self._effects.run(name, self._only_reading(fn, name), failed, own)

    def send(self, signature: Any) -> str:
        """See ``Grant.send``."""
        return self._outbox.put(self._open, self.held, signature)

    def _only_reading(self, fn: Step, name: str) -> Step:
        """``fn``, kept from writing in the body's transaction where its connection lets itself be watched (L13)."""
        watch = getattr(self._grant.connection, "execute_wrapper", None)
        if self._transaction is None or watch is None:
            return fn

        def watched(key: str) -> object:
            with watch(partial(_refuse_writes, name)):
                return fn(key)

        return watched

    def _ask(self) -> None:
        if self.committed:
            raise GrantError(
                f"{self._ex.task} has committed: a retry would only be answered from the ledger, and send the callbacks "
                "a second time"
            )
        self._keeper.ask(self._kept)

    # --- the one commit ---------------------------------------------------------------------------------------------------

    @property
    def _open(self) -> Transaction:
        if self._transaction is None:
            raise GrantError("there is no open transaction here to commit with: use `with grant.atomic():`")
        return self._transaction

    @contextmanager
    def _committing(self) -> Iterator[Callable[[Encoded], None]]:
        with self._database.transaction(self.held) as transaction:
            self._transaction, self._grant.connection = transaction, transaction.connection
            try:
                yield self._complete
            finally:
                self._transaction = None
        self.confirm()

    def confirm(self) -> None:
        """The COMMIT happened: what was sent with it may go out."""
        self.committed = True
        self._kept.given_back()
        self._outbox.publish()

    def _complete(self, encoded: Encoded) -> None:
        self.value = encoded.value
        self._open.complete(
            self.held, Completion(encoded.text, encoded.omitted, self._ex.retention, self._ex.replay)
        )
        emit(
            "ledger.completed",
            key=self._ex.digest,
            task=self._ex.task,
            task_id=self._ex.task_id,
            token=self.held.token,
        )

    def _record(self, encoded: Encoded) -> None:
        self.value = encoded.value
        try:
            self._ledger.record(
                self.held, Completion(encoded.text, encoded.omitted, self._ex.retention, self._ex.replay)
            )
        except StoreUnavailableError as error:  # a replay returns the omitted marker
            emit("store.failed", operation="record", key=self._ex.digest, why=str(error))


def _refuse_writes(name: str, execute: Callable[..., Any], sql: Any, *rest: Any) -> Any:
    """Around each statement that the function of an effect sends through Django's connection of the body (L13)."""
    if re.split(r"\W", str(sql).lstrip("( \n\t"), maxsplit=1)[0].upper() in WRITES:
        raise GrantError(
            f"effect {name!r} writes in the body's transaction: rolled back, the effect would still count as done; "
            "write before or after the call of grant.effect()"
        )
    return execute(sql, *rest)
