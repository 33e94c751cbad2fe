"""Side by side: guarded tasks, bare ones, other packages, hand-written code and the raw clients; see docs/reference/performance."""

import os
import sys

if os.environ.get("BENCH_PARSER") == "python":
    sys.modules["hiredis"] = None  # type: ignore[assignment]  # redis-py finds it when it is imported, or never
    import redis.connection

    del sys.modules["hiredis"]
    assert not redis.connection.HIREDIS_AVAILABLE
