"""What the pages show in these tests: a shop in the middle of a bad night, written into the stores as workers write it."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import redis
from celery import Celery
from django.conf import settings
from django.contrib.auth.models import Permission, User
from django.contrib.staticfiles.handlers import StaticFilesHandler
from django.db import connections
from django.test.testcases import LiveServerThread
from django.test.utils import override_settings

from celery_once_fenced import runtime
from celery_once_fenced.keys import Key
from celery_once_fenced.policy import SPANS
from celery_once_fenced.stores import (
    Claim,
    Completion,
    Defer,
    EffectFinish,
    EffectStart,
    Enqueue,
    Held,
    Start,
)
from celery_once_fenced.stores.counters import hold_field
from celery_once_fenced.stores.listing import HOURLY
from example_project.shop import tasks
from example_project.shop.models import Account, Order
from tests.fixtures.ledger import Ledger, claim_of, operation

HOSTILE = "<script>alert(1)</script>\"'&amp;\u202eevil\u202c العربية 🔒 </td></table>"
PASSWORD = "a password of the tests"
PERMISSIONS = (
    "view_overview",
    "view_heldlock",
    "view_ledgerentry",
    "view_indoubt",
    "view_event",
    "view_account",
    "view_order",
)
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""A strict one, for every page."""


class StrictPolicy:
    """Middleware: a page that needs an inline script or style would not work."""

    def __init__(self, get_response: Any) -> None:
        self._get_response = get_response

    def __call__(self, request: Any) -> Any:
        response = self._get_response(request)
        response["Content-Security-Policy"] = POLICY
        return response


