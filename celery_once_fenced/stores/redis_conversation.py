"""One question on one connection: it is sent, and then answered in time, or sent a second time (E2).

Between the two the caller may do something else, which does not count: an answer that came meanwhile is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import redis
from redis.exceptions import NoScriptError, ReadOnlyError, ResponseError

__all__ = ["PATIENCE", "Command", "Conversation", "Interruption", "Line", "packed", "sources"]

Command = tuple[str | int, ...]
Interruption = (redis.ConnectionError, redis.TimeoutError)
MIN_TIMEOUT = 0.001
PATIENCE = 0.45
"""Of the timeout: how long one read may take by itself.  Less than half, so that two sendings keep the deadline."""
sources: dict[str, str] = {}
"""Text of every script in use, by its hash."""


class Line:
    """A connection, and whether it was ``closed`` since a question was sent."""

    __slots__ = ("__weakref__", "closed", "connection")

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.closed = False

    def disconnect(self) -> None:
        self.closed = True
        self.connection.disconnect()


class Conversation:
    """``begin``, then ``end``, once each.  ``over`` takes the line back, also where either fails.

    Raises ``redis.RedisError``: no answer until ``deadline``, which is at most ``timeout`` seconds away.  An error as an
    answer is among the answers.
    """

    __slots__ = ("_again", "_clock", "_connection", "_first", "_left", "_line", "_over", "_sent", "_timeout")

    def __init__(
        self, line: Line, over: Callable[[Line], None], timeout: float, clock: Callable[[], float]
    ) -> None:
        self._line = line
        self._connection = line.connection
        self._over: Callable[[Line], None] | None = over
        self._timeout = timeout
        self._clock = clock

    def begin(self, first: Sequence[Command], again: Sequence[Command], deadline: float) -> None:
        """Send ``first``; ``again`` is what to send the second time."""
        self._first, self._again = first, again
        self._line.closed = False
        try:
            self._ensure_open(deadline)
            self._sent = self._try_to_send(deadline)
        except BaseException:
            self._break_off()
            raise
        self._left = deadline - self._clock()

    def end(self) -> list[Any]:
        """The answers, in the order of the commands."""
        if self._over is None:
            raise RuntimeError("the answers were read before: the connection is another's by now")
        try:
            answers = self._answers()
        except BaseException:
            self._break_off()
            raise
        self._give_back()
        return answers

    # --- the connection -----------------------------------------------------------------------------------------------

    def _break_off(self) -> None:
        self._connection.disconnect()
        self._give_back()

    def _give_back(self) -> None:
        over, self._over = self._over, None
        if over is not None:
            over(self._line)

    def _ensure_open(self, deadline: float) -> None:
        """A closed connection is found out before the question is sent: to a second sending a hold that is gone is one that
        the first has freed.
        """
        try:
            self._connection.connect()  # nothing, where it is connected
            if not self._connection.can_read(timeout=0):
                return
        except Interruption:
            if self._clock() >= deadline:
                raise
        self._connect_again()

    def _connect_again(self) -> None:
        self._connection.disconnect()
        self._connection.connect()

    # --- question and answer ------------------------------------------------------------------------------------------

    def _try_to_send(self, deadline: float) -> bool:
        try:
            self._send(self._first)
        except Interruption:
            if self._clock() >= deadline:
                raise
            return False
        return True

    def _answers(self) -> list[Any]:
        now = self._clock()
        deadline = now + self._left
        try:
            answers = self._read_all(self._first, now + self._left / 2) if self._is_open else None
            if answers is not None and not any(_is_from_a_replica(answer) for answer in answers):
                return answers
        except Interruption:
            if self._clock() >= deadline:
                raise
        self._connect_again()
        return self._exchange(self._again, deadline)

    @property
    def _is_open(self) -> bool:
        """Whether the answer may come over this connection: it was not closed meanwhile, in a forked child for one."""
        return self._sent and not self._line.closed

    def _exchange(self, commands: Sequence[Command], deadline: float) -> list[Any]:
        self._send(commands)
        return self._read_all(commands, deadline)

    def _send(self, commands: Sequence[Command]) -> None:
        self._connection.send_packed_command([packed(commands)], check_health=False)

    def _read_all(self, commands: Sequence[Command], deadline: float) -> list[Any]:
        answers = [self._read(deadline) for _ in commands]
        unknown = [i for i, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:
            told = self._exchange([_with_source(commands[i]) for i in unknown], deadline)
            for i, answer in zip(unknown, told, strict=True):
                answers[i] = answer
        return answers

    def _read(self, deadline: float) -> Any:
        left = deadline - self._clock()
        # The connection's own timeout bounds a read where as much is left; only late ones are watched.
        if left < self._timeout * PATIENCE and not self._connection.can_read(timeout=max(left, MIN_TIMEOUT)):
            raise redis.TimeoutError(f"no answer within {self._timeout:g} s")
        try:
            return self._connection.read_response()
        except ResponseError as error:
            return error


def _with_source(command: Command) -> Command:
    return ("EVAL", sources[str(command[1])], *command[2:])


class _Heads(dict[int, str]):
    """What comes before a part of so many bytes; those that come again and again are not made again and again."""

    def __missing__(self, size: int) -> str:
        return f"${size}\r\n"


_HEADS = _Heads({size: f"${size}\r\n" for size in range(256)})


def packed(commands: Sequence[Command]) -> bytes:
    """In the protocol's own form; half a character, which no text should have, becomes ``?`` as redis-py would do."""
    pieces: list[str] = []
    for command in commands:
        pieces.append(f"*{len(command)}\r\n")
        for part in map(str, command):
            pieces += _HEADS[len(part)], part, "\r\n"
    text = "".join(pieces)
    return text.encode() if text.isascii() else b"".join(map(_packed_wide, commands))


def _packed_wide(command: Command) -> bytes:
    """Where a character may be more than a byte."""
    parts = [str(part).encode("utf-8", "replace") for part in command]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


def _is_from_a_replica(answer: object) -> bool:
    """Redis 6.2 wraps what a command in a script was answered."""
    return isinstance(answer, ReadOnlyError) or (
        isinstance(answer, ResponseError) and "-READONLY" in str(answer)
    )
