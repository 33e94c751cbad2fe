"""Prepared statements over bare libpq, as many in one round trip as are wanted: what no implementation can undercut."""

from __future__ import annotations

import itertools
import re
from typing import Any

import psycopg
from psycopg.pq import ExecStatus

__all__ = ["Bare"]


class Bare:
    """A connection that knows its statements by name."""

    def __init__(self, url: str, **statements: str) -> None:
        self._connection = psycopg.connect(url)
        self._pgconn = self._connection.pgconn
        for name, sql in {"open": "begin", "commit": "commit", **statements}.items():
            self._pgconn.prepare(name.encode(), _numbered(sql))

    def alone(self, name: str) -> None:
        """One statement without parameters, in a round trip of its own."""
        answer = self._pgconn.exec_prepared(name.encode(), [])
        assert answer.status == ExecStatus.TUPLES_OK, answer.error_message

    def together(self, *asked: tuple[Any, ...]) -> list[Any]:
        """One round trip: of each statement its name and its parameters, and what libpq answers to it."""
        self._pgconn.enter_pipeline_mode()
        for name, *params in asked:
            self._pgconn.send_query_prepared(name.encode(), [_text(value) for value in params])
        self._pgconn.pipeline_sync()
        answers = [self._answer() for _ in asked]
        assert self._result().status == ExecStatus.PIPELINE_SYNC
        self._pgconn.exit_pipeline_mode()
        return answers

    def _answer(self) -> Any:
        answer = self._result()
        assert answer.status in (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK), answer.error_message
        assert self._pgconn.get_result() is None  # between two statements
        return answer

    def _result(self) -> Any:
        result = self._pgconn.get_result()
        assert result is not None
        return result


def _numbered(sql: str) -> bytes:
    numbers = itertools.count(1)
    return re.sub("%s", lambda _: f"${next(numbers)}", sql).encode()


def _text(value: Any) -> bytes | None:
    if value is None:
        return None
    return b"\\x" + value.hex().encode() if isinstance(value, bytes) else str(value).encode()
