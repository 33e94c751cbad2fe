"""Debian's brokers as servers of one's own: RabbitMQ and Redis."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path
from typing import ClassVar

from example_project.servers import HOST, RedisServer, Server

RUN = """\
epmd -port "$ERL_EPMD_PORT" & epmd=$!
/usr/lib/rabbitmq/bin/rabbitmq-server & server=$!
trap 'kill -TERM $server' TERM
while kill -0 $server 2>/dev/null; do wait $server; done
kill $epmd
"""
"""With a port mapper of its own, which Erlang would leave running else."""
GREETING, ANSWER = b"AMQP\x00\x00\x09\x01", b"\x01\x00\x00"


class DebianRedis(RedisServer):
    """Debian's Redis 7, without persistence."""

    name = "redis"

    def command(self) -> list[str]:
        return ["/usr/bin/redis-server", *super().command()[1:]]


class RabbitServer(Server):
    """Debian's RabbitMQ: one node without plugins."""

    name = "rabbitmq"
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    quit_signal: ClassVar[signal.Signals] = signal.SIGTERM

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@{HOST}:{self.port}//"

    def prepare(self) -> None:
        self.data.mkdir()
        self._plugins.write_text("[].\n")

    @property
    def _plugins(self) -> Path:
        return self.directory / "enabled_plugins"

    def command(self) -> list[str]:
        return ["/bin/sh", "-c", RUN]

    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.defpath,
            "LC_ALL": "C.UTF-8",
            "HOME": str(self.directory),
            "ERL_EPMD_ADDRESS": HOST,
            "ERL_EPMD_PORT": str(self.port + 1),
            "RABBITMQ_DIST_PORT": str(self.port + 2),
            "RABBITMQ_NODENAME": f"once{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": HOST,
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_MNESIA_BASE": str(self.data),
            "RABBITMQ_LOG_BASE": str(self.directory / "logs"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self._plugins),
        }

    def ready(self) -> bool:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((HOST, self.port), timeout=1) as connection,
        ):
            connection.sendall(GREETING)
            return connection.recv(3) == ANSWER
        return False
