"""``celery -A benchmarks.tasks …``, with this package imported first: it decides about hiredis."""

import sys

from celery.bin.celery import main

if __name__ == "__main__":
    sys.argv[1:1] = ["-A", "benchmarks.tasks"]
    main()
