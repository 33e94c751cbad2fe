from typing import ClassVar

import django.db.models.deletion
from django.db import migrations, models

import django_celery_once_fenced.fields
from django_celery_once_fenced.install import InstallSQL

FILES = (
    "schema_v1.sql",
    "timeline_v1.sql",
    "durable_v1.sql",
    "token_v1.sql",
    "evict_v1.sql",
    "lock_v1.sql",
    "claim_v1.sql",
    "begin_v1.sql",
    "complete_v1.sql",
    "record_v1.sql",
    "abandon_v1.sql",
    "renew_v1.sql",
    "effect_start_v1.sql",
    "effect_finish_v1.sql",
    "force_release_v1.sql",
    "resolve_v1.sql",
    "forget_v1.sql",
    "outbox_v1.sql",
    "fence_v1.sql",
    "prune_v1.sql",
    "guard_v1.sql",
    "unfenced_v1.sql",
)

REMOVE = """
drop function if exists
  once_fenced_unfenced_v1,
  once_fenced_guard_v1,
  once_fenced_prune_v1,
  once_fenced_free_v1,
  once_fenced_check_v1,
  once_fenced_acquire_v1,
  once_fenced_outbox_take_v1,
  once_fenced_outbox_confirm_v1,
  once_fenced_outbox_mine_v1,
  once_fenced_outbox_put_v1,
  once_fenced_forget_v1,
  once_fenced_resolve_v1,
  once_fenced_force_release_v1,
  once_fenced_effect_finish_v1,
  once_fenced_effect_start_v1,
  once_fenced_renew_v1,
  once_fenced_abandon_v1,
  once_fenced_record_v1,
  once_fenced_complete_v1,
  once_fenced_begin_v1,
  once_fenced_claim_v1,
  once_fenced_lock_v1,
  once_fenced_evict_v1,
  once_fenced_token_v1,
  once_fenced_durable_v1,
  once_fenced_timeline_v1;
drop table if exists
  once_fenced_event, once_fenced_outbox, once_fenced_effect, once_fenced_ledger, once_fenced_fence, once_fenced_epoch;
drop domain if exists once_fenced_resource, once_fenced_digest, once_fenced_state, once_fenced_step;
"""


