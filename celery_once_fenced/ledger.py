"""The ledger, seen from a worker: states, what the answers of claim and abandon mean, what is recorded.

States and who may move them (each move compares state, attempt and holder, and hits exactly one row; L1)::

    (none) --claim--> running --complete--> succeeded            the body's own transaction (C6)
                      running --abandon---> retryable | failed | in_doubt
                      running --claim-----> running              fence lapsed: attempt, takeovers + 1, higher token
                    retryable --claim-----> running              attempt + 1
                     in_doubt --policy or a person--> running | succeeded | failed

A late caller (a holder whose fence was taken over) finds another holder in the entry: its complete hits no row and
rolls its transaction back, its abandon changes nothing and is told who came after it.  Whatever a worker believes,
after an error it asks the ledger, because an error between begin and COMMIT says nothing about the commit (C13).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from celery_once_fenced import errors

__all__ = [
    "Aftermath",
    "Codec",
    "Encoded",
    "ResultOmitted",
    "aftermath",
    "decode_error",
    "encode_error",
    "recorded_error",
]

LARGEST_RESULT = 64 * 1024
"""Bytes of ASCII JSON; a larger result is recorded as omitted (L6)."""
LONGEST_MESSAGE = 2000

Codec = tuple[Callable[[Any], str], Callable[[str], Any]]
"""Encoder to ASCII JSON text (raises ``TypeError`` or ``ValueError`` for what it cannot) and its decoder."""


class ResultOmitted(dict[str, object]):
    """Stands for a result that was not recorded: what the first run and every replay return instead (L6).

    A plain JSON object on the wire, so that any result backend and any reader can take it: ``reason`` is
    ``too_large``, ``not_serialisable`` or ``not_recorded``.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(once_fenced="result_omitted", reason=reason)

    @property
    def reason(self) -> str:
        """Why the result was not recorded."""
        return str(self["reason"])

    @staticmethod
    def matches(value: object) -> bool:
        """Whether ``value``, perhaps read back from a result backend, is such a marker."""
        return isinstance(value, dict) and value.get("once_fenced") == "result_omitted"


@dataclass(frozen=True, slots=True)
class Encoded:
    """A body's result, made ready before complete: ``text`` or ``omitted``, and what the caller gets."""

    value: object
    text: str | None
    omitted: str | None

    @classmethod
    def of(cls, value: object, codec: Codec) -> Encoded:
        """Encode ``value``; never raises for a value that cannot be encoded."""
        try:
            text = codec[0](value)
            text.encode("ascii")
        except Exception:  # noqa: BLE001  # a user's own __json__ may raise anything; the run itself has succeeded
            return cls(ResultOmitted("not_serialisable"), None, "not_serialisable")
        if len(text) > LARGEST_RESULT:
            return cls(ResultOmitted("too_large"), None, "too_large")
        return cls(value, text, None)


def recorded_value(result: str | None, omitted: str | None, codec: Codec) -> object:
    """What a replay returns for a recorded outcome."""
    return ResultOmitted(omitted or "not_recorded") if result is None else codec[1](result)


def encode_error(error: BaseException) -> str:
    """The class name and message of an error as ASCII JSON.  Arguments are not kept: they may hold anything."""
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    return json.dumps({"type": name, "message": _message(error)[:LONGEST_MESSAGE]})


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  # the error's own code runs here, and its record must not fail
        return "its message cannot be read"


def recorded_error(text: str | None) -> tuple[str, str]:
    """Class name and message of an error as it was recorded."""
    try:
        record = json.loads(text or "")
        return str(record["type"]), str(record["message"])
    except (ValueError, TypeError, KeyError):
        return "unknown", "the record cannot be read"


def decode_error(text: str | None, *, key: str, known: Iterable[type[BaseException]]) -> BaseException:
    """The error a finished key answers with: one of ``known`` (``final_errors``) by class name, else RecordedError.

    Nothing is imported by a name that comes out of the database.
    """
    name, message = recorded_error(text)
    for cls in known:
        if f"{cls.__module__}.{cls.__qualname__}" == name:
            return _remade(cls, message) or errors.RecordedError(key, name, message)
    return errors.RecordedError(key, name, message)


def _remade(cls: type[BaseException], message: str) -> BaseException | None:
    try:
        return cls(message)
    except Exception:  # noqa: BLE001  # it takes other arguments, which are not kept
        return None


class Aftermath(Enum):
    """What a worker does after its body, or its commit, ended in an error and the ledger was asked."""

    SUCCEEDED = "the commit had happened: end as a success (L8)"
    RAISE = "rolled back, still ours: the error is the outcome"
    AGAIN = "rolled back through no fault of the body: publish the message again as a new attempt (C13)"
    LEAVE = "this delivery was taken over by its own twin: leave the result alone (W10)"
    REPLAY = "another call of the key has finished it: answer from the ledger (W10)"
    DEFER = "another call of the key is at it: come back for its answer (W10)"


def aftermath(
    *, state: str, ours: bool, fence_ours: bool, same_task: bool, connection_lost: bool
) -> Aftermath:
    """Decide by what the ledger said (``AbandonReply``), never by the error alone (C13, L10, W10)."""
    if state == "succeeded" and ours:
        return Aftermath.SUCCEEDED
    if not ours:
        if same_task:
            return Aftermath.LEAVE
        return Aftermath.REPLAY if state == "succeeded" else Aftermath.DEFER
    if connection_lost or not fence_ours:
        return Aftermath.AGAIN
    return Aftermath.RAISE
