"""The Django app of celery_once_fenced: tables, the body's transaction, system checks, admin (label ``once_fenced``)."""
