"""What the admin needs: its overview, permissions of its actions, and indexes for its lists."""

from typing import ClassVar

from django.db import migrations

from django_celery_once_fenced.install import InstallSQL

REMOVE = "drop index if exists once_fenced_ledger_open, once_fenced_ledger_started"


class Migration(migrations.Migration):
    dependencies: ClassVar = [
        ("once_fenced", "0001_initial"),
    ]

    operations: ClassVar = [
        InstallSQL("listing_v1.sql", remove=REMOVE),
        migrations.CreateModel(
            name="Overview",
            fields=[],
            options={
                "verbose_name": "overview",
                "verbose_name_plural": "overview",
                "proxy": True,
                "default_permissions": ("view",),
                "indexes": [],
                "constraints": [],
            },
            bases=("once_fenced.fence",),
        ),
        migrations.AlterModelOptions(
            name="heldlock",
            options={
                "default_permissions": ("view",),
                "permissions": (
                    ("release_heldlock", "Can release a held lock"),
                    ("bump_heldlock", "Can release a held lock and bump its fence"),
                ),
                "verbose_name": "held lock",
                "verbose_name_plural": "held locks",
            },
        ),
        migrations.AlterModelOptions(
            name="ledgerentry",
            options={
                "default_permissions": ("view",),
                "permissions": (
                    ("forget_ledgerentry", "Can let a key run again"),
                    ("prune_ledgerentry", "Can prune what nobody needs any more"),
                ),
                "verbose_name": "dedup record",
                "verbose_name_plural": "dedup records",
            },
        ),
    ]