class Migration(migrations.Migration):
    """The tables and functions come from the frozen SQL; the models are told of the tables.  Nothing is created twice."""

    initial = True
    dependencies: ClassVar = []
    operations: ClassVar = [
        migrations.SeparateDatabaseAndState(
            database_operations=[InstallSQL(*FILES, remove=REMOVE)],
            state_operations=[
                migrations.CreateModel(
                    name="Epoch",
                    fields=[
                        ("one", models.BooleanField(primary_key=True, serialize=False)),
                        ("timeline", models.BigIntegerField(verbose_name="timeline")),
                        ("epoch", models.BigIntegerField(verbose_name="epoch")),
                        (
                            "floor",
                            models.BigIntegerField(
                                help_text="No token up to this one is issued again.", verbose_name="floor"
                            ),
                        ),
                    ],
                    options={
                        "verbose_name": "epoch",
                        "verbose_name_plural": "epochs",
                        "db_table": "once_fenced_epoch",
                        "default_permissions": ("view",),
                        "required_db_vendor": "postgresql",
                    },
                ),
                migrations.CreateModel(
                    name="Event",
                    fields=[
                        ("id", models.BigAutoField(primary_key=True, serialize=False)),
                        ("at", models.DateTimeField(verbose_name="at")),
                        ("kind", models.TextField(verbose_name="event")),
                        ("resource", models.TextField(null=True, verbose_name="resource")),
                        (
                            "key_digest",
                            django_celery_once_fenced.fields.DigestField(
                                null=True, verbose_name="key digest"
                            ),
                        ),
                        ("task_name", models.TextField(null=True, verbose_name="task")),
                        ("task_id", models.TextField(null=True, verbose_name="task id")),
                        ("holder", models.TextField(null=True, verbose_name="holder")),
                        ("worker", models.TextField(null=True, verbose_name="worker")),
                        ("token", models.BigIntegerField(null=True, verbose_name="token")),
                        (
                            "old_key_digest",
                            django_celery_once_fenced.fields.DigestField(
                                null=True, verbose_name="former key digest"
                            ),
                        ),
                        ("old_task_id", models.TextField(null=True, verbose_name="former task id")),
                        ("old_holder", models.TextField(null=True, verbose_name="former holder")),
                        ("old_worker", models.TextField(null=True, verbose_name="former worker")),
                        ("old_token", models.BigIntegerField(null=True, verbose_name="former token")),
                        ("actor", models.TextField(null=True, verbose_name="by")),
                        ("detail", models.TextField(null=True, verbose_name="detail")),
                    ],
                    options={
                        "verbose_name": "event",
                        "verbose_name_plural": "events",
                        "db_table": "once_fenced_event",
                        "default_permissions": ("view",),
                        "required_db_vendor": "postgresql",
                    },
                ),
                migrations.CreateModel(
                    name="Fence",
                    fields=[
                        (
                            "resource",
                            models.TextField(
                                help_text="What the fence protects.",
                                primary_key=True,
                                serialize=False,
                                verbose_name="resource",
                            ),
                        ),
                        (
                            "token",
                            models.BigIntegerField(
                                help_text="The highest fencing token ever issued for this resource; it never goes back.",
                                verbose_name="token",
                            ),
                        ),
                        (
                            "holder",
                            models.TextField(
                                help_text="Random id of one acquisition; empty when free.",
                                null=True,
                                verbose_name="holder",
                            ),
                        ),
                        (
                            "key_digest",
                            django_celery_once_fenced.fields.DigestField(
                                null=True, verbose_name="key digest"
                            ),
                        ),
                        ("task_id", models.TextField(null=True, verbose_name="task id")),
                        ("task_name", models.TextField(null=True, verbose_name="task")),
                        ("key", models.TextField(null=True, verbose_name="key")),
                        ("worker", models.TextField(null=True, verbose_name="worker")),
                        ("acquired_at", models.DateTimeField(null=True, verbose_name="since")),
                        (
                            "expires_at",
                            models.DateTimeField(
                                help_text="When another may take over; empty when free.",
                                null=True,
                                verbose_name="lease until",
                            ),
                        ),
                    ],
                    options={
                        "verbose_name": "fence",
                        "verbose_name_plural": "fences",
                        "db_table": "once_fenced_fence",
                        "default_permissions": ("view",),
                        "required_db_vendor": "postgresql",
                    },
                ),
                migrations.CreateModel(
                    name="LedgerEntry",
                    fields=[
                        (
                            "key_digest",
                            django_celery_once_fenced.fields.DigestField(
                                help_text="SHA-256 that identifies the operation.",
                                primary_key=True,
                                serialize=False,
                                verbose_name="key digest",
                            ),
                        ),
                        (
                            "key",
                            models.TextField(help_text="The idempotency key, readable.", verbose_name="key"),
                        ),
                        ("scope", models.TextField(verbose_name="scope")),
                        ("task_name", models.TextField(verbose_name="task")),
                        ("task_id", models.TextField(null=True, verbose_name="task id")),
                        ("run_id", models.TextField(null=True, verbose_name="run id")),
                        (
                            "namespace",
                            models.TextField(
                                help_text="Of the app that ran it last, in its settings.",
                                verbose_name="namespace",
                            ),
                        ),
                        (
                            "fingerprint",
                            django_celery_once_fenced.fields.DigestField(
                                help_text="Hash of the call; the same key with another one is key reuse.",
                                null=True,
                                verbose_name="fingerprint",
                            ),
                        ),
                        (
                            "state",
                            models.TextField(
                                choices=[
                                    ("running", "running"),
                                    ("succeeded", "succeeded"),
                                    ("failed", "failed"),
                                    ("retryable", "retryable"),
                                    ("in_doubt", "in doubt"),
                                ],
                                verbose_name="state",
                            ),
                        ),
                        ("attempt", models.IntegerField(verbose_name="attempt")),
                        (
                            "takeovers",
                            models.IntegerField(
                                help_text="How often another worker took this key over.",
                                verbose_name="takeovers",
                            ),
                        ),
                        (
                            "holder",
                            models.TextField(
                                help_text="Random id of the latest acquisition.", verbose_name="holder"
                            ),
                        ),
                        ("resource", models.TextField(verbose_name="resource")),
                        (
                            "token",
                            models.BigIntegerField(
                                help_text="Fencing token of the latest attempt.", verbose_name="token"
                            ),
                        ),
                        (
                            "result",
                            models.TextField(
                                help_text="What later calls are answered with, as JSON.",
                                null=True,
                                verbose_name="result",
                            ),
                        ),
                        (
                            "result_omitted",
                            models.TextField(
                                help_text="Why no result was recorded.",
                                null=True,
                                verbose_name="result omitted",
                            ),
                        ),
                        (
                            "error",
                            models.TextField(
                                help_text="Of the last attempt, as JSON.", null=True, verbose_name="error"
                            ),
                        ),
                        (
                            "message",
                            models.TextField(
                                help_text="Kept while in doubt, so that it can run again.",
                                null=True,
                                verbose_name="message",
                            ),
                        ),
                        ("created_at", models.DateTimeField(verbose_name="created")),
                        ("started_at", models.DateTimeField(verbose_name="started")),
                        ("finished_at", models.DateTimeField(null=True, verbose_name="finished")),
                        (
                            "replay_until",
                            models.DateTimeField(
                                help_text="Until then it answers later calls; its own redeliveries longer.",
                                null=True,
                                verbose_name="answers until",
                            ),
                        ),
                        (
                            "retain_until",
                            models.DateTimeField(
                                help_text="Not pruned before.", null=True, verbose_name="kept until"
                            ),
                        ),
                    ],
                    options={
                        "verbose_name": "dedup record",
                        "verbose_name_plural": "dedup records",
                        "db_table": "once_fenced_ledger",
                        "default_permissions": ("view",),
                        "required_db_vendor": "postgresql",
                    },
                ),
                migrations.CreateModel(
                    name="Outbox",
                    fields=[
                        ("id", models.BigAutoField(primary_key=True, serialize=False)),
                        (
                            "namespace",
                            models.TextField(
                                help_text="Of the app that publishes it.", verbose_name="namespace"
                            ),
                        ),
                        (
                            "key_digest",
                            django_celery_once_fenced.fields.DigestField(verbose_name="key digest"),
                        ),
                        ("task_id", models.TextField(verbose_name="task id")),
                        ("message", models.TextField(verbose_name="message")),
                        ("created_at", models.DateTimeField(verbose_name="created")),
                        ("taken_at", models.DateTimeField(null=True, verbose_name="taken by a sweep")),
                        ("confirmed_at", models.DateTimeField(null=True, verbose_name="published")),
                    ],
                    options={
                        "verbose_name": "outgoing message",
                        "verbose_name_plural": "outgoing messages",
                        "db_table": "once_fenced_outbox",
                        "default_permissions": ("view",),
                        "required_db_vendor": "postgresql",
                    },
                ),
                migrations.CreateModel(
                    name="HeldLock",
                    fields=[],
                    options={
                        "verbose_name": "held lock",
                        "verbose_name_plural": "held locks",
                        "proxy": True,
                        "default_permissions": ("view",),
                        "indexes": [],
                        "constraints": [],
                    },
                    bases=("once_fenced.fence",),
                ),
                migrations.CreateModel(
                    name="InDoubt",
                    fields=[],
                    options={
                        "verbose_name": "key in doubt",
                        "verbose_name_plural": "keys in doubt",
                        "permissions": (("resolve_indoubt", "Can resolve what is in doubt"),),
                        "proxy": True,
                        "default_permissions": ("view",),
                        "indexes": [],
                        "constraints": [],
                    },
                    bases=("once_fenced.ledgerentry",),
                ),
                migrations.CreateModel(
                    name="Effect",
                    fields=[
                        (
                            "pk",
                            models.CompositePrimaryKey(
                                "entry_id",
                                "name",
                                blank=True,
                                editable=False,
                                primary_key=True,
                                serialize=False,
                            ),
                        ),
                        ("name", models.TextField(verbose_name="name")),
                        (
                            "state",
                            models.TextField(
                                choices=[
                                    ("started", "started"),
                                    ("done", "done"),
                                    ("failed", "failed"),
                                    ("released", "to be called again"),
                                ],
                                verbose_name="state",
                            ),
                        ),
                        ("generation", models.IntegerField(verbose_name="generation")),
                        (
                            "downstream_key",
                            models.TextField(
                                help_text="Idempotency key given to the other system.",
                                verbose_name="downstream key",
                            ),
                        ),
                        ("holder", models.TextField(verbose_name="holder")),
                        ("token", models.BigIntegerField(verbose_name="token")),
                        (
                            "on_unknown",
                            models.TextField(
                                help_text="Its own policy; empty: the task's.",
                                null=True,
                                verbose_name="when unknown",
                            ),
                        ),
                        ("result", models.TextField(null=True, verbose_name="result")),
                        ("error", models.TextField(null=True, verbose_name="error")),
                        ("started_at", models.DateTimeField(verbose_name="started")),
                        ("finished_at", models.DateTimeField(null=True, verbose_name="finished")),
                        (
                            "entry",
                            models.ForeignKey(
                                db_column="key_digest",
                                on_delete=django.db.models.deletion.DO_NOTHING,
                                related_name="effects",
                                to="once_fenced.ledgerentry",
                                verbose_name="dedup record",
                            ),
                        ),
                    ],
                    options={
                        "verbose_name": "effect",
                        "verbose_name_plural": "effects",
                        "db_table": "once_fenced_effect",
                        "default_permissions": ("view",),
                        "required_db_vendor": "postgresql",
                    },
                ),
            ],
        ),
    ]
