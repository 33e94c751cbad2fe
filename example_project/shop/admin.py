from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin

from django_celery_once_fenced.mixins import HeldLocksMixin
from example_project.shop.models import Account, Catalogue, Entry, Feed, Order, Product, Total

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
else:
    ModelAdmin = admin.ModelAdmin

admin.site.register([Catalogue, Entry, Feed, Product, Total])


@admin.register(Account)
class AccountAdmin(HeldLocksMixin, ModelAdmin):
    held_lock_keys = ("account:{pk}",)


@admin.register(Order)
class OrderAdmin(HeldLocksMixin, ModelAdmin):
    held_lock_keys = ("charge:{pk}", "receipt:{pk}")
