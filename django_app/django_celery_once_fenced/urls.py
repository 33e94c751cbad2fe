"""``path("once/", include("django_celery_once_fenced.urls"))``: the metrics page, for staff who may view held locks."""

from __future__ import annotations

from django.urls import path

from django_celery_once_fenced.views import MetricsView

app_name = "once_fenced"
urlpatterns = [path("metrics", MetricsView.as_view(), name="metrics")]
