"""Settings of the example shop.  Servers are named by ``ONCE_FENCED_REDIS_URL`` and ``ONCE_FENCED_POSTGRES_URL``."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

from celery.schedules import crontab
from psycopg.conninfo import conninfo_to_dict

REDIS_URL = os.environ.get("ONCE_FENCED_REDIS_URL", "redis://localhost:6379")
POSTGRES_URL = os.environ.get("ONCE_FENCED_POSTGRES_URL", "postgresql://localhost/shop")


def redis_database(number: int) -> str:
    return urlsplit(REDIS_URL)._replace(path=f"/{number}").geturl()


def django_database(url: str) -> dict[str, Any]:
    parts = conninfo_to_dict(url)
    named = {key.upper(): parts.pop(key, "") for key in ("user", "password", "host", "port")}
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.pop("dbname", ""),
        **named,
        "OPTIONS": parts,
    }


SECRET_KEY = "the example shop has no secrets"
DEBUG = True
ALLOWED_HOSTS = ["localhost", "127.0.0.1", "testserver"]
ROOT_URLCONF = "example_project.urls"
STATIC_URL = "static/"
LANGUAGE_CODE = "en"
TIME_ZONE = "UTC"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "django_celery_once_fenced",
    "example_project.shop",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

DATABASES = {"default": django_database(POSTGRES_URL)}

# --- Celery ----------------------------------------------------------------------------------------------------------

CELERY_BROKER_URL = redis_database(0)
CELERY_RESULT_BACKEND = redis_database(1)
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
# A message that no worker has acknowledged for this long is delivered again. An hour is Celery's default; the demo
# takes a few seconds, and has kombu look every second instead of every ten.
VISIBILITY_TIMEOUT = int(os.environ.get("SHOP_VISIBILITY_TIMEOUT", "3600"))
CELERY_BROKER_TRANSPORT_OPTIONS = {"visibility_timeout": VISIBILITY_TIMEOUT}
if VISIBILITY_TIMEOUT < 60:
    CELERY_BROKER_TRANSPORT_OPTIONS |= {"unacked_restore_interval": 1, "unacked_restore_throttle": 1}

CELERY_BEAT_SCHEDULE = {
    "nightly-totals": {
        "task": "example_project.shop.tasks.nightly_totals",
        "schedule": crontab(hour=3, minute=0),
    },
}

# --- celery_once_fenced ----------------------------------------------------------------------------------------------

CELERY_ONCE_FENCED = {
    "redis_url": redis_database(2),
    "database": "default",
    "namespace": "shop",
    "defaults": {"lease": float(os.environ.get("SHOP_LEASE", "60"))},
    "tasks": {
        # rebuild_catalogue is written as a plain SingletonTask; this line alone has its writes fenced.
        "example_project.shop.tasks.rebuild_catalogue": {"tier": "correctness", "replay_for": 0},
    },
}
