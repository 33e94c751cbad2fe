"""How soon a worker looks for messages whose visibility timeout is over."""

from __future__ import annotations

from typing import Any

from kombu.transport.redis import Channel, QoS, Transport


def restore_every_second() -> None:
    """For a worker on kombu before 5.7, which looks every 100 s and has no option for that."""
    if hasattr(Channel, "unacked_restore_interval"):
        return
    register = Transport.register_with_event_loop

    def register_and_restore(self: Any, connection: Any, loop: Any) -> None:
        register(self, connection, loop)
        loop.call_repeatedly(1, self.cycle.maybe_restore_messages)

    Transport.register_with_event_loop = register_and_restore
    QoS.restore_visible.__defaults__ = (0, 10, 1)
