"""*In doubt*: how a person decides an entry whose step may or may not have been taken (L14)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django import forms
from django.utils.translation import gettext_lazy as _

from celery_once_fenced import operate

if TYPE_CHECKING:
    from django_celery_once_fenced.models import InDoubt

__all__ = ["ResolveForm"]

LONGEST_REASON = 1000


class ResolveForm(forms.Form):
    """What became of the step, and how one knows."""

    outcome = forms.ChoiceField(
        label=_("Outcome"),
        widget=forms.RadioSelect,
        choices=(
            ("succeeded", _("Succeeded: later calls get the result below, nothing is run")),
            ("failed", _("Failed: later calls get an error with the reason, nothing is run")),
            ("again", _("Run again: the step is taken with the same downstream key")),
        ),
    )
    result = forms.JSONField(
        label=_("Result"),
        required=False,
        widget=forms.Textarea(attrs={"rows": 3}),
        help_text=_("JSON, where it succeeded; empty: null."),
    )
    reason = forms.CharField(
        label=_("Reason"),
        max_length=LONGEST_REASON,
        widget=forms.Textarea(attrs={"rows": 3}),
        help_text=_("How you know. It is kept with your name."),
    )

    def clean(self) -> dict[str, Any]:
        given = super().clean() or {}
        if given.get("result") is not None and given.get("outcome") in ("failed", "again"):
            self.add_error("result", _("Only what succeeded has a result."))
        return given

    def decide(self, entry: InDoubt, actor: str) -> bool:
        """Record the decision; False where the entry is in doubt no more.  Raises ``OnceError``."""
        given = self.cleaned_data
        result = given["result"] if given["outcome"] == "succeeded" else None
        return operate.resolve(
            str(entry.pk), given["outcome"], result=result, reason=given["reason"], actor=actor
        )
