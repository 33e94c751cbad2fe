"""What a task gets once all layers of options are merged: one frozen ``Policy``.

``resolve`` runs when a task is bound, with the layers in order of precedence: the ``tasks`` setting,
``once=`` of the task, its base class, the ``defaults`` setting; what none of them sets is built in.  Each
option was checked alone when it was written (``Once``); here is what only the whole can tell (rules E20, W7).
"""

from __future__ import annotations

import re
from collections import ChainMap
from dataclasses import dataclass, fields
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from celery_once_fenced.durations import Duration, parse_duration
from celery_once_fenced.errors import ConfigError
from celery_once_fenced.options import NOT_GIVEN, Once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from celery_once_fenced.keys import KeySpec, ResourceSpec
    from celery_once_fenced.option_checks import (
        OnConflict,
        OnDuplicate,
        OnOverflow,
        OnStoreError,
        OnUnknown,
        Tier,
        Unique,
    )

__all__ = [
    "NOT_GIVEN",
    "SPANS",
    "STRATEGIES",
    "Duration",
    "Once",
    "Policy",
    "Span",
    "parse_duration",
    "resolve",
    "span_of",
]


@dataclass(frozen=True, slots=True)
class Span:
    """One value of ``unique`` as six flags, and of ``on_duplicate`` as three more: all that tells them apart, as data.

    The scripts read the same flags as letters.
    """

    refused_by_q: bool
    """At enqueue: a queued call makes this one a duplicate."""
    refused_by_r: bool
    """At enqueue: a running one does."""
    sets_q: bool
    """At enqueue: the call takes q."""
    needs_r: bool
    """At start: r must be free."""
    sets_r: bool
    """At start: take r; the end frees it."""
    clears_q: bool
    """At start: free q."""
    ordered: bool = False
    """Calls of one key are numbered, and an older one is superseded by a newer one (E13)."""
    displaces: bool = False
    """At enqueue: take q from whoever has it (E13a)."""
    keeps_last: bool = False
    """At enqueue: a call that q refuses leaves its arguments to the one that holds q (E13b)."""

    @property
    def is_window(self) -> bool:
        """Whether q stands for a window that nothing but its end frees (until_expired)."""
        return self.sets_q and not self.clears_q

    @property
    def flags(self) -> str:
        """The same for the scripts: the letters of ``LETTERS``, in the order of the fields, that hold."""
        return "".join(
            letter for letter, field in zip(LETTERS, fields(self), strict=True) if getattr(self, field.name)
        )


LETTERS = "qrQnRcodk"


def _span(flags: str) -> Span:
    return Span(*(letter in flags for letter in LETTERS))


SPANS: Mapping[str, Span] = MappingProxyType(
    {
        "until_executed": _span("qrQnRc"),
        "until_executing": _span("qQc"),
        "until_expired": _span("qQ"),  # Nothing frees q but its TTL, which is the window.
        "while_executing": _span("nR"),
        "until_and_while_executing": _span("qQnRc"),
    }
)


@dataclass(frozen=True, slots=True)
class Strategy:
    """One value of ``on_duplicate``: the flags it takes from a span, and those it adds."""

    takes: str = ""
    adds: str = ""


STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {
        "return_existing": Strategy(),
        "raise": Strategy(),
        "replace": Strategy(takes="qr", adds="od"),  # Nothing refuses the newest call.
        "keep_last": Strategy(adds="ok"),
    }
)


