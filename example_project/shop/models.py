from __future__ import annotations

from django.db import models


class Account(models.Model):
    name = models.CharField(max_length=100)
    balance = models.IntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.name}: {self.balance}"


class Entry(models.Model):
    """One posting that was made, written beside the balance it changed."""

    number = models.BigIntegerField(
        help_text="Deliberately not unique: nothing but the plugin prevents a second one."
    )
    account = models.ForeignKey(Account, on_delete=models.CASCADE, related_name="entries")
    amount = models.IntegerField()
    posted_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        verbose_name_plural = "entries"

    def __str__(self) -> str:
        return f"{self.number}: {self.amount}"


class Order(models.Model):
    """Something an account pays for through a gateway."""

    account = models.ForeignKey(Account, on_delete=models.CASCADE, related_name="orders")
    amount = models.IntegerField()
    status = models.CharField(max_length=20, default="open")
    receipt = models.CharField(max_length=100, blank=True, help_text="The gateway's, of the charge.")
    receipts_sent = models.IntegerField(default=0, help_text="How often the customer was sent it.")

    def __str__(self) -> str:
        return f"{self.pk}: {self.status}"


class Product(models.Model):
    name = models.CharField(max_length=100)
    price = models.IntegerField()

    def __str__(self) -> str:
        return self.name


class Catalogue(models.Model):
    """The price list as customers see it, rebuilt from the products."""

    text = models.TextField()
    edition = models.IntegerField(default=0)

    def __str__(self) -> str:
        return f"edition {self.edition}"


class Feed(models.Model):
    name = models.CharField(max_length=100)
    refreshed = models.IntegerField(default=0, help_text="How often it was refreshed.")

    def __str__(self) -> str:
        return self.name


class Total(models.Model):
    """The sum of all balances at the end of one day."""

    day = models.DateField()
    amount = models.BigIntegerField()

    def __str__(self) -> str:
        return f"{self.day}: {self.amount}"
