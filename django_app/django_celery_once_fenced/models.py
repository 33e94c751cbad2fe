"""Fence, ledger and what belongs to them, as Django sees them: for people and for the admin, read-only.

The tables are made and written by the SQL of ``celery_once_fenced.stores`` alone, the same with and without Django;
these models describe them.  Rows are never created, changed or deleted through them: a ``save()`` would bypass the
locks that the protocol stands on (C6, C7, L1).  The one exception is ``Event``, which nothing stands on: ``records``
adds to it what a person did in the admin.
"""

from __future__ import annotations

from datetime import datetime

from django.db import models
from django.utils.translation import gettext_lazy as _

from celery_once_fenced.wording import safe
from django_celery_once_fenced.fields import DigestField

__all__ = ["Effect", "Epoch", "Event", "Fence", "HeldLock", "InDoubt", "LedgerEntry", "Outbox", "Overview"]

READ_ONLY = ("view",)


class State(models.TextChoices):
    RUNNING = "running", _("running")
    SUCCEEDED = "succeeded", _("succeeded")
    FAILED = "failed", _("failed")
    RETRYABLE = "retryable", _("retryable")
    IN_DOUBT = "in_doubt", _("in doubt")


class EffectState(models.TextChoices):
    STARTED = "started", _("started")
    DONE = "done", _("done")
    FAILED = "failed", _("failed")
    RELEASED = "released", _("to be called again")


class Fence(models.Model):
    resource = models.TextField(_("resource"), primary_key=True, help_text=_("What the fence protects."))
    token = models.BigIntegerField(
        _("token"),
        help_text=_("The highest fencing token ever issued for this resource; it never goes back."),
    )
    holder = models.TextField(
        _("holder"), null=True, help_text=_("Random id of one acquisition; empty when free.")
    )
    key_digest = DigestField(_("key digest"), null=True)
    task_id = models.TextField(_("task id"), null=True)
    task_name = models.TextField(_("task"), null=True)
    key = models.TextField(_("key"), null=True)
    worker = models.TextField(_("worker"), null=True)
    acquired_at = models.DateTimeField(_("since"), null=True)
    expires_at = models.DateTimeField(
        _("lease until"), null=True, help_text=_("When another may take over; empty when free.")
    )

    class Meta:
        db_table = "once_fenced_fence"
        required_db_vendor = "postgresql"
        default_permissions = READ_ONLY
        verbose_name = _("fence")
        verbose_name_plural = _("fences")

    def __str__(self) -> str:
        return f"{self.resource} ({self.token})"


class LedgerEntry(models.Model):
    key_digest = DigestField(
        _("key digest"), primary_key=True, help_text=_("SHA-256 that identifies the operation.")
    )
    key = models.TextField(_("key"), help_text=_("The idempotency key, readable."))
    scope = models.TextField(_("scope"))
    task_name = models.TextField(_("task"))
    task_id = models.TextField(_("task id"), null=True)
    run_id = models.TextField(_("run id"), null=True)
    namespace = models.TextField(_("namespace"), help_text=_("Of the app that ran it last, in its settings."))
    fingerprint = DigestField(
        _("fingerprint"),
        null=True,
        help_text=_("Hash of the call; the same key with another one is key reuse."),
    )
    state = models.TextField(_("state"), choices=State)
    attempt = models.IntegerField(_("attempt"))
    takeovers = models.IntegerField(
        _("takeovers"), help_text=_("How often another worker took this key over.")
    )
    holder = models.TextField(_("holder"), help_text=_("Random id of the latest acquisition."))
    resource = models.TextField(_("resource"))
    token = models.BigIntegerField(_("token"), help_text=_("Fencing token of the latest attempt."))
    result = models.TextField(
        _("result"), null=True, help_text=_("What later calls are answered with, as JSON.")
    )
    result_omitted = models.TextField(
        _("result omitted"), null=True, help_text=_("Why no result was recorded.")
    )
    error = models.TextField(_("error"), null=True, help_text=_("Of the last attempt, as JSON."))
    message = models.TextField(
        _("message"), null=True, help_text=_("Kept while in doubt, so that it can run again.")
    )
    created_at = models.DateTimeField(_("created"))
    started_at = models.DateTimeField(_("started"))
    finished_at = models.DateTimeField(_("finished"), null=True)
    replay_until = models.DateTimeField(
        _("answers until"),
        null=True,
        help_text=_("Until then it answers later calls; its own redeliveries longer."),
    )
    retain_until = models.DateTimeField(_("kept until"), null=True, help_text=_("Not pruned before."))

    class Meta:
        db_table = "once_fenced_ledger"
        required_db_vendor = "postgresql"
        default_permissions = READ_ONLY
        permissions = (
            ("forget_ledgerentry", _("Can let a key run again")),
            ("prune_ledgerentry", _("Can prune what nobody needs any more")),
        )
        verbose_name = _("dedup record")
        verbose_name_plural = _("dedup records")

    @property
    def answers_until(self) -> datetime | None:
        """Until when later calls get its outcome: that of a parked or decided one is kept, not replayed for a time."""
        finished = self.state in (State.SUCCEEDED, State.FAILED)
        return self.replay_until or self.retain_until if finished else None

    def __str__(self) -> str:
        return safe(
            self.key
        )  # Django puts it into titles, where nothing keeps it from turning their direction