@cache
def span_of(unique: str, on_duplicate: str) -> Span:
    """The span of a task, as its strategy changes it."""
    span, strategy = SPANS[unique], STRATEGIES[on_duplicate]
    if strategy == Strategy():
        return span
    return _span("".join(set(span.flags) - set(strategy.takes)) + strategy.adds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """All options of one task, with their final values.  ``Once`` says what they mean."""

    tier: Tier
    key: KeySpec
    scope: str
    unique: Unique
    span: Span
    on_duplicate: OnDuplicate
    on_conflict: OnConflict
    lease: float
    queue_hold: float
    window: float | None
    """None but for until_expired."""
    max_hold: float | None
    """None: renewal does not end."""
    max_deferred: int
    on_overflow: OnOverflow
    on_store_error: OnStoreError
    replay_for: float | None
    """None only in the efficiency tier."""
    resource: ResourceSpec
    fingerprint: tuple[str, ...] | None
    """None = all arguments; ``()`` = off, as always in the efficiency tier, which never compares it."""
    atomic: bool
    on_unknown: OnUnknown | Callable[[str], object]
    final_errors: tuple[type[Exception], ...]
    max_attempts: int
    """Takeovers of one key, not handled retries."""
    double_run: str

    @property
    def correctness(self) -> bool:
        """Whether the ledger and the fence stand behind this task."""
        return self.tier == "correctness"

    @property
    def hold(self) -> float:
        """How long q lives, any delay of the call apart: the window of until_expired, else ``queue_hold``."""
        return self.queue_hold if self.window is None else self.window


_BUILT_IN: Mapping[str, Any] = MappingProxyType(
    {
        "tier": "efficiency",
        "key": None,
        "scope": None,
        "on_duplicate": "return_existing",
        "on_conflict": None,
        "lease": 60.0,
        "queue_hold": 3600.0,
        "window": None,
        "max_hold": None,
        "max_deferred": 100,
        "on_overflow": "raise",
        "on_store_error": "open",
        "replay_for": None,
        "resource": None,
        "fingerprint": None,
        "atomic": True,
        "on_unknown": "hold",
        "final_errors": (),
        "max_attempts": 5,
        "double_run": "",
    }
)


def resolve(
    layers: Sequence[Once | Mapping[str, object]],
    *,
    task: str,
    hard_limit: float | None = None,
    defaults: Once | None = None,
) -> Policy:
    """Merge ``layers``, first wins, over the built-in values.

    Args:
        layers: ``Once`` objects or dicts of their options, the strongest first.
        task: Name of the task: the default scope, and the subject of errors.
        hard_limit: Hard time limit in seconds, the default of ``max_hold``; None: there is none.
        defaults: The weakest layer, of the setting ``defaults``: an error says which options come from there.

    Raises:
        ConfigError: with all that is wrong, the reasons and the remedies.
    """
    declared: ChainMap[str, Any] = ChainMap({}, *map(_given, layers))
    inherited = _given(defaults or Once())
    options: dict[str, Any] = {**_BUILT_IN, "unique": None, **inherited, **declared}
    if options["unique"] is None:  # keep_last has a span of its own (E13b).
        options["unique"] = (
            "until_and_while_executing" if options["on_duplicate"] == "keep_last" else "until_executed"
        )
    problems = list(_refusals(options))
    if problems:
        silent = inherited.keys() - declared.keys()
        raise ConfigError(f"{task}: " + "; ".join(_with_source(problem, silent) for problem in problems))
    return _policy(options, task, hard_limit)


def _given(layer: Once | Mapping[str, object]) -> dict[str, Any]:
    return (layer if isinstance(layer, Once) else Once.from_mapping(layer)).given()


def _with_source(problem: str, inherited: Iterable[str]) -> str:
    """Who reads the declaration of a task does not see what the settings add to it."""
    named = sorted(name for name in inherited if re.search(rf"\b{name}=", problem))
    if not named:
        return problem
    return (
        f"{problem} ({' and '.join(named)} {'is' if len(named) == 1 else 'are'} set in the setting defaults)"
    )


def _policy(options: dict[str, Any], task: str, hard_limit: float | None) -> Policy:
    unique = options["unique"]
    options["span"] = span_of(unique, options["on_duplicate"])
    options["scope"] = options["scope"] or task
    options["on_conflict"] = options["on_conflict"] or ("skip" if unique == "until_executed" else "defer")
    if options["max_hold"] is None:
        options["max_hold"] = hard_limit
    if options["tier"] == "efficiency" or options["on_duplicate"] == "keep_last":
        options[
            "fingerprint"
        ] = ()  # The arguments of a run that kept the last call are not those it was called with.
    return Policy(**options)


# --- what does not go together ------------------------------------------------------------------------------


def _refusals(options: Mapping[str, Any]) -> Iterator[str]:
    yield from _refused_spans(options)
    yield from _refused_durations(options)
    if options["tier"] == "correctness":
        yield from _refused_in_correctness(options)


def _refused_spans(options: Mapping[str, Any]) -> Iterator[str]:
    """E20, first half."""
    unique, on_duplicate = options["unique"], options["on_duplicate"]
    if unique == "while_executing" and on_duplicate != "return_existing":
        yield (
            "unique='while_executing' refuses nothing when enqueuing, so "
            f"on_duplicate={on_duplicate!r} would never apply; leave it out, or use "
            "unique='until_and_while_executing'"
        )
    if on_duplicate == "keep_last" and unique not in ("until_and_while_executing", "while_executing"):
        yield (
            f"on_duplicate='keep_last' keeps one call queued while another runs, which "
            f"unique={unique!r} does not do; leave unique out, it is until_and_while_executing then"
        )


def _refused_durations(options: Mapping[str, Any]) -> Iterator[str]:
    unique, window = options["unique"], options["window"]
    if unique == "until_expired" and window is None:
        yield "unique='until_expired' needs a window: how long a call counts, such as window='15m'"
    if unique != "until_expired" and window is not None:
        yield f"window={window:g} needs unique='until_expired', and this is {unique!r}; leave it out"
    if options["max_hold"] is not None and options["max_hold"] < options["lease"]:
        yield (
            f"max_hold={options['max_hold']:g} is shorter than lease={options['lease']:g}, which is granted "
            "whole; shorten the lease or raise max_hold"
        )


def _refused_in_correctness(options: Mapping[str, Any]) -> Iterator[str]:
    replay_for, on_duplicate = options["replay_for"], options["on_duplicate"]
    if replay_for is None:
        yield (
            "tier='correctness' needs replay_for, how long a finished key answers later calls with "
            "its recorded result. There is no safe default: too long and tomorrow's refresh is answered "
            "with today's result, too short and a second click is charged twice. Write replay_for=0 for a "
            "job that is meant to repeat, or a time such as replay_for='30d' for one that is not"
        )
    elif replay_for and on_duplicate in ("replace", "keep_last"):  # E20, second half
        yield (
            f"on_duplicate={on_duplicate!r} runs the newest call in the place of an older one, but under "
            f"replay_for={replay_for:g} the ledger answers it with the older one's result; use replay_for=0"
        )
    if on_duplicate == "keep_last" and options["resource"] is not None:
        yield (
            f"resource={options['resource']!r} could differ between the calls that on_duplicate='keep_last' makes "
            "into one; leave resource out, it is the key then"
        )
