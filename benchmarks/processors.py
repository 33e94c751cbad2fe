"""Processors of their own for the caller and for the servers.

Where they share one, a round trip is a change of processes, and where they do not, the caller may work while the server
does: ratios differ, and which of the two it is would be the scheduler's choice, for a whole run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection

import psutil

__all__ = ["VARIABLE", "are_many", "caller", "everywhere", "server"]

VARIABLE = "BENCH_APART"
"""Set for a measure that is to have the first processor for itself."""

_ALL: list[int] = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []


def are_many() -> bool:
    """Whether caller and servers can be parted."""
    return len(_ALL) > 1


def caller() -> None:
    """Keeps this process, and those that it starts, on the first processor."""
    if os.environ.get(VARIABLE):
        os.sched_setaffinity(0, _ALL[:1])


def server(pid: int) -> None:
    """Keeps a server off the caller's processor, if the caller has one."""
    if os.environ.get(VARIABLE):
        _keep(pid, _ALL[1:])


def everywhere(pid: int) -> None:
    if are_many():
        _keep(pid, _ALL)


def _keep(pid: int, processors: Collection[int]) -> None:
    """Also the threads and the children that it has; later ones inherit."""
    process = psutil.Process(pid)
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            for thread in each.threads():
                os.sched_setaffinity(thread.id, processors)
