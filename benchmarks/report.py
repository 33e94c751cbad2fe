"""Figures for people: in a terminal, as a Markdown table, as a plot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["MARKS", "goal_line", "markdown", "plot", "terminal"]

ROUNDING = 0.005
MARKS = ("<!-- figures: python -m benchmarks --docs -->", "<!-- end of figures -->")
PARSERS = {"": "", "hiredis": "with hiredis", "python": "without hiredis"}

OURS = frozenset(
    {
        "guarded task",
        "guarded tasks",
        "fenced task",
        "fenced",
        "finished key",
        "new keys, apply_many",
        "duplicates, apply_many",
        "key",
        "many held",
        "many entries",
        "100 leases",
        "celery_once_fenced",
        "the same and SingletonTask",
    }
)
"""What a plot has in colour."""
OURS_COLOUR, OTHERS_COLOUR = "#1b6ca8", "#b8c4cc"
MARKERS: dict[str, dict[str, Any]] = {
    "goal": {"marker": "|", "color": "#c0392b", "markersize": 13, "markeredgewidth": 2, "ls": ""},
    "at best": {"marker": "D", "color": "#e69f00", "markersize": 5, "markeredgecolor": "#333", "ls": ""},
}

Figures = dict[str, Any]


def terminal(figures: Figures) -> str:
    """One measure as lines of text."""
    parser = PARSERS[figures["parser"]]
    title = f"{figures['title']}{f', {parser}' if parser else ''} ({figures['unit']})"
    lines = [f"\n{title}"]
    if figures["rows"]:
        lines.append(f"  {'':<44} {'median':>10} {'min':>10} {'p99':>10}   ratio  spread  of minima")
    lines += [
        f"  {row['way']:<44} {row['median']:10.1f} {row['minimum']:10.1f} {row['p99']:10.1f}"
        f"  {row['ratio']:6.2f}  ±{row['spread'] / 2:4.0%}  {row['ratio_of_minima']:9.2f}"
        for row in figures["rows"]
    ]
    lines += [f"  {name}: {value:,.2f}" for name, value in figures["notes"].items()]
    return "\n".join([*lines, *(f"  {goal_line(goal)}" for goal in figures["goals"])])


def goal_line(goal: Figures) -> str:
    what = goal["way"] if goal["against"] is None else f"{goal['way']} ÷ {goal['against']}"
    statistic = "" if goal["statistic"] == "median" else f", {goal['statistic']}"
    floor = "" if goal["floor"] is None else f", at best {goal['floor']:.2f}"
    return f"{'met   ' if goal['met'] else 'MISSED'} {what}{statistic}: {_value(goal)} (goal {goal['limit']}{floor})"


def markdown(run: Figures) -> str:
    """The tables of ``docs/reference/performance.md``, with machine, versions and date."""
    about = " · ".join(f"{name} {value}" for name, value in run["machine"].items())
    quick = " (quick)" if run["quick"] else ""
    commit = f" at {run['commit'][:7]}" if run["commit"] else ""
    lines = [
        f"Measured {run['date']}{quick}{commit}: {about}.",
        "",
        *_goals(run),
        "",
        "![Ratios](performance.svg)",
    ]
    for figures in run["measures"]:
        if figures["rows"]:
            lines += ["", *_table(figures)]
    return "\n".join(lines)


def _goals(run: Figures) -> list[str]:
    lines = ["| measure | | figure | goal | at best | |", "|---|---|---|---|---|---|"]
    for figures in run["measures"]:
        for goal in figures["goals"]:
            against = f" ÷ {goal['against']}" if goal["against"] else ""
            statistic = "" if goal["statistic"] == "median" else f", {goal['statistic']}"
            lines.append(
                f"| {figures['title']} | {goal['way']}{against}{statistic}{_comma(figures['parser'])} | {_value(goal)} "
                f"| {goal['limit']} | {_floor(goal)} | {'met' if goal['met'] else '**missed**'} |"
            )
    return lines


def _value(goal: Figures) -> str:
    """With as many digits as tell it from the goal."""
    near = goal["most"] is not None and abs(goal["value"] - goal["most"]) < ROUNDING
    return f"{goal['value']:.4f}" if near else f"{goal['value']:.2f}"


def _floor(goal: Figures) -> str:
    return "" if goal["floor"] is None else f"{goal['floor']:.2f}"


def _table(figures: Figures) -> list[str]:
    lines = [
        f"**{figures['title']}**{_comma(figures['parser'])} ({figures['unit']})",
        "",
        "| | median | minimum | p99 | ratio | spread | ratio of minima |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['way']} | {row['median']:,.1f} | {row['minimum']:,.1f} | {row['p99']:,.1f} | {row['ratio']:.2f} "
        f"| ±{row['spread'] / 2:.0%} | {row['ratio_of_minima']:.2f} |"
        for row in figures["rows"]
    ]
    return lines


def _comma(parser: str) -> str:
    return f", {PARSERS[parser]}" if parser else ""


def plot(run: Figures, path: Path) -> None:
    """Ratios as bars, a chart for each measure; the bar of the first way is 1."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "once-fenced"
    from matplotlib import pyplot

    shown = [figures for figures in run["measures"] if len(figures["rows"]) > 1]
    rows = max(1, (len(shown) + 1) // 2)
    height = 2.5 * rows + 0.5
    canvas, axes = pyplot.subplots(rows, 2, figsize=(13, height), squeeze=False)
    for axis in axes.flat[len(shown) :]:
        axis.axis("off")
    for axis, figures in zip(axes.flat, shown, strict=False):
        _chart(axis, figures)
    canvas.legend(handles=_legend(), loc="upper center", ncols=5, fontsize=8, frameon=False)
    canvas.tight_layout(rect=(0, 0, 1, 1 - 0.35 / height))
    canvas.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _chart(axis: Any, figures: Figures) -> None:
    names = [row["way"] for row in figures["rows"]][::-1]
    ratios = [row["ratio"] for row in figures["rows"]][::-1]
    spreads = [row["spread"] * row["ratio"] / 2 for row in figures["rows"]][::-1]
    colours = [OURS_COLOUR if name in OURS else OTHERS_COLOUR for name in names]
    axis.barh(names, ratios, xerr=spreads, color=colours, error_kw={"ecolor": "#555", "lw": 1})
    axis.axvline(1, color="#333", lw=0.8)
    for way, at, of in _marks(figures):
        axis.plot([at], [names.index(way)], **MARKERS[of])
    title = figures["title"].replace("`", "")
    axis.set_title(f"{title}{_comma(figures['parser'])}", fontsize=8, loc="left")
    axis.set_xlabel(f"time ÷ that of {names[-1]}", fontsize=7)
    axis.set_xlim(left=0)
    axis.tick_params(labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)


def _marks(figures: Figures) -> Iterator[tuple[str, float, str]]:
    """The first goal of each way, and what is possible at best, on the scale of the chart."""
    ratios = {row["way"]: row["ratio"] for row in figures["rows"]}
    for goal in {goal["way"]: goal for goal in reversed(figures["goals"])}.values():
        if goal["statistic"] != "median" or goal["against"] not in ratios:
            continue
        scale = ratios[goal["against"]]
        yield goal["way"], goal["most"] * scale, "goal"
        if goal["floor"] is not None:
            yield goal["way"], goal["floor"] * scale, "at best"


def _legend() -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    marks = [Line2D([], [], label=name, **how) for name, how in MARKERS.items()]
    spread = Line2D([], [], color="#555", lw=1, label="spread of the rounds")
    return [
        Patch(color=OURS_COLOUR, label="celery-once-fenced"),
        Patch(color=OTHERS_COLOUR, label="what it is compared to"),
        *marks,
        spread,
    ]
