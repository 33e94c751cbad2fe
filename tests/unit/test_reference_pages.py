"""The reference pages say what the code says: options, settings, errors, events, counters, tables."""

from __future__ import annotations

import ast
import importlib
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import MISSING, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from celery_once_fenced import errors
from celery_once_fenced.config import Settings
from celery_once_fenced.durations import parse_duration
from celery_once_fenced.grant import Grant
from celery_once_fenced.header import Header
from celery_once_fenced.keys import Key
from celery_once_fenced.observers.logging import ORDINARY, WARNINGS
from celery_once_fenced.option_checks import CHECKS
from celery_once_fenced.outcome import Outcome
from celery_once_fenced.policy import Once, Policy, resolve
from celery_once_fenced.stores.counters import COUNTED_BY_STORES, COUNTERS
from celery_once_fenced.stores.postgres_schema import schema_sql
from django_celery_once_fenced import records

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs/reference"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
CODE = [*(ROOT / "celery_once_fenced").rglob("*.py"), *(ROOT / "django_app").rglob("*.py")]
EVENT = re.compile(r"[a-z]+\.[a-z_]+")
COMPUTED = {"unique": "until_executed", "on_conflict": None, "scope": None, "fingerprint": None}
"""Options whose default the policy resolves to something else for each task, and how the page gives it."""


def rows(page: str, section: str = "") -> list[list[str]]:
    """The cells of all table rows of a page, or of its section with this heading, without their backticks."""
    text = (REFERENCE / page).read_text()
    if section:
        text = re.split(r"^## ", text.split(f"## {section}\n", 1)[1], flags=re.MULTILINE)[0]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def documented(page: str, section: str = "") -> set[str]:
    return {name for row in rows(page, section) for name in names(row[0])}


# --- options and settings ---------------------------------------------------------------------------------------------


def test_every_option_is_documented() -> None:
    assert documented("options.md", "Options of a task") == set(CHECKS) == {f.name for f in fields(Once)}


@pytest.mark.parametrize("row", rows("options.md", "Options of a task"), ids=lambda row: row[0])
def test_defaults_of_options(row: list[str]) -> None:
    (option,) = names(row[0])
    default = ast.literal_eval(names(row[1])[0])
    built_in = getattr(resolve([], task="shop.tasks.refresh"), option)
    if option in COMPUTED:
        assert default == COMPUTED[option]
    elif isinstance(built_in, float):
        assert parse_duration(default, option=option) == built_in
    else:
        assert default == built_in


def test_every_setting_is_documented() -> None:
    assert documented("options.md", "Settings") == {f.name for f in fields(Settings)}


@pytest.mark.parametrize("row", rows("options.md", "Settings"), ids=lambda row: row[0])
def test_defaults_of_settings(row: list[str]) -> None:
    (setting,) = names(row[0])
    field = next(f for f in fields(Settings) if f.name == setting)
    if row[1] == "required":
        assert field.default is field.default_factory is MISSING
    elif field.default_factory is not MISSING:
        made: Any = field.default_factory()
        assert ast.literal_eval(names(row[1])[0]) == (made.given() if isinstance(made, Once) else dict(made))
    else:
        assert ast.literal_eval(names(row[1])[0]) == field.default


def test_outcome_and_grant_are_documented() -> None:
    assert documented("options.md", "The outcome of a call") == {f.name for f in fields(Outcome)}
    public = {name for name in {*dir(Grant), *vars(Grant("key"))} if not name.startswith("_")}
    assert {name.removesuffix("()") for name in documented("options.md", "The grant")} == public


def test_the_policy_has_no_option_of_its_own() -> None:
    assert {f.name for f in fields(Policy)} - {"span"} == set(CHECKS)


# --- errors, events, counters -----------------------------------------------------------------------------------------


def test_every_error_is_documented() -> None:
    assert {row for row in documented("errors.md") if row.endswith("Error")} == set(errors.__all__)


def test_codes_of_the_sql_functions() -> None:
    page = documented("errors.md", "Codes of the SQL functions")
    assert page == set(re.findall(r"errcode = '(\w+)'", schema_sql()))


