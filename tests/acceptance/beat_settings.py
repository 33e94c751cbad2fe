"""Django settings of beats whose schedule is in the database: the shop's, and django-celery-beat."""

from __future__ import annotations

from example_project.settings import *  # noqa: F403
from example_project.settings import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "django_celery_beat"]