class Effect(models.Model):
    pk = models.CompositePrimaryKey("entry_id", "name")
    entry = models.ForeignKey(
        LedgerEntry,
        on_delete=models.DO_NOTHING,  # The database cascades.
        db_column="key_digest",
        related_name="effects",
        verbose_name=_("dedup record"),
    )
    name = models.TextField(_("name"))
    state = models.TextField(_("state"), choices=EffectState)
    generation = models.IntegerField(_("generation"))
    downstream_key = models.TextField(
        _("downstream key"), help_text=_("Idempotency key given to the other system.")
    )
    holder = models.TextField(_("holder"))
    token = models.BigIntegerField(_("token"))
    on_unknown = models.TextField(
        _("when unknown"), null=True, help_text=_("Its own policy; empty: the task's.")
    )
    result = models.TextField(_("result"), null=True)
    error = models.TextField(_("error"), null=True)
    started_at = models.DateTimeField(_("started"))
    finished_at = models.DateTimeField(_("finished"), null=True)

    class Meta:
        db_table = "once_fenced_effect"
        required_db_vendor = "postgresql"
        default_permissions = READ_ONLY
        verbose_name = _("effect")
        verbose_name_plural = _("effects")

    def __str__(self) -> str:
        return self.name


class Outbox(models.Model):
    id = models.BigAutoField(primary_key=True)
    namespace = models.TextField(_("namespace"), help_text=_("Of the app that publishes it."))
    key_digest = DigestField(_("key digest"))
    task_id = models.TextField(_("task id"))
    message = models.TextField(_("message"))
    created_at = models.DateTimeField(_("created"))
    taken_at = models.DateTimeField(_("taken by a sweep"), null=True)
    confirmed_at = models.DateTimeField(_("published"), null=True)

    class Meta:
        db_table = "once_fenced_outbox"
        required_db_vendor = "postgresql"
        default_permissions = READ_ONLY
        verbose_name = _("outgoing message")
        verbose_name_plural = _("outgoing messages")

    def __str__(self) -> str:
        return self.task_id


class Event(models.Model):
    """Of a takeover, the plain columns are the successor and ``old_*`` the one it took over from."""

    id = models.BigAutoField(primary_key=True)
    at = models.DateTimeField(_("at"))
    kind = models.TextField(_("event"))
    resource = models.TextField(_("resource"), null=True)
    key_digest = DigestField(_("key digest"), null=True)
    task_name = models.TextField(_("task"), null=True)
    task_id = models.TextField(_("task id"), null=True)
    holder = models.TextField(_("holder"), null=True)
    worker = models.TextField(_("worker"), null=True)
    token = models.BigIntegerField(_("token"), null=True)
    old_key_digest = DigestField(_("former key digest"), null=True)
    old_task_id = models.TextField(_("former task id"), null=True)
    old_holder = models.TextField(_("former holder"), null=True)
    old_worker = models.TextField(_("former worker"), null=True)
    old_token = models.BigIntegerField(_("former token"), null=True)
    actor = models.TextField(_("by"), null=True)
    detail = models.TextField(_("detail"), null=True)

    class Meta:
        db_table = "once_fenced_event"
        required_db_vendor = "postgresql"
        default_permissions = READ_ONLY
        verbose_name = _("event")
        verbose_name_plural = _("events")

    def __str__(self) -> str:
        return self.kind


class Epoch(models.Model):
    """One row: what keeps tokens rising over failovers and pruning (C2, C3)."""

    one = models.BooleanField(primary_key=True)
    timeline = models.BigIntegerField(_("timeline"))
    epoch = models.BigIntegerField(_("epoch"))
    floor = models.BigIntegerField(_("floor"), help_text=_("No token up to this one is issued again."))

    class Meta:
        db_table = "once_fenced_epoch"
        required_db_vendor = "postgresql"
        default_permissions = READ_ONLY
        verbose_name = _("epoch")
        verbose_name_plural = _("epochs")

    def __str__(self) -> str:
        return str(self.epoch)


class HeldLock(Fence):
    """What the admin page *Held locks* stands on: its permissions, its name, its address."""

    class Meta:
        proxy = True
        verbose_name = _("held lock")
        verbose_name_plural = _("held locks")
        default_permissions = READ_ONLY
        permissions = (
            ("release_heldlock", _("Can release a held lock")),
            ("bump_heldlock", _("Can release a held lock and bump its fence")),
        )


class Overview(Fence):
    """What the admin page *Overview* stands on: its permission, its name, its address."""

    class Meta:
        proxy = True
        verbose_name = _("overview")
        verbose_name_plural = _("overview")
        default_permissions = READ_ONLY


class InDoubt(LedgerEntry):
    """What the admin page *In doubt* stands on: its permissions, its name, its address."""

    class Meta:
        proxy = True
        verbose_name = _("key in doubt")
        verbose_name_plural = _("keys in doubt")
        default_permissions = READ_ONLY
        permissions = (("resolve_indoubt", _("Can resolve what is in doubt")),)