def emitted() -> dict[str, set[str]]:
    """The events that the code emits, and the names of their fields."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in CODE:
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                for call in calls_of_emit(function):
                    for name in event_names(call, function):
                        found[name] |= {keyword.arg for keyword in call.keywords if keyword.arg}
    return found


def calls_of_emit(function: ast.FunctionDef) -> Iterator[ast.Call]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "emit":
            yield node


def event_names(call: ast.Call, function: ast.FunctionDef) -> list[str]:
    """The name in the call itself, or those that the function chooses among."""
    where: ast.AST = call.args[0] if isinstance(call.args[0], ast.Constant) else function
    texts = [node.value for node in ast.walk(where) if isinstance(node, ast.Constant)]
    return [text for text in texts if isinstance(text, str) and EVENT.fullmatch(text)]


def test_every_event_is_documented() -> None:
    page = {names(row[0])[0]: {*row[2].split(", ")} for row in rows("events.md", "Events")}
    assert page == emitted()


def test_levels_of_events() -> None:
    for row in rows("events.md", "Events"):
        (name,) = names(row[0])
        assert row[1] == ("WARNING" if name in WARNINGS else "DEBUG" if name in ORDINARY else "INFO")
    assert documented("events.md", "Events") >= WARNINGS | ORDINARY


def test_every_record_kind_is_documented() -> None:
    inserts = re.findall(r"insert into once_fenced_event.*?;", schema_sql(), re.DOTALL)
    kinds = {kind for insert in inserts for kind in re.findall(r"'([a-z]+\.[a-z_]+)'", insert)}
    assert documented("events.md", "Records in PostgreSQL") == kinds | set(records.KINDS)


def test_every_counter_is_documented() -> None:
    assert documented("events.md", "Counters") == set(COUNTERS)
    by_the_guard = {"replayed", "fenced_off", "in_doubt", "unguarded"}
    assert {*COUNTED_BY_STORES, *by_the_guard} == set(COUNTERS)


# --- stores -----------------------------------------------------------------------------------------------------------


def test_every_index_is_documented() -> None:
    """Those for Django's admin, too."""
    folder = files("celery_once_fenced.stores") / "sql"
    sql = "".join(file.read_text("utf-8") for file in folder.iterdir() if file.name.endswith(".sql"))
    made = set(re.findall(r"create index if not exists (\w+)", sql))
    page = (REFERENCE / "keys-and-tables.md").read_text()
    assert {name for name in re.findall(r"`(once_fenced_\w+)`", page) if name in made} == made
    assert "once_fenced_ledger_started" in made


def test_every_table_domain_and_function_is_documented() -> None:
    sql = schema_sql()
    made = re.findall(r"^create (?:table if not exists|or replace function) (\w+)", sql, re.MULTILINE)
    domains = re.findall(r"^ +'(once_fenced_\w+) as ", sql, re.MULTILINE)
    assert documented("keys-and-tables.md", "PostgreSQL") == {*made, *domains}


def test_every_field_of_the_header_is_documented() -> None:
    full = Header(
        key=Key("0" * 64, "text"),
        fingerprint="1" * 64,
        delivery="d",
        run="r",
        awaited=True,
        deferrals=1,
        republished=1,
        answer_from="t",
        bypass=True,
        packed=True,
        seq=1,
        waiting_since=1,
        once_key="k",
    )
    assert documented("keys-and-tables.md", "The message header") == set(full.dump())


# --- examples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_examples_import_exists(page: Path) -> None:
    for module, imported in imports(page):
        for name in imported:
            assert hasattr(importlib.import_module(module), name), f"{module} has no {name}"


def imports(page: Path) -> Iterator[tuple[str, list[str]]]:
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("celery_once_fenced"):
                yield str(node.module), [alias.name for alias in node.names]


def value_of(node: ast.expr) -> Any:
    """What an example writes; a name stands for a function of its own."""
    return str if isinstance(node, ast.Name) else ast.literal_eval(node)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_in_examples_exist(page: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Once":
                Once(**{str(k.arg): value_of(k.value) for k in node.keywords})
