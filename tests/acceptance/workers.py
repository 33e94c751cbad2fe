"""Real Celery workers for tests, to be stopped, killed and frozen, and the place they work in.

    site = Site.at(redis_url)
    with site.worker(concurrency=2) as worker:
        site.task("late").delay("a", "hold")
        worker.sigkill_child()

A :class:`Site` is one set of Celery settings: broker, result backend and leases under a prefix of its own, so that
nothing is shared with another test and nothing of anybody else's is touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import psutil
import redis
from celery import Celery

from celery_once_fenced.runtime import Runtime, runtime_of
from celery_once_fenced.stores import Hold
from example_project.servers import wait_until
from tests.acceptance.app import SETTINGS, build
from tests.acceptance.stage import SETTING, Stage

ROOT = Path(__file__).parents[2]
QUEUE = "jobs"
PARKED = "parked"
"""A queue that no worker reads."""
CALM, HASTY = 3600.0, 2.0
"""Visibility timeouts in seconds."""
START_SECONDS = 30.0
STOP_SECONDS = 20.0


class Site:
    """One set of settings, the app of the test process that has them, and the workers that do."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings

    @classmethod
    def at(
        cls,
        redis_url: str,
        *,
        lock_url: str | None = None,
        broker_url: str | None = None,
        visibility_timeout: float = CALM,
        once_fenced: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Site:
        """A fresh place on the server at ``redis_url``; leases and broker may be reached by another address (a proxy)."""
        name = f"t{uuid.uuid4().hex[:12]}"
        transport = {"global_keyprefix": f"{name}.", "visibility_timeout": visibility_timeout}
        return cls(
            {
                "broker_url": broker_url or redis_url,
                "broker_transport_options": {
                    **transport,
                    "unacked_restore_interval": 1,  # seconds; kombu's own 100 would outlast the test
                    "unacked_restore_throttle": 1,
                    "unacked_mutex_expire": 5,  # seconds that a worker killed in its turn keeps the others from it
                },
                "result_backend": redis_url,
                "result_backend_transport_options": {"global_keyprefix": f"{name}."},
                "once_fenced": {"redis_url": lock_url or redis_url, "namespace": name, **(once_fenced or {})},
                SETTING: {"url": redis_url, "prefix": f"{name}.stage."},
                "task_default_queue": QUEUE,
                "worker_prefetch_multiplier": 1,
                "worker_lost_wait": 0.2,
                "worker_enable_remote_control": False,
                "broker_connection_retry_on_startup": True,
                "broker_connection_max_retries": 10,
                **settings,
            }
        )

    def through(self, **changes: Any) -> Site:
        """The same place with other settings; ``once_fenced`` is merged into what is there."""
        once_fenced = {**self.settings["once_fenced"], **changes.pop("once_fenced", {})}
        return Site({**self.settings, **changes, "once_fenced": once_fenced})

    @cached_property
    def app(self) -> Celery:
        return build(self.settings)

    @cached_property
    def stranger(self) -> Celery:
        """An app on the same broker that knows none of the tasks."""
        app = Celery("stranger", set_as_current=False)
        app.conf.update({name: self.settings[name] for name in self.settings if name != "once_fenced"})
        return app

    @cached_property
    def stage(self) -> Stage:
        return Stage(**self.settings[SETTING])

    @cached_property
    def redis(self) -> redis.Redis:
        return redis.Redis.from_url(self.settings[SETTING]["url"], decode_responses=True)

    @property
    def name(self) -> str:
        return str(self.settings["once_fenced"]["namespace"])

    @property
    def runtime(self) -> Runtime:
        return runtime_of(self.app)

    # --- tasks and keys -----------------------------------------------------------------------------------------------

    def task(self, name: str, variant: str = "good") -> Any:
        return self.app.tasks[f"{variant}.{name}"]

    def digest(self, task: Any, *args: Any, **kwargs: Any) -> str:
        """The digest of the key of a call."""
        key = task.blueprint.recipe.derive_call(args, kwargs, None).key
        assert key is not None
        return str(key.digest)

    def holds(self, task: Any, *args: Any) -> dict[str, Hold]:
        """Who holds the key of a call, by slot; looked up directly, never through a proxy."""
        return {hold.slot: hold for hold in self._leases.look(self.digest(task, *args))}

    def stats(self, task: Any) -> Mapping[str, int]:
        """The counters of a task."""
        return self._leases.stats().get(task.name, {})

    @contextlib.contextmanager
    def counted(self, task: Any, counter: str, times: int = 1) -> Iterator[None]:
        """Wait at the end of the block until a counter of the task has gone up by ``times``."""
        before = self.stats(task).get(counter, 0)
        yield
        eventually(
            lambda: self.stats(task).get(counter, 0) >= before + times, what=f"{counter} of {task.name}"
        )

    @cached_property
    def _leases(self) -> Any:
        from celery_once_fenced.stores.redis import RedisLeaseStore

        return RedisLeaseStore(self.settings[SETTING]["url"], namespace=self.name, socket_timeout=5)

    # --- the broker's side --------------------------------------------------------------------------------------------

    def messages(self, queue: str = QUEUE) -> list[dict[str, Any]]:
        """The messages that wait in a queue, the oldest first."""
        lines = self.redis.lrange(f"{self.name}.{queue}", 0, -1)
        return [json.loads(line) for line in reversed(lines)]

    def deliver(self, message: Mapping[str, Any], *, redelivered: bool = False, queue: str = QUEUE) -> None:
        """Put a message into a queue once more, byte for byte but for the broker's own marks."""
        properties = {**message["properties"], "delivery_tag": str(uuid.uuid4())}
        headers = dict(message["headers"])
        if redelivered:
            headers["redelivered"] = True
            properties["delivery_info"] = {**properties["delivery_info"], "redelivered": True}
        properties["delivery_info"] = {**properties["delivery_info"], "routing_key": queue}
        again = {**message, "headers": headers, "properties": properties}
        self.redis.lpush(f"{self.name}.{queue}", json.dumps(again))

    def parked(
        self, name: str, *acts: str, variant: str = "good", **options: Any
    ) -> tuple[Trial, dict[str, Any]]:
        """Call a task and catch its message before any worker sees it: to be delivered by :meth:`deliver`, or not."""
        trial = self.begin(name, *acts, variant=variant, queue=PARKED, **options)
        return trial, self.caught()

    def caught(self) -> dict[str, Any]:
        """The message of the last call to the queue ``parked``, which no worker has seen."""
        return dict(json.loads(str(self.redis.lpop(f"{self.name}.{PARKED}"))))

    def idle(self) -> bool:
        """Nothing waits in the queue and nothing is unacknowledged."""
        return not (self.redis.llen(f"{self.name}.{QUEUE}") or self.redis.hlen(f"{self.name}.unacked"))

    # --- trials ---------------------------------------------------------------------------------------------------

    def begin(self, name: str, *acts: str, variant: str = "good", **options: Any) -> Trial:
        """Call a task with a key of its own."""
        task, label = self.task(name, variant), uuid.uuid4().hex[:8]
        return Trial(self, task, label, task.apply_async((label, *acts), **options), time.monotonic())

    # --- workers ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def worker(self, **options: Any) -> Iterator[Worker]:
        """A worker that is ready; killed at the end of the block, however it is then."""
        with contextlib.closing(self.start(**options)) as worker:
            yield worker.ready()

    def start(
        self,
        *,
        app: str = "tests.acceptance.app",
        pool: str = "prefork",
        concurrency: int = 2,
        queues: Sequence[str] = (QUEUE,),
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> Worker:
        """Start a worker without waiting until it is ready."""
        command = [sys.executable, "-m", "celery", "-A", app, "worker", "-P", pool, "-c", str(concurrency)]
        quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat", "-l", "INFO"]
        named = ["-n", f"{uuid.uuid4().hex[:8]}@test", "-Q", ",".join(queues)]
        environment = {**os.environ, SETTINGS: json.dumps(self.settings), **(env or {})}
        return Worker([*command, *quiet, *named, *options], environment)

    def close(self) -> None:
        """Delete all keys of this place and close what the test process has open in it."""
        for key in self.redis.scan_iter(match=f"*{self.name}*", count=1000):
            self.redis.delete(key)
        self.disconnect()

    def disconnect(self) -> None:
        """Close what the test process has open."""
        if "app" in self.__dict__:
            for task in self.app.tasks.values():
                if getattr(task, "_blueprint", None) is not None:
                    task.blueprint.runtime.close()
        for name in self.__dict__.keys() & {"app", "stranger"}:
            # A result that is collected later would unsubscribe, perhaps from a server that has gone.
            consumer = self.__dict__[name].backend.result_consumer
            consumer.stop()
            consumer._pubsub = None
            self.__dict__[name].close()
        self._leases.close()
        self.redis.close()
        self.stage.close()


@dataclass(frozen=True)
class Trial:
    """One call with a key of its own, under a check that does not care who guards it."""

    site: Site
    task: Any
    label: str
    result: Any
    at: float
    """When the call was made, on the monotonic clock."""

    @property
    def runs(self) -> int:
        return self.site.stage.runs(self.label)

    @property
    def state(self) -> str:
        """What the result backend says now; a result object would remember what it said first."""
        return str(self.site.app.AsyncResult(self.result.id).state)

    @property
    def running(self) -> str:
        """The holder of the running slot; empty if there is none."""
        hold = self.site.holds(self.task, self.label).get("r")
        return hold.holder if hold else ""

    @property
    def queued(self) -> str:
        """The delivery that holds the queued slot; empty if there is none."""
        hold = self.site.holds(self.task, self.label).get("q")
        return hold.holder if hold else ""

    @property
    def began(self) -> float:
        """When the first body began, on the monotonic clock."""
        return self.site.stage.journal(self.label)[0].at

    def has_run(self, times: int, within: float = 10.0) -> Self:
        """Wait until the body has begun for the nth time."""
        eventually(lambda: self.runs >= times, within, what=f"run {times} of {self.task.name}")
        return self

    def release(self, name: str = "") -> Self:
        self.site.stage.release(self.label, name)
        return self

    def again(self, *acts: str, **options: Any) -> Any:
        """Another call with the same key."""
        return self.task.apply_async((self.label, *acts), **options)

    def value(self, within: float = 10.0) -> Any:
        """The result, ``within`` seconds of the call."""
        left = max(self.at + within - time.monotonic(), 0.1)
        eventually(self.result.ready, left, f"a result of {self.task.name}")
        return self.result.get(timeout=1)


def eventually(condition: Callable[[], bool], seconds: float = 10.0, what: str = "this") -> None:
    """Poll until the condition holds; it is a failed assertion if it does not within ``seconds``."""
    wait_until(condition, seconds, lambda: AssertionError(f"{what} did not come within {seconds:.3g} s"))


running: list[Worker] = []
"""The workers of the test process, for the report of a test that failed."""


def was_busy(task_id: str) -> bool:
    """Whether a worker has turned a delivery of the task away, because another ran under its key."""
    return any(f"task_id={task_id} why=busy" in worker.log() for worker in running)


class Worker:
    """A worker's parent process and its children."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115  # closed by close()
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        running.append(self)

    def ready(self) -> Self:
        """Wait until it takes messages."""
        wait_until(lambda: " ready." in self.log() or not self.alive(), START_SECONDS, self._failure)
        if not self.alive():
            raise self._failure()
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def children(self) -> list[int]:
        """Process ids of the pool's children; none in pools that have no processes."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [child.pid for child in psutil.Process(self.pid).children(recursive=True)]
        return []

    def alive(self) -> bool:
        return self._process.poll() is None

    def sigkill_child(self, pid: int | None = None) -> None:
        """Kill one child of the pool, the only one if not named; the parent lives on."""
        (victim,) = self.children if pid is None else [pid]
        os.kill(victim, signal.SIGKILL)

    def sigkill(self) -> None:
        """Kill parent and children at once, as a crash of the machine would."""
        self._signal_all(signal.SIGKILL)
        self._process.wait()

    def sigstop(self) -> None:
        """Freeze parent and children."""
        self._signal_all(signal.SIGSTOP)

    def sigcont(self) -> None:
        self._signal_all(signal.SIGCONT)

    def stop(self) -> None:
        """Warm shutdown: running bodies end first.  Waits for it."""
        self.sigterm()
        self.join()

    def sigterm(self) -> None:
        """Ask for a warm shutdown."""
        os.kill(self.pid, signal.SIGTERM)

    def cold(self) -> None:
        """Cold shutdown: running bodies are given up.  Waits for it."""
        os.kill(self.pid, signal.SIGQUIT)
        self.join()

    def join(self) -> None:
        self._process.wait(STOP_SECONDS)

    def log(self) -> str:
        return os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0).decode(errors="replace")

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.sigkill()
        self._process.wait()
        self._log.close()
        running.remove(self)

    def _signal_all(self, number: signal.Signals) -> None:
        for pid in [self.pid, *self.children]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _failure(self) -> RuntimeError:
        return RuntimeError(f"the worker is not ready; its log:\n{self.log()[-4000:]}")
