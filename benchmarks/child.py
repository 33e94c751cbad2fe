"""One measure in a process of its own, so that none inherits another's connections, caches or garbage."""

from __future__ import annotations

import json
import os
import sys

from benchmarks import processors
from benchmarks.measure import Effort
from benchmarks.measures import ALL
from benchmarks.watch import FALSE, told
from celery_once_fenced.events import Event, subscribe

seen: list[str] = []


def _watch(event: Event) -> None:
    if event.name in FALSE:
        seen.append(told(event))


def main(name: str, effort: str) -> None:
    measure, parser = ALL[name], os.environ.get("BENCH_PARSER", "")
    processors.caller()
    subscribe(_watch)
    much = Effort.of(quick=effort == "quick")
    compared = measure.run(much)
    if seen:
        sys.exit(f"{name} measured nothing: {len(seen)} times {seen[0]}")
    goals = [
        {
            "way": goal.way,
            "against": goal.against,
            "statistic": goal.statistic,
            "value": (value := compared.value(goal)),
            "limit": goal.limit(parser),
            "most": goal.most_for(parser),
            "met": goal.met(value, parser),
            "floor": compared.floor(goal),
        }
        for goal in measure.goals
    ]
    figures = {
        "rows": compared.rows() if compared.ways else [],
        "notes": dict(compared.notes),
        "goals": goals,
        "rounds": much.rounds,
        "calls": much.calls,
    }
    head = {"name": name, "title": measure.title, "unit": measure.unit, "parser": parser}
    print(json.dumps(head | figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
