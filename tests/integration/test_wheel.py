"""The built wheel works where nothing of the repository is on the path, and without Django and PostgreSQL.

An editable install puts the repository's root on the path, so a data file that the wheel lacks would go unnoticed.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PACKAGES = {"celery_once_fenced": ROOT, "django_celery_once_fenced": ROOT / "django_app"}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the working tree."""
    directory = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(directory),
        str(ROOT),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = directory.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def bare_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with the wheel and its required dependencies, in the pinned versions, and nothing else."""
    directory = tmp_path_factory.mktemp("bare")
    venv.create(directory, with_pip=False)
    (site_packages,) = directory.glob("lib/python*/site-packages")
    for name in required_by("celery-once-fenced"):
        copy_distribution(name, site_packages)
    python = directory / "bin" / "python"
    install = ["install", "--no-deps", "--no-index", "--quiet", str(wheel)]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, *install], check=True)
    return python


def required_by(name: str, extras: Iterable[str] = ()) -> set[str]:
    """The distributions that `name` with `extras` requires here, and what those require; without itself."""
    found: set[str] = set()
    waiting = [(name, frozenset(extras))]
    seen = set(waiting)
    while waiting:
        parent, parent_extras = waiting.pop()
        for text in importlib.metadata.requires(parent) or []:
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *parent_extras}):
                found.add(requirement.name)
                child = (requirement.name, frozenset(requirement.extras))
                if child not in seen:
                    seen.add(child)
                    waiting.append(child)
    return found


def copy_distribution(name: str, site_packages: Path) -> None:
    """Copies an installed distribution as it is: the same pinned version, without a download."""
    for file in importlib.metadata.files(name) or []:
        if ".." not in file.parts and "__pycache__" not in file.parts:
            target = site_packages / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file.locate(), target)


def run_elsewhere(python: Path, code: str, directory: Path) -> str:
    """Runs `code` isolated (-I): neither the current directory nor PYTHONPATH is on the path."""
    command = [str(python), "-I", "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_holds_every_file_of_both_packages(wheel: Path) -> None:
    expected = {
        path.relative_to(parent).as_posix()
        for package, parent in PACKAGES.items()
        for path in (parent / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    names = set(zipfile.ZipFile(wheel).namelist())
    assert expected <= names
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == set(PACKAGES)


@pytest.mark.parametrize(
    "part",
    [
        "celery_once_fenced/py.typed",
        "celery_once_fenced/stores/lua/",
        "celery_once_fenced/stores/sql/",
        "django_celery_once_fenced/py.typed",
        "django_celery_once_fenced/migrations/0001",
    ],
)
def test_wheel_holds_what_is_not_python(wheel: Path, part: str) -> None:
    assert any(name.startswith(part) for name in zipfile.ZipFile(wheel).namelist())


def test_wheel_has_the_license_and_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        texts = {name.split(".dist-info/")[1]: name for name in archive.namelist() if ".dist-info/" in name}
        assert "licenses/LICENSE" in texts
        assert b"once = celery_once_fenced.cli:once" in archive.read(texts["entry_points.txt"])


@pytest.mark.parametrize("missing", ["django", "psycopg", "pytest"])
def test_bare_environment_is_bare(bare_python: Path, tmp_path: Path, missing: str) -> None:
    code = f"import importlib.util as u; print(u.find_spec({missing!r}))"
    assert run_elsewhere(bare_python, code, tmp_path) == "None\n"


def test_core_imports_from_the_wheel_alone(bare_python: Path, tmp_path: Path) -> None:
    code = "import celery_once_fenced as c; print(c.__file__); c.SingletonTask; c.FencedTask"
    assert run_elsewhere(bare_python, code, tmp_path).startswith(str(bare_python.parents[1]))


BARE_APP = """
import os, time
from celery import Celery
from celery_once_fenced import SingletonTask

app = Celery("bare", broker=os.environ["BROKER"], backend=os.environ["BACKEND"])
app.conf.once_fenced = {"redis_url": os.environ["BROKER"], "namespace": os.environ["NAMESPACE"]}
app.conf.broker_transport_options = {"global_keyprefix": os.environ["NAMESPACE"]}
app.conf.result_backend_transport_options = {"global_keyprefix": os.environ["NAMESPACE"]}
app.conf.broker_connection_retry_on_startup = True


@app.task(base=SingletonTask)
def add(a, b):
    time.sleep(0.5)  # long enough for the second call
    return a + b
"""

BARE_CALLS = """
import bare
results = [bare.add.delay(1, b) for b in (2, 2, 3)]
print([result.outcome.status for result in results], [result.get(timeout=20) for result in results])
try:
    import celery_once_fenced.stores.postgres
except ModuleNotFoundError as error:
    print(error.name)
"""


def test_efficiency_tier_works_in_the_bare_environment(
    bare_python: Path, tmp_path: Path, redis_url: str, namespace: str
) -> None:
    (tmp_path / "bare.py").write_text(BARE_APP)
    own = {"BROKER": redis_url, "BACKEND": redis_url, "NAMESPACE": namespace, "PATH": os.defpath}
    options = {"cwd": tmp_path, "env": own, "text": True}
    worker = [str(bare_python), "-m", "celery", "-A", "bare", "worker", "-c", "2", "--without-mingle"]
    with subprocess.Popen(worker, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options) as running:
        try:
            done = subprocess.run(
                [str(bare_python), "-c", BARE_CALLS], capture_output=True, check=True, timeout=60, **options
            )
        finally:
            running.terminate()
    assert done.stdout.splitlines() == ["['enqueued', 'duplicate', 'enqueued'] [3, 3, 4]", "psycopg"]
