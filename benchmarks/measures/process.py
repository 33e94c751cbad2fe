"""What needs no broker: the key of a call, and the import."""

from __future__ import annotations

import compileall
import inspect
import itertools
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

import celery_once_fenced
from benchmarks.measure import Comparison, Effort, Goal, Measure, compare, in_turn
from celery_once_fenced.calls import CallPlan
from celery_once_fenced.keys import KeyRecipe

__all__ = ["DERIVATION", "IMPORT"]

CALLS_AT_ONCE = 100
IMPORTS = {
    "celery": "import celery",
    "celery_once_fenced": "import celery, celery_once_fenced",
    "celery and what declares an app with a task": "from celery import Celery, Task; import celery.app.task",
    "the same and SingletonTask": "from celery import Celery, Task; import celery.app.task; from celery_once_fenced import SingletonTask",
}
TIMED = "import time; began = time.perf_counter(); {}; print(time.perf_counter() - began)"


def derivation(effort: Effort) -> Comparison:
    """A key of five arguments, against binding them with ``inspect.Signature.bind``."""

    def task(a: int, b: str, c: float, d: bool = True, e: None = None) -> None: ...

    signature, recipe = inspect.signature(task), KeyRecipe(CallPlan.of(task, "task"), fingerprint=())

    def bind(number: int) -> None:
        for call in range(number, number + CALLS_AT_ONCE):
            signature.bind(call, "text", 1.5, d=False)

    def derive(number: int) -> None:
        for call in range(number, number + CALLS_AT_ONCE):
            recipe.derive_call((call, "text", 1.5), {"d": False})

    ways = {"Signature.bind alone": bind, "key": derive}
    compared = compare(ways, rounds=effort.rounds, calls=effort.calls, size=CALLS_AT_ONCE)
    return Comparison(
        compared.ways, {"median of a key (µs)": statistics.median(itertools.chain(*compared.ways["key"]))}
    )


def imports(effort: Effort) -> Comparison:
    def way(code: str) -> float:
        command = [sys.executable, "-c", TIMED.format(code)]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout) * 1e6

    # As pip installs it, and has installed Celery: compiled.
    compileall.compile_dir(Path(celery_once_fenced.__file__).parent, quiet=1)
    return in_turn({name: partial(way, code) for name, code in IMPORTS.items()}, rounds=effort.rounds)


DERIVATION = Measure(
    name="key",
    title="Key of a call with five arguments",
    unit="µs",
    run=derivation,
    goals=(Goal("median of a key (µs)", most=8.0),),
)
IMPORT = Measure(
    name="import",
    title="Import of `celery_once_fenced` ÷ import of `celery`",
    unit="µs",
    run=imports,
    goals=(Goal("celery_once_fenced", "celery", most=1.05),),
)