@dataclass
class Shop:
    """The stores of the live server, and how to fill them."""

    url: str
    redis_url: str
    postgres_url: str
    app: Celery
    ledger: Ledger
    held: dict[str, Held] = field(default_factory=dict)
    sessions: dict[str, Any] = field(default_factory=dict)
    """Cookies of the users that have logged in."""
    untouched: bool = False
    """The bad night is in the stores, as it was made."""

    @property
    def leases(self) -> Any:
        return runtime.runtime_of(self.app).leases

    @property
    def namespace(self) -> str:
        return str(self.app.conf.once_fenced["namespace"])

    # --- Redis --------------------------------------------------------------------------------------------------------

    def key(self, task: Any, text: str) -> Key:
        return Key(secrets.token_hex(32), f"{task.name}:{text}")

    def queue(self, task: Any, text: str, duplicates: int = 0) -> Key:
        key = self.key(task, text)
        for _ in range(1 + duplicates):
            delivery, task_id = secrets.token_hex(16), secrets.token_hex(16)
            self.leases.enqueue(Enqueue(key, task.name, SPANS["until_executed"], delivery, task_id, 3600))
        return key

    def start(
        self, task: Any, text: str, worker: str, *, lease: float = 900, holder: str = "", age: float = 0
    ) -> Start:
        key, delivery = self.key(task, text), secrets.token_hex(16)
        ask = Start(
            key,
            task.name,
            SPANS["until_executed"],
            key.digest,
            delivery,
            holder or secrets.token_hex(16),
            secrets.token_hex(16),
            worker,
            lease,
            redelivery=False,
        )
        assert self.leases.start(ask).answer == "granted"
        if age:
            self._make_older(key, age)
        return ask

    def wait_for(self, task: Any, held: Held, times: int) -> None:
        """Messages of other keys that have stepped aside for a fence."""
        for number in range(times):
            ask = Defer(
                self.key(task, f"waiting:{number}"), task.name, SPANS["until_executed"], secrets.token_hex(16),
                3600, 0, 0, 900, held.operation.resource,
            )  # fmt: skip
            self.leases.defer(ask)

    def _make_older(self, key: Key, age: float) -> None:
        """Write another start into a hold, as if it had been taken earlier."""
        with redis.Redis.from_url(self.redis_url, decode_responses=True) as client:
            name = f"{{{self.namespace}:{key.digest[0]}}}:r:{key.digest}"
            fields = str(client.get(name)).split("|", 6)
            fields[3] = str(int(fields[3]) - int(age * 1_000_000))
            client.set(name, "|".join(fields), keepttl=True)

    def ran(self, task: Any, times: Mapping[float, int]) -> None:
        """How often runs took how many seconds."""
        counters = {hold_field(seconds): number for seconds, number in times.items()}
        with redis.Redis.from_url(self.redis_url) as client, client.pipeline() as pipe:
            for counter, number in counters.items():
                pipe.hincrby(self._place("stats", task), counter, number)
            pipe.hset(self._place("stats", task), "hold_max_ms", str(round(max(times) * 1000)))
            pipe.execute()

    def past(self, task: Any, counter: str, numbers: Mapping[int, int]) -> None:
        """Counts of hours ago; those that Redis keeps by the hour are in no other place."""
        now = int(time.time() // 3600)
        with redis.Redis.from_url(self.redis_url) as client, client.pipeline() as pipe:
            for hours, number in numbers.items():
                pipe.hincrby(self._place("hours", task), f"{now - hours}:{counter}", number)
            pipe.sadd(f"{{{self.namespace}:0}}:tasks", task.name)
            if counter not in HOURLY:
                pipe.hincrby(self._place("stats", task), counter, sum(numbers.values()))
            pipe.execute()

    def _place(self, what: str, task: Any) -> str:
        return f"{{{self.namespace}:0}}:{what}:{task.name}"

    # --- PostgreSQL ---------------------------------------------------------------------------------------------------

    def claim(self, task: Any, text: str, worker: str, **options: Any) -> Held:
        key = f"{task.name}:{text}"
        given = {name: options.pop(name) for name in ("resource", "task_id") if name in options}
        op = operation(
            key,
            given.get("resource"),
            task=task.name,
            scope=task.name,
            task_id=given.get("task_id") or secrets.token_hex(16),
        )
        ask: Claim = claim_of(op, worker=worker, **{"lease": 900.0, **options})
        claimed = self.ledger.store.claim(ask)
        assert claimed.token is not None, claimed
        held = Held(op, ask.holder, claimed.token, claimed.attempt)
        self.held[text] = held
        return held

    def taken_over(self, task: Any, text: str, old: str, new: str, **options: Any) -> Held:
        """A run that froze and that another worker took over."""
        first = self.claim(task, text, old, **options)
        self.ledger.expire(first.operation.resource)
        return self.claim(task, text, new, **options)

    def finish(self, held: Held, result: str = "90") -> None:
        with self.ledger.database.transaction(held) as body:
            body.complete(held, Completion(result, None, retention=86400 * 30, replay=86400 * 30))

    def in_doubt(self, task: Any, text: str, step: str = "gateway", **options: Any) -> Held:
        held = self.claim(task, text, "a@shop", **options)
        self.ledger.store.effect_start(EffectStart(held, step, "hold"))
        self.ledger.abandon(held)
        return held

    def with_effect(self, task: Any, text: str, result: str, **options: Any) -> Held:
        held = self.claim(task, text, "b@shop", **options)
        self.ledger.store.effect_start(EffectStart(held, "gateway", "hold"))
        self.ledger.store.effect_finish(
            EffectFinish(held.operation.digest, "gateway", held.holder, "done", result=result)
        )
        return held

    # --- people -------------------------------------------------------------------------------------------------------

    def user(self, name: str, *permissions: str, superuser: bool = False) -> User:
        user = User.objects.create_user(name, password=PASSWORD, is_staff=True, is_superuser=superuser)
        user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
        return user

    def empty(self) -> None:
        """Everything but the users."""
        with connections["default"].cursor() as cursor:
            cursor.execute(
                "TRUNCATE once_fenced_fence, once_fenced_ledger, once_fenced_effect, once_fenced_event, once_fenced_outbox, "
                "django_admin_log, shop_order, shop_entry, shop_account CASCADE"
            )
        with redis.Redis.from_url(self.redis_url) as client:
            for name in client.scan_iter(match=f"{{{self.namespace}:*", count=1000):
                client.delete(name)
        self.held.clear()


def bad_night(shop: Shop) -> None:
    """Something of everything that the pages can show."""
    account = Account.objects.create(pk=7, name="Ada", balance=90)
    Order.objects.create(pk=42, account=account, amount=1999)
    day = (3, 5, 9, 14, 22, 31, 30, 28, 24, 26, 33, 38, 36, 30, 21, 15, 9, 6, 4, 2, 1, 2, 3, 4)
    hours = {23 - hour: calls for hour, calls in enumerate(day)}
    shop.past(tasks.refresh_feed, "granted", {hour: calls * 7 for hour, calls in hours.items()})
    shop.past(tasks.refresh_feed, "suppressed", {hour: calls * 4 for hour, calls in hours.items()})
    shop.past(tasks.post_entry, "granted", {hour: max(0, calls - 6) for hour, calls in hours.items()})
    shop.past(tasks.charge, "granted", {hour: calls // 2 for hour, calls in hours.items()})
    shop.past(tasks.charge, "suppressed", {hour: calls // 6 for hour, calls in hours.items()})
    shop.past(tasks.nightly_totals, "granted", {5: 1})
    shop.past(tasks.post_entry, "replayed", {6: 5})
    shop.past(tasks.post_entry, "lost", {3: 1})
    shop.past(tasks.post_entry, "fenced_off", {3: 1})
    shop.past(tasks.refresh_feed, "expired", {14: 2, 9: 1})
    shop.past(tasks.refresh_feed, "repeated", {1: 3})
    shop.ran(tasks.refresh_feed, {0.4: 2500, 4.0: 300})
    shop.ran(tasks.post_entry, {0.03: 280, 1.9: 20})
    shop.ran(tasks.charge, {1.2: 180, 21.0: 20})
    shop.ran(tasks.nightly_totals, {75.0: 1})
    shop.finish(shop.taken_over(tasks.post_entry, "post:70", "A@shop", "B@shop", resource="account:7"))
    heir = shop.taken_over(tasks.charge, "charge:41", "a@shop", "c@shop")
    shop.start(tasks.charge, "charge:41", "c@shop", holder=heir.holder)
    lapsed = shop.claim(tasks.charge, "charge:40", "a@shop")
    shop.ledger.expire(lapsed.operation.resource)
    running = shop.with_effect(tasks.charge, "charge:42", '{"id": "re_812"}')
    shop.start(tasks.charge, "charge:42", "b@shop", holder=running.holder)
    shop.wait_for(tasks.charge, running, 2)
    shop.in_doubt(tasks.charge, "charge:39")
    shop.finish(shop.with_effect(tasks.charge, "charge:38", '{"id": "re_811"}'), '"re_811"')
    failed = shop.claim(tasks.charge, "charge:37", "a@shop")
    shop.ledger.abandon(failed, "failed", error='{"type": "CardDeclined", "message": "insufficient funds"}')
    for number in range(12):
        shop.queue(tasks.refresh_feed, f"feed_id={number}", duplicates=number % 3)
    for number in range(12, 17):
        shop.start(tasks.refresh_feed, f"feed_id={number}", f"{'abc'[number % 3]}@shop", lease=240 + number)
    shop.start(tasks.refresh_feed, "feed_id=99", "a@shop", age=5400, lease=600)


@contextlib.contextmanager
def serving(redis_url: str, postgres_url: str, namespace: str) -> Iterator[Shop]:
    """The example project's admin on a free port, with a strict policy, its Celery app on stores of the test's own."""
    app = Celery("browser", broker="memory://", set_as_current=False)
    app.conf.once_fenced = settings.CELERY_ONCE_FENCED | {"redis_url": redis_url, "namespace": namespace}
    app.conf.once_fenced |= {"socket_timeout": 10}
    app.finalize()
    policy = f"{StrictPolicy.__module__}.{StrictPolicy.__qualname__}"
    ledger = Ledger(postgres_url)
    server = LiveServerThread("127.0.0.1", StaticFilesHandler)
    with override_settings(MIDDLEWARE=[policy, *settings.MIDDLEWARE], ALLOWED_HOSTS=["*"], DEBUG=False):
        server.daemon = True
        server.start()
        server.is_ready.wait()
        assert server.error is None, server.error
        try:
            yield Shop(f"http://127.0.0.1:{server.port}", redis_url, postgres_url, app, ledger)
        finally:
            server.terminate()
            ledger.close()
            runtime.runtime_of(app).close()
            app.close()
