from __future__ import annotations

from django.apps import AppConfig


class ShopConfig(AppConfig):
    name = "example_project.shop"

    def ready(self) -> None:
        # Every process that loads Django gets the Celery app. Most projects do this in the package's __init__.py;
        # here that package also holds servers.py, which works without Django.
        from example_project import celery_app  # noqa: F401
