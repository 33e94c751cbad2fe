"""The version matrix: `make matrix`, or one cell with `nox -s "tests(python='3.12', celery='5.6', django='6.0')"`.

`nox -s brokers` adds RabbitMQ and Redis as brokers; it needs their Debian packages, which `make debian` installs.

Interpreters that are not installed fail rather than being passed over: a matrix with holes proves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import nox

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["tests", "oldest", "newest_redis"]

PYTHONS = ["3.11", "3.12", "3.13"]
CELERY = ["5.5", "5.6", "5.7"]
DJANGO = ["5.2", "6.0", "6.1"]
# What `make test` runs. Versions differ from the pinned ones on purpose here, so nothing is taken from requirements/.
MARKERS = "not debian"


def run_tests(session: nox.Session, *pins: str, tests: Sequence[str] = ("-m", MARKERS)) -> None:
    session.install(
        "--editable", ".[django]", *pins, *nox.project.dependency_groups(nox.project.load_toml(), "test")
    )
    # It asks for a Django below 6.1, and works with that too.
    session.install("--no-deps", *nox.project.dependency_groups(nox.project.load_toml(), "beat"))
    session.run("python", "-m", "pytest", *tests, *session.posargs)


def supported(python: str, django: str) -> bool:
    """Django 6 needs Python 3.12."""
    return django < "6" or python != "3.11"


@nox.session
@nox.parametrize(
    ("python", "celery", "django"),
    [(p, c, d) for p in PYTHONS for c in CELERY for d in DJANGO if supported(p, d)],
)
def tests(session: nox.Session, celery: str, django: str) -> None:
    """Every supported combination of Python, Celery and Django."""
    run_tests(session, f"celery[redis]=={celery}.*", f"django=={django}.*")


@nox.session(python="3.11")
def oldest(session: nox.Session) -> None:
    """The oldest supported version of everything at once."""
    run_tests(session, "celery[redis]==5.5.*", "django==5.2.*", "redis==5.2.*", "psycopg[binary]==3.2.11")


@nox.session(python="3.13")
def newest_redis(session: nox.Session) -> None:
    """The newest redis-py with the speed-up that its users install."""
    run_tests(session, "redis[hiredis]")


@nox.session(python="3.11")
@nox.parametrize("celery", CELERY)
def brokers(session: nox.Session, celery: str) -> None:
    """Every supported Celery with Debian's RabbitMQ and Redis as brokers."""
    run_tests(session, f"celery[redis]=={celery}.*", tests=["tests/acceptance/test_brokers.py"])
