"""Connections are kept, shared by threads one at a time, and never by two processes."""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from celery_once_fenced.stores.redis_connections import Connections, NoneFreeError
from example_project.servers import wait_until


@dataclass(frozen=True, order=True)
class Numbered:
    number: int

    def disconnect(self) -> None: ...


def numbered() -> Callable[[], int]:
    return map(Numbered, itertools.count()).__next__


def test_the_connection_used_last_is_used_next() -> None:
    connections = Connections(numbered(), size=3, wait=0)
    first, second = connections.take(), connections.take()
    connections.give_back(second)
    connections.give_back(first)
    assert connections.take() == first


def test_no_more_than_size_are_made() -> None:
    connections = Connections(numbered(), size=2, wait=0.01)
    held = [connections.take() for _ in range(2)]
    assert held == [Numbered(0), Numbered(1)]
    with pytest.raises(NoneFreeError):
        connections.take()


def test_there_are_plenty_while_at_most_half_are_in_hand() -> None:
    connections = Connections(numbered(), size=4, wait=0)
    in_hand, plenty = [], []
    for _ in range(4):
        in_hand.append(connections.take())
        plenty.append(connections.plenty)
    assert plenty == [True, True, False, False]
    for connection in in_hand[:2]:
        connections.give_back(connection)
    assert connections.plenty


def test_one_that_is_lost_is_replaced() -> None:
    connections = Connections(numbered(), size=1, wait=0.01)
    lost = connections.take()
    with pytest.raises(NoneFreeError):
        connections.take()
    del lost
    assert connections.take() == Numbered(1)


def test_who_waits_gets_what_is_given_back() -> None:
    connections = Connections(numbered(), size=1, wait=30)
    held = connections.take()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(connections.take)
        wait_until(lambda: connections._waiting == 1)
        connections.give_back(held)
        assert waiting.result(timeout=30) == held


def test_no_connection_is_in_two_hands() -> None:
    connections = Connections(numbered(), size=3, wait=30)
    in_hand: Counter[int] = Counter()
    seen_twice = threading.Event()

    def use() -> None:
        for _ in range(2000):
            connection = connections.take()
            in_hand[connection] += 1
            if in_hand[connection] != 1:
                seen_twice.set()
            in_hand[connection] -= 1
            connections.give_back(connection)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not seen_twice.is_set()
    assert sorted(connections._free) == sorted(connections._all)


def test_a_forked_child_makes_its_own() -> None:
    connections = Connections(numbered(), size=2, wait=0)
    connections.give_back(connections.take())
    pid = os.fork()
    if pid == 0:
        os._exit(connections.take().number)  # 1: a second one; the parent's was 0
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert connections.take() == Numbered(0)
