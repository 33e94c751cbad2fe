"""The pages for those who operate it say what the code says: checks, commands, metrics."""

from __future__ import annotations

import json
import re
from dataclasses import fields

import click
import pytest

from celery_once_fenced.audit import Audited
from celery_once_fenced.cli import Exit, once
from celery_once_fenced.cli.holding import COLUMNS
from celery_once_fenced.cli.measuring import BODIES, NOW, TIMES
from celery_once_fenced.observers.prometheus import OnceCollector
from tests.unit.test_reference_pages import CODE, REFERENCE, documented, names, rows

SQL = REFERENCE.parents[1] / "celery_once_fenced/stores/sql"
CHECK = re.compile(r'(?:id="once_fenced\.|Finding\(\s*"|for_the_doctor\(")([EW]\d{3})"')


def test_every_check_is_documented_and_no_other() -> None:
    given = {identity for path in CODE for identity in CHECK.findall(path.read_text())}
    assert {name for name in documented("checks.md") if re.fullmatch(r"[EW]\d{3}", name)} == given
    assert len(given) > 30


# --- command line -----------------------------------------------------------------------------------------------------


def command_rows() -> dict[str, set[str]]:
    """Options by command, as the page has them."""
    text = (REFERENCE / "command-line.md").read_text().split("## ")[0]
    found = re.findall(r"^\| `(\w+)[^`]*` \| ([^|]*) \|", text, re.MULTILINE)
    return {command: set(names(options)) for command, options in found}


def test_every_command_and_option_is_documented() -> None:
    options = {
        name: {opt for param in command.params if isinstance(param, click.Option) for opt in param.opts}
        for name, command in once.commands.items()
    }
    assert command_rows() == options


def test_arguments_are_documented() -> None:
    text = (REFERENCE / "command-line.md").read_text()
    for name, command in once.commands.items():
        arguments = [str(param.name).upper() for param in command.params if isinstance(param, click.Argument)]
        assert f"| `{' '.join([name, *arguments])}` |" in text


def test_exit_statuses_are_documented() -> None:
    assert documented("command-line.md", "Exit status") == {str(int(status)) for status in Exit}
    epilog = str(once.epilog)
    assert re.findall(r"(\d) ", epilog) == [str(int(status)) for status in Exit]


FIELDS: dict[str, set[str]] = {
    "audit": {field.name for field in fields(Audited)},
    "doctor": {"id", "level", "text", "remedy"},
    "leases": {"digest", *COLUMNS},
    "stats": {*NOW, *TIMES, *BODIES, "counters"},
}


@pytest.mark.parametrize("command", FIELDS)
def test_fields_of_json_are_documented(command: str) -> None:
    (row,) = [row for row in rows("command-line.md", "JSON") if row[0] == f"`{command}`"]
    assert set(names(row[1].split(" (`kind`")[0])) == FIELDS[command]


def test_every_command_with_json_has_its_fields_documented() -> None:
    with_json = {name for name, options in command_rows().items() if "--json" in options}
    assert documented("command-line.md", "JSON") == with_json


# --- metrics ----------------------------------------------------------------------------------------------------------

MONITORING = REFERENCE.parent / "monitoring"
METRIC = re.compile(r"\bonce_fenced_[a-z0-9_]+")


def families() -> dict[str, tuple[str, str]]:
    """Type and help of every metric, by its full name."""
    told = OnceCollector(lambda: pytest.fail("describing asks nobody")).describe()
    full = {"counter": "_total"}
    return {family.name + full.get(family.type, ""): (family.type, family.documentation) for family in told}


def test_every_metric_is_documented_with_its_type_and_help() -> None:
    page = {names(row[0])[0]: (row[1], row[3]) for row in rows("metrics.md")}
    assert page == {name: (kind, text[0].lower() + text[1:]) for name, (kind, text) in families().items()}


def unknown_metrics(text: str) -> set[str]:
    """The metrics that a text names and nobody exports."""
    samples = {f"{name}{suffix}" for name in families() for suffix in ("", "_bucket", "_sum", "_count")}
    return set(METRIC.findall(text)) - samples


@pytest.mark.parametrize("name", ["grafana-dashboard.json", "prometheus-rules.yml"])
def test_dashboard_and_alerts_use_metrics_that_exist(name: str) -> None:
    text = (MONITORING / name).read_text()
    assert unknown_metrics(text) == set()
    assert len(set(METRIC.findall(text))) > 8


def test_a_metric_that_nobody_exports_is_caught() -> None:
    assert unknown_metrics("rate(once_fenced_lost[5m])") == {"once_fenced_lost"}


def test_pages_name_metrics_that_exist() -> None:
    for page in REFERENCE.parent.rglob("*.md"):
        found = {name for name in unknown_metrics(page.read_text()) if not TABLE_OR_FUNCTION.search(name)}
        assert found - of_the_database() == set(), page


def of_the_database() -> set[str]:
    """Tables, indexes and domains."""
    return {name for path in SQL.glob("*.sql") for name in METRIC.findall(path.read_text())} | {
        "once_fenced_claim"
    }


TABLE_OR_FUNCTION = re.compile(r"_v\d+$")


def test_the_dashboard_has_a_query_and_a_title_in_every_panel() -> None:
    dashboard = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    for panel in dashboard["panels"]:
        assert panel["title"]
        assert all(target["expr"] for target in panel["targets"])
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)


def test_every_alert_says_what_it_means() -> None:
    alerts = (MONITORING / "prometheus-rules.yml").read_text().split("- alert: ")[1:]
    for alert in alerts:
        for part in ("expr: ", "severity: ", 'summary: "', 'description: "'):
            assert part in alert, alert
