"""A payment gateway: a process of its own, which charges once per idempotency key and remembers every request.

    POST /charges   with ``Idempotency-Key`` and ``{"order": …, "amount": …}``: charges and answers the receipt; under a
                    key that it knows, it does not charge again and answers the first receipt
    POST /hold      ``{"order": …}``: the next request for this order is charged, but not answered while its client waits
    GET /log        every request, and every charge

``Gateway`` is the handle; run as a program, this is the gateway itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from signal import SIGKILL, SIGTERM
from typing import Any

from example_project.servers import HOST, Server

__all__ = ["Gateway", "GatewayLog", "Request"]

THINKING = 0.03
"""Seconds that a charge takes."""
HOLD = 60.0


@dataclass(frozen=True)
class Request:
    """One request to charge.  ``port`` is the client's."""

    key: str
    order: int
    port: int


@dataclass(frozen=True)
class GatewayLog:
    """What the gateway was asked, and what it did."""

    requests: list[Request]
    charges: Mapping[str, int]
    """The order that was charged, by key."""
    bookings: Sequence[str] = ()
    """The key of each charge that was made."""

    @property
    def charged(self) -> Counter[int]:
        """How often each order was charged."""
        return Counter(self.charges.values())

    def of(self, order: int) -> list[Request]:
        return [request for request in self.requests if request.order == order]


class Gateway(Server):
    """Handle of the gateway's process, which ends with ours."""

    name = "gateway"
    stop_signal = SIGTERM
    quit_signal = SIGKILL

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def prepare(self) -> None:
        """Nothing: it keeps everything in memory."""

    def command(self) -> list[str]:
        return [sys.executable, "-m", "example_project.gateway", str(self.port)]

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def ready(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self._ask("/pid") == self.pid)
        return False

    def hold(self, order: int) -> None:
        """Let the next request for an order be charged, but not answered."""
        self._ask("/hold", {"order": order})

    def seen(self) -> GatewayLog:
        """What happened until now."""
        answer = self._ask("/log")
        requests = [Request(*request) for request in answer["requests"]]
        return GatewayLog(requests, answer["charges"], answer["bookings"])

    def _ask(self, path: str, sent: object = None) -> Any:
        body = None if sent is None else json.dumps(sent).encode()
        with urllib.request.urlopen(f"{self.url}{path}", body, timeout=10) as answer:
            return json.load(answer)


class _Desk(BaseHTTPRequestHandler):
    """Serves one connection; what it knows is the class's, so all of them share it."""

    lock = threading.Lock()
    requests: list[tuple[str, int, int]] = []  # noqa: RUF012  # shared on purpose
    receipts: dict[str, dict[str, Any]] = {}  # noqa: RUF012
    bookings: list[str] = []  # noqa: RUF012
    held: set[int] = set()  # noqa: RUF012

    def do_GET(self) -> None:
        if self.path == "/pid":
            self._answer(os.getpid())
            return
        with self.lock:
            charges = {key: receipt["order"] for key, receipt in self.receipts.items()}
            log = {"requests": list(self.requests), "charges": charges, "bookings": list(self.bookings)}
        self._answer(log)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/hold":
            self.held.add(body["order"])
            self._answer("held")
            return
        time.sleep(THINKING)
        receipt, is_held = self._charge(self.headers["Idempotency-Key"], body)
        if is_held:
            self._wait_for_the_client_to_go()
        self._answer(receipt)

    def _charge(self, key: str, body: Mapping[str, int]) -> tuple[dict[str, Any], bool]:
        order = body["order"]
        with self.lock:
            is_held = order in self.held
            self.held.discard(order)
            self.requests.append((key, order, self.client_address[1]))
            if key not in self.receipts:
                self.bookings.append(key)
                self.receipts[key] = {"id": f"R{len(self.bookings)}", **body}
            return self.receipts[key], is_held

    def _wait_for_the_client_to_go(self) -> None:
        self.connection.settimeout(HOLD)
        with contextlib.suppress(OSError):
            self.connection.recv(1)

    def _answer(self, value: object) -> None:
        body = json.dumps(value).encode()
        with contextlib.suppress(OSError):  # the client may be dead by now
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # its name in the base class
        """Quiet: the log is asked for."""


class _Counter(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = socket.SOMAXCONN


if __name__ == "__main__":
    _Counter((HOST, int(sys.argv[1])), _Desk).serve_forever()
