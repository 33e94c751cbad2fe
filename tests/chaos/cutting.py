"""A proxy that breaks a connection in the middle of a message."""

from __future__ import annotations

import socket
from typing import Any

from tests.fixtures.proxy import CHUNK, TcpProxy


class CuttingProxy(TcpProxy):
    """``cut_after(n)``: once n more bytes have passed, in whichever direction, the connection they pass on breaks."""

    def __init__(self, url: str) -> None:
        self._left: int | None = None
        self.cuts = 0
        super().__init__(url)

    def cut_after(self, count: int) -> None:
        self._left = count

    def _pump_requests(self, link: Any) -> None:
        link.client = _Cut(self, link.client)
        super()._pump_requests(link)

    def _pump_replies(self, link: Any) -> None:
        link.server = _Cut(self, link.server)
        super()._pump_replies(link)

    def passing(self, received: bytes) -> bytes:
        """What of it may pass; the caller breaks the connection where that is less than all."""
        with self._lock:
            if self._left is None or not received:
                return received
            passes, self._left = received[: self._left], self._left - len(received)
            if self._left <= 0:
                self._left = None
                self.cuts += 1
            return passes


class _Cut:
    """A socket whose reader sees the end of the stream after a part of what came."""

    def __init__(self, proxy: CuttingProxy, real: socket.socket) -> None:
        self._proxy = proxy
        self._real = real
        self._over = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def recv(self, size: int = CHUNK) -> bytes:
        if self._over:
            return b""
        received = self._real.recv(size)
        passes = self._proxy.passing(received)
        self._over = len(passes) < len(received)
        return passes
