"""Steps outside of the database that were started and have no outcome yet: by the run that goes on, or by one before it."""

from __future__ import annotations

from django.utils.translation import gettext as _

from django_celery_once_fenced import conf
from django_celery_once_fenced.admin_reading import second_of
from django_celery_once_fenced.locks import Lock
from django_celery_once_fenced.models import Effect, EffectState, State

__all__ = ["under_way"]


def under_way(lock: Lock) -> str:
    """What to know before it is released, in words; empty where no step is under way."""
    if lock.slot == "queued" or not lock.digest or not conf.has_fences():
        return ""
    begun = Effect.objects.using(conf.alias()).filter(
        entry=lock.digest, entry__state=State.RUNNING, state=EffectState.STARTED
    )
    return " ".join(_sentence(effect) for effect in begun.order_by("started_at"))


def _sentence(effect: Effect) -> str:
    text = _(
        "Its step “%(step)s” was started at %(at)s and has no outcome yet: if the run ends before it has one, "
        "the key may end in doubt, and somebody decides."
    )
    return text % {"step": effect.name, "at": second_of(effect.started_at)}
