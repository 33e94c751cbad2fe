"""The page that Prometheus reads: ``path("metrics", MetricsView.as_view())``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.utils.cache import add_never_cache_headers
from django.utils.crypto import constant_time_compare
from django.views.generic import View

from celery_once_fenced import runtime

if TYPE_CHECKING:
    from django.http.response import HttpResponseBase

__all__ = ["Allow", "MetricsView", "bearer", "may_view"]

Allow = Callable[[HttpRequest], bool]


def may_view(request: HttpRequest) -> bool:
    """Whether the user is one of the staff who may view held locks in the admin."""
    user: Any = getattr(request, "user", None)  # None without the authentication middleware
    return bool(user and user.is_active and user.is_staff and user.has_perm("once_fenced.view_heldlock"))


def bearer(token: str) -> Allow:
    """Whether the request carries ``Authorization: Bearer <token>``, which a scrape configuration can send.
    The case of the scheme does not matter (RFC 9110).

    Raises ``ValueError`` for an empty token: an environment variable that is not set must not open the page.
    """
    if not token:
        raise ValueError("the token of the metrics page is empty: set it, or leave allow= out")

    def allow(request: HttpRequest) -> bool:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        return scheme.lower() == "bearer" and constant_time_compare(given.lstrip(" "), token)

    return allow


class MetricsView(View):
    """All metrics of the project's Celery app, as text for Prometheus; needs the extra ``prometheus``.

    ``allow`` decides who may read it, from the request; without it, staff who may view held locks.  Give it to
    ``as_view``: ``MetricsView.as_view(allow=bearer(os.environ["METRICS_TOKEN"]))``.
    """

    allow: Allow | None = None

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        if not (self.allow or may_view)(request):
            raise PermissionDenied
        return super().dispatch(request, *args, **kwargs)

    def get(self, request: HttpRequest) -> HttpResponse:
        from celery_once_fenced.observers.prometheus import exposition

        text, content_type = exposition(runtime.current, request.headers.get("Accept", ""))
        response = HttpResponse(text, content_type=content_type)
        add_never_cache_headers(response)
        return response
