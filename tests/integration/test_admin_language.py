"""The texts of the pages: all of them go through gettext, and the German catalogue has every one."""

from __future__ import annotations

import ast
import gettext
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.test import Client, override_settings

import django_celery_once_fenced

APP = Path(str(django_celery_once_fenced.__file__)).parent
CATALOGUE = APP / "locale" / "de" / "LC_MESSAGES"
MARKS = {"_", "gettext", "gettext_lazy", "ngettext", "ngettext_lazy"}
TAG = re.compile(
    r"""\{%\s*translate\s+"([^"]*)"|\{%\s*blocktranslate\b[^%]*%\}(.*?)\{%\s*(?:plural|endblocktranslate)""",
    re.DOTALL,
)


def in_code() -> Iterator[str]:
    for path in APP.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in MARKS:
                yield from (str(text.value) for text in node.args[:1] if isinstance(text, ast.Constant))


def in_templates() -> Iterator[str]:
    for path in APP.rglob("*.html"):
        for text, block in TAG.findall(path.read_text()):
            yield re.sub(r"\{\{\s*(\w+)\s*\}\}", r"%(\1)s", (text or block).replace("%", "%%"))


def translations() -> gettext.GNUTranslations:
    with (CATALOGUE / "django.mo").open("rb") as file:
        return gettext.GNUTranslations(file)


def test_the_catalogue_has_every_text() -> None:
    known = {key[0] if isinstance(key, tuple) else key for key in translations()._catalog}  # type: ignore[attr-defined]
    texts = {*in_code(), *in_templates()}
    assert len(texts) > 200
    assert texts - known == set()


def test_the_compiled_catalogue_is_of_the_readable_one() -> None:
    readable = (CATALOGUE / "django.po").read_text()
    texts = set(re.findall(r'^msgstr(?:\[\d\])? "(.+)"$', readable, re.MULTILINE))
    assert texts - {str(text).replace('"', '\\"') for text in translations()._catalog.values()} == set()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("shop")
def test_pages_speak_german(admin_client: Client) -> None:
    with override_settings(LANGUAGE_CODE="de"):
        page = admin_client.get("/admin/once_fenced/overview/").text
    for text in ("Übersicht", "Zuletzt übernommen", "Was einen Menschen braucht"):
        assert text in page
    assert "Taken over" not in page


@pytest.fixture
def admin_client(shop: str) -> Iterator[Client]:
    from django.contrib.auth.models import User

    user = User.objects.create_superuser("sprecherin")
    client = Client()
    client.force_login(user)
    yield client
    user.delete()
