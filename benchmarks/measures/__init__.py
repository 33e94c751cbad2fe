"""All measures, in the order of the table."""

from __future__ import annotations

from benchmarks.measure import Measure
from benchmarks.measures import correctness, enqueue, ledger_scale, process, redis_scale, run

__all__ = ["ALL"]

ALL: dict[str, Measure] = {
    measure.name: measure
    for measure in (
        enqueue.NEW,
        enqueue.DUPLICATE,
        enqueue.MANY,
        run.EFFICIENCY,
        correctness.ONE,
        correctness.FOUR,
        run.REPLAY,
        run.THROUGHPUT,
        process.DERIVATION,
        redis_scale.MEMORY,
        redis_scale.HELD,
        redis_scale.LISTING,
        ledger_scale.CLAIM,
        ledger_scale.PRUNE,
        redis_scale.RENEWAL,
        process.IMPORT,
    )
}
