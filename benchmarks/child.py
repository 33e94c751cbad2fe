"""One measure in a process of its own, so that none inherits another's connections, caches or garbage."""

from __future__ import annotations

import json
import os
import sys

from benchmarks.measure import Effort
from benchmarks.measures import ALL


def main(name: str, effort: str) -> None:
    measure, parser = ALL[name], os.environ.get("BENCH_PARSER", "")
    compared = measure.run(Effort.of(quick=effort == "quick"))
    goals = [
        {
            "way": goal.way,
            "against": goal.against,
            "statistic": goal.statistic,
            "value": (value := compared.value(goal)),
            "limit": goal.limit(parser),
            "met": goal.met(value, parser),
        }
        for goal in measure.goals
    ]
    figures = {
        "rows": compared.rows() if compared.ways else [],
        "notes": dict(compared.notes),
        "goals": goals,
    }
    head = {"name": name, "title": measure.title, "unit": measure.unit, "parser": parser}
    print(json.dumps(head | figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
