"""What a guarded task costs, against a bare one, its peers and hand-written code in the same run; never a test.

``python -m benchmarks`` measures everything; see ``docs/reference/performance.md``.
"""

import os
import sys

if os.environ.get("BENCH_PARSER") == "python":
    sys.modules["hiredis"] = None  # type: ignore[assignment]  # redis-py then reads replies in Python
