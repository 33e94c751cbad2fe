from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class OnceFencedConfig(AppConfig):
    name = "django_celery_once_fenced"
    label = "once_fenced"
    verbose_name = _("Celery once fenced")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from django.db.backends.signals import connection_created

        from celery_once_fenced import doctor, runtime
        from django_celery_once_fenced import checks  # its import registers the checks, and those of fencing
        from django_celery_once_fenced.fencing import refusals
        from django_celery_once_fenced.store import database

        runtime.register_database(database)
        doctor.also(checks.for_the_doctor)
        connection_created.connect(refusals.watch, dispatch_uid="once_fenced.refusals")
