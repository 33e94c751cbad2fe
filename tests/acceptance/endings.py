"""Every way in which a task can end, as a table: how it is brought about, in which pools, and what is seen then.

``docs/reference/endings.md`` is this table for people: ``python -m tests.acceptance.endings`` prints it, and a test
compares them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import celery

Free = Literal["body", "lease", "gone", "asked", "hold"]
FREE: Mapping[Free, str] = {
    "body": "as the body ends",
    "lease": "within one lease",
    "gone": "as the message is discarded",
    "asked": "as the next call asks",
    "hold": "as the queue hold ends",
}
"""When a key is free, in the words of the page."""

PREFORK, THREADS, SOLO, GEVENT = "prefork", "threads", "solo", "gevent"
POOLS = (PREFORK, THREADS, SOLO, GEVENT)

Place = Literal[
    "shared", "recycled", "exits", "cut", "cancelled", "warm", "soft", "cold", "crashed", "orphaned"
]
"""Where in a pool: at the worker of all, or at one to which something is done."""

LINKED, ERRORED = ("linked",), ("errored",)
ONCE_HELD = ("hold", "sleep 0")
"""The first run waits until it is let go; a second one would end at once."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """One way to end, and what is to be seen of it."""

    name: str
    task: str = "early"
    """Options of the task: the second part of its name in ``endings_app``."""
    times: str = ""
    """How long its key is held: the first part of its name.  Where it must be freed, an hour."""
    acts: Sequence[str] = ("sleep 0",)
    call: Mapping[str, Any] = field(default_factory=dict)
    """Options of the call."""
    by: str = ""
    """What is done from outside: see ``endings_scene``."""
    place: Place = "shared"
    pools: Sequence[str] = POOLS
    state: str = "SUCCESS"
    callbacks: Sequence[str] = LINKED
    """Those that ran, once or, as Celery has it, twice."""
    runs: int = 1
    free: Free = "body"
    blocks: bool = False
    """Whether a lock that the hook ``after_return`` deletes stays."""
    broken: str = ""
    """A broken variant (``negative``, or one that renews nothing) under which it ends otherwise."""
    since: tuple[int, int] = (5, 5)
    """The first version of Celery that has it."""
    later: tuple[tuple[int, int], Mapping[str, Any]] = ((5, 8), {})
    """A version, and what is otherwise from it on."""

    @property
    def hold(self) -> str:
        return self.times or {"lease": "short", "hold": "brief", "asked": "brief"}.get(self.free, "long")

    def changed(self) -> Ending:
        """As it is from the later version on."""
        return replace(self, **self.later[1])

    def here(self) -> Ending:
        """As it is with the Celery that is installed."""
        return self.changed() if self.later[0] <= celery.VERSION[:2] else self


def _killed(name: str, **given: Any) -> Ending:
    """Nothing ran after the body was killed."""
    return Ending(
        name=name, **{"state": "FAILURE", "callbacks": ERRORED, "free": "lease", "blocks": True, **given}
    )


def _run_again(name: str, **given: Any) -> Ending:
    """The body was killed, and the job was done by a second run."""
    return Ending(name=name, **{"task": "late", "acts": ONCE_HELD, "runs": 2, "free": "lease", **given})


def _lost(name: str, **given: Any) -> Ending:
    """The body was killed and nobody was there to say so."""
    return _killed(name, **{"acts": ONCE_HELD, "state": "PENDING", "callbacks": (), **given})


def _never(name: str, **given: Any) -> Ending:
    """No body ever began."""
    return Ending(
        name=name, **{"state": "REVOKED", "callbacks": (), "runs": 0, "free": "gone", "blocks": True, **given}
    )


def _lingers(name: str, **given: Any) -> Ending:
    """The body goes on, whatever is done meanwhile, and ends well."""
    return Ending(name=name, acts=ONCE_HELD, **given)


LOST = "`reject_on_worker_lost`"
FAILED: Mapping[str, Any] = {"state": "FAILURE", "callbacks": ERRORED}
SILENT: Mapping[str, Any] = {"state": "PENDING", "callbacks": ()}
CANCELLED: Mapping[str, Any] = {"state": "RETRY"}
"""What Celery stores of a body that it gave up, also where nothing will run it again."""

ENDINGS: Sequence[Ending] = (
    # the body ends by itself
    Ending(name="success"),
    Ending(name="success, body of two leases", times="short", acts=["sleep 5.2, note_trust"], broken="unrenewed"),
    Ending(name="exception", acts=["fail"], **FAILED),
    Ending(name="retry", acts=["retry 0.2", "sleep 0"], runs=2),
    Ending(name="autoretry", task="autoretry", acts=["fail", "fail", "sleep 0"], runs=3),
    Ending(name="retries exhausted", task="exhausted", acts=["fail"], runs=2, **FAILED),
    Ending(name="`Ignore`", acts=["ignore"], blocks=True, **SILENT),
    Ending(name="`Reject` without requeue", task="late", acts=["reject"], blocks=True, **SILENT, later=((5, 7), FAILED)),
    Ending(name="`Reject` with requeue", task="late", acts=["requeue", "sleep 0"], runs=2),
    Ending(name="`replace()` by another task", acts=["replace other", "sleep 0"], runs=2, blocks=True),
    Ending(name="`replace()` by the task itself", acts=["replace", "sleep 0"], runs=2),
    Ending(name="result that cannot be stored", acts=["object"], state="FAILURE", callbacks=LINKED + ERRORED),
    Ending(name="callback that cannot be published", by="broken_link", **FAILED),
    Ending(name="`max_tasks_per_child` reached", place="recycled", pools=[PREFORK]),
    # it never begins
    _never("exception in `before_start`", task="never_entered", blocks=False, **FAILED),
    _never("revoked before it starts", by="revoked"),
    _never("revoked before its ETA", by="revoked_at_eta", call={"countdown": 2}, later=((5, 6), {"free": "asked", "call": {"countdown": 600}})),
    _never("`expires` over before it starts", by="expired", call={"expires": 0.5}),
    _never("queue purged", by="purged", pools=[PREFORK], state="PENDING", free="hold"),
    _never("task unknown to the worker", by="unknown", state="FAILURE", free="hold"),
    # its process ends, or is told to
    Ending(name="`sys.exit()`", acts=["exit"], pools=[PREFORK], blocks=True, **SILENT, later=((5, 7), FAILED)),
    Ending(name="`sys.exit()`, unnoticed", acts=["exit"], pools=[THREADS, GEVENT], blocks=True, **SILENT),
    Ending(name="`sys.exit()`, which ends the worker", acts=["exit"], place="exits", pools=[SOLO], **SILENT),
    Ending(name="soft time limit", acts=["sleep 20"], call={"soft_time_limit": 1}, pools=[PREFORK], **FAILED),
    _killed("hard time limit", acts=["sleep 20"], call={"time_limit": 1}, pools=[PREFORK], blocks=False),
    _killed("child killed", acts=["hold"], by="child_killed", pools=[PREFORK]),
    _killed("child killed, `acks_late`", task="late", acts=["hold"], by="child_killed", pools=[PREFORK]),
    _run_again(f"child killed, `acks_late`, {LOST}", task="requeued", acts=["die", "sleep 0"], pools=[PREFORK], broken="drops_twins"),
    _run_again("child killed, `acks_late`, `retry_on_worker_lost`", task="retried", acts=["die", "sleep 0"], pools=[PREFORK], since=(5, 7)),
    _run_again(f"child killed before its result is out, `acks_late`, {LOST}", task="requeued", acts=["fatal", "sleep 0"], pools=[PREFORK], broken="settles_in_end"),
    _run_again(f"child exits before its result is out, `acks_late`, {LOST}", task="requeued", acts=["exiting", "sleep 0"], pools=[PREFORK], broken="settles_without_state", since=(5, 7)),
    Ending(name="child killed after its result is out", task="dies_in_a_hook", pools=[PREFORK], blocks=True, callbacks=LINKED + ERRORED, later=((5, 7), {"callbacks": LINKED})),
    _killed("terminated by SIGTERM", acts=["hold"], by="terminated", pools=[PREFORK, GEVENT], state="REVOKED", callbacks=()),
    _killed("terminated by SIGTERM, `acks_late`", task="late", acts=["hold"], by="terminated", pools=[PREFORK, GEVENT], state="REVOKED", callbacks=()),
    _killed("terminated by SIGKILL", acts=["hold"], by="killed", pools=[PREFORK], state="REVOKED", callbacks=()),
    # its worker ends
    _lost("worker killed", place="crashed", pools=[PREFORK, THREADS, GEVENT]),
    _run_again("worker killed, which had not yet acknowledged", task="early", place="crashed", pools=[SOLO]),
    _run_again("worker killed, `acks_late`", place="crashed"),
    _lost("worker's parent process killed, and its children with it", place="orphaned", pools=[PREFORK]),
    _lingers("warm shutdown", place="warm"),
    _lingers("soft shutdown, body ends in time", place="soft", pools=[PREFORK, THREADS]),
    _lost("soft shutdown, body does not end in time", place="soft", by="kept", pools=[PREFORK], **CANCELLED),
    _run_again("soft shutdown, body does not end in time, `acks_late`", place="soft", by="kept", pools=[PREFORK]),
    _lost("cold shutdown", place="cold", by="kept", pools=[PREFORK], **CANCELLED),
    _run_again("cold shutdown, `acks_late`", place="cold", by="kept", pools=[PREFORK], broken="settles_without_state"),
    _lingers("cold shutdown, which waits for its threads", place="cold", pools=[THREADS]),
    _lingers("cold shutdown, which waits for its threads, `acks_late`", task="late", place="cold", pools=[THREADS]),
    # its broker goes
    _lingers("broker connection lost", place="cut"),
    _lingers("broker connection lost, `acks_late`", task="late", place="cut", pools=[PREFORK, THREADS, GEVENT]),
    _run_again("broker connection lost, `acks_late`, `worker_cancel_long_running_tasks_on_connection_loss`", place="cancelled", pools=[PREFORK]),
)  # fmt: skip
"""The endings.  A row says what is special about it."""


def cases() -> Iterator[tuple[Ending, str]]:
    """Each ending in each pool that has it, with the Celery that is installed."""
    for ending in ENDINGS:
        if ending.since <= celery.VERSION[:2]:
            yield from ((ending.here(), pool) for pool in ending.pools)


# --- for people -------------------------------------------------------------------------------------------------------

HEAD = "| ending | pools | state stored | callbacks | runs | key is free | lock freed by a hook |"
SAID = {"linked": "`link`", "errored": "`link_error`"}


def page_rows() -> Iterator[str]:
    """The table, line by line."""
    yield HEAD
    yield "|---" * HEAD.count(" | ") + "|---|"
    yield from (_page_row(ending) for ending in ENDINGS)


def _page_row(ending: Ending) -> str:
    before, after = (_seen(one) for one in (ending, ending.changed()))
    version = ".".join(map(str, ending.later[0]))
    cells = [
        one if one == two else f"{one}; since Celery {version}: {two}"
        for one, two in zip(before, after, strict=True)
    ]
    since = "" if ending.since == (5, 5) else f" (Celery {'.'.join(map(str, ending.since))})"
    pools = "all" if tuple(ending.pools) == POOLS else ", ".join(ending.pools)
    return " | ".join([f"| {ending.name}{since}", pools, *cells, "stays" if ending.blocks else "-"]) + " |"


def _seen(ending: Ending) -> Sequence[str]:
    state = "none" if ending.state == "PENDING" else f"`{ending.state}`"
    called = ", ".join(SAID[one] for one in ending.callbacks) or "-"
    return state, called, str(ending.runs), FREE[ending.free]


if __name__ == "__main__":
    print("\n".join(page_rows()))  # noqa: T201  # to be pasted
