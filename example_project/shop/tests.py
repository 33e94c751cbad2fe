"""The shop's own tests, as a project that uses the plugin may write them: ``manage.py test``, no worker, no Redis.

Each runs in the transaction of Django's TestCase; ledger and fences are rolled back with it.
"""

from __future__ import annotations

from unittest import mock

from django.db import transaction
from django.test import TestCase, TransactionTestCase

from celery_once_fenced import KeyReusedError, explain
from celery_once_fenced.testing import EagerError, assert_free, assert_held, assert_suppressed, enforce_once
from example_project.shop import gateway
from example_project.shop.models import Account, Catalogue, Entry, Feed, Order, Product, Total
from example_project.shop.tasks import (
    charge,
    nightly_totals,
    post_entry,
    rebuild_catalogue,
    refresh_feed,
    send_receipt,
)


class ShopTestCase(TestCase):
    def setUp(self) -> None:
        self.once = self.enterContext(enforce_once())
        self.account = Account.objects.create(name="Ada", balance=100)

    @property
    def balance(self) -> int:
        return Account.objects.get(pk=self.account.pk).balance


class RefreshFeedTests(ShopTestCase):
    """Efficiency: a double run would only waste work."""

    def setUp(self) -> None:
        super().setUp()
        self.feed = Feed.objects.create(name="news")

    def test_two_clicks_are_one_refresh(self) -> None:
        with self.once.queueing():
            first = refresh_feed.delay(self.feed.pk)
            second = refresh_feed.delay(self.feed.pk)
        assert_suppressed(second, by=first)
        self.assertEqual((first.get(), second.get()), (1, 1))

    def test_a_refresh_that_runs_elsewhere_is_not_repeated(self) -> None:
        with self.once.hold(refresh_feed.s(self.feed.pk)):
            assert_held(refresh_feed.s(self.feed.pk), slot="r")
            assert_suppressed(refresh_feed.delay(self.feed.pk))
        assert_free(refresh_feed.s(self.feed.pk))
        self.assertEqual(refresh_feed.delay(self.feed.pk).get(), 1)

    def test_a_worker_that_died_does_not_block_the_feed(self) -> None:
        with self.once.hold(refresh_feed.s(self.feed.pk)):
            self.once.clock.advance("1m")
            self.assertEqual(refresh_feed.delay(self.feed.pk).get(), 1)


class PostEntryTests(ShopTestCase):
    """Correctness: a double run would take the amount off twice."""

    def test_an_entry_is_posted_once(self) -> None:
        results = [post_entry.delay(1, self.account.pk, 10).get() for _ in range(3)]
        self.assertEqual((results, self.balance, Entry.objects.count()), ([90, 90, 90], 90, 1))

    def test_another_amount_under_the_same_key_is_an_error(self) -> None:
        post_entry.delay(1, self.account.pk, 10).get()
        with self.assertRaises(KeyReusedError):
            post_entry.delay(1, self.account.pk, 11).get()
        self.assertEqual(self.balance, 90)

    def test_after_replay_for_the_key_is_new(self) -> None:
        post_entry.delay(1, self.account.pk, 10).get()
        self.once.clock.advance("29d")
        post_entry.delay(1, self.account.pk, 10).get()
        self.assertEqual(self.balance, 90)
        self.once.clock.advance("1d")
        post_entry.delay(1, self.account.pk, 10).get()
        self.assertEqual(self.balance, 80)

    def test_an_error_rolls_the_posting_back_and_the_next_call_tries_again(self) -> None:
        with mock.patch.object(Entry.objects, "create", side_effect=ValueError):
            self.assertEqual(post_entry.delay(1, self.account.pk, 10).state, "FAILURE")
        self.assertEqual(self.balance, 100)
        self.assertEqual(post_entry.delay(1, self.account.pk, 10).get(), 90)

    def test_inside_a_transaction_it_is_called_on_commit(self) -> None:
        with self.captureOnCommitCallbacks(execute=True), transaction.atomic():
            post_entry.delay_on_commit(1, self.account.pk, 10)
            self.assertEqual(self.balance, 100)
        self.assertEqual(self.balance, 90)

    def test_a_plain_delay_inside_a_transaction_is_found(self) -> None:
        with transaction.atomic():
            result = post_entry.delay(1, self.account.pk, 10)
        with self.assertRaisesRegex(EagerError, "delay_on_commit"):
            result.get()

    def test_the_ledger_explains(self) -> None:
        result = post_entry.delay(1, self.account.pk, 10)
        self.assertIn(f"recorded as succeeded by task {result.id}", str(explain(result.outcome.key)))


class ChargeTests(ShopTestCase):
    """An effect outside: charged once, whatever happens."""

    def setUp(self) -> None:
        super().setUp()
        self.order = Order.objects.create(account=self.account, amount=30)
        self.gateway = self.enterContext(
            mock.patch.object(gateway, "charge", return_value={"id": "receipt 1"})
        )
        self.call = (self.order.pk, self.account.pk, 30)

    def test_a_charge_marks_the_order_and_sends_one_receipt(self) -> None:
        self.assertEqual([charge.delay(*self.call).get() for _ in range(2)], ["receipt 1"] * 2)
        self.order.refresh_from_db()
        self.assertEqual((self.order.status, self.order.receipts_sent, self.balance), ("paid", 1, 70))
        self.assertEqual(self.gateway.call_count, 1)

    def test_a_timeout_is_tried_again_under_the_same_key(self) -> None:
        self.gateway.side_effect = [TimeoutError, {"id": "receipt 1"}]
        self.assertEqual(charge.delay(*self.call).get(), "receipt 1")
        keys = {call.kwargs["idempotency_key"] for call in self.gateway.call_args_list}
        self.assertEqual((len(keys), self.gateway.call_count, self.balance), (1, 2, 70))


class OtherTests(ShopTestCase):
    def test_two_beats_write_one_total_each_night(self) -> None:
        for _night in range(2):
            nightly_totals.delay()
            nightly_totals.delay()
            self.once.clock.advance("1d")
        self.assertEqual(Total.objects.count(), 2)

    def test_the_catalogue_is_rebuilt_by_every_call(self) -> None:
        Product.objects.create(name="tea", price=3)
        self.assertEqual([rebuild_catalogue.delay().get() for _ in range(2)], [1, 2])
        self.assertEqual(Catalogue.objects.get().text, "tea: 3")

    def test_a_queued_receipt_is_not_queued_again(self) -> None:
        order = Order.objects.create(account=self.account, amount=30)
        with self.once.queueing():
            first = send_receipt.delay(order.pk)
            assert_held(send_receipt.s(order.pk), slot="q")
            assert_suppressed(send_receipt.delay(order.pk), by=first)
        order.refresh_from_db()
        self.assertEqual(order.receipts_sent, 1)


class CommittedTests(TransactionTestCase):
    """Without a test's transaction around it: fence and ledger are committed as in production."""

    def test_an_entry_is_posted_once(self) -> None:
        account = Account.objects.create(name="Ada", balance=100)
        with enforce_once() as once:
            self.assertEqual([post_entry.delay(1, account.pk, 10).get() for _ in range(2)], [90, 90])
            once.clock.advance("30d")
            self.assertEqual(post_entry.delay(1, account.pk, 10).get(), 80)
