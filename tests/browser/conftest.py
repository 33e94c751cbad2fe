"""A headless Chromium, and the admin of the example project for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, Playwright, sync_playwright

from celery_once_fenced import runtime
from example_project.servers import Servers
from tests.browser.stage import PASSWORD, PERMISSIONS, Shop, bad_night, serving

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = (
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
IMAGES = Path(__file__).parents[2] / "docs" / "images"
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1360, "height": 900}
NARROW = {"width": 1300, "height": 900}
"""A desk with the filters beside the list, and not much room for the rest."""


def installed() -> str:
    """Debian's Chromium; as root it is installed where it is missing."""
    if not shutil.which(CHROMIUM) and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "update", "--quiet"], check=True)
        install = ["apt-get", "install", "--yes", "--no-install-recommends", "chromium", "fonts-dejavu-core"]
        subprocess.run(install, check=True, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})
    return CHROMIUM


@pytest.fixture(scope="session")
def playwright() -> Iterator[Playwright]:
    # Playwright's loop runs in this thread while the tests do; Django would take them for asynchronous code.
    before = os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE")
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"
    with sync_playwright() as started:
        yield started
    if before is None:
        del os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"]


@pytest.fixture(scope="session")
def browser(playwright: Playwright) -> Iterator[Browser]:
    opened = playwright.chromium.launch(executable_path=installed(), args=list(ARGUMENTS))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def served(servers: Servers, shop: str) -> Iterator[Shop]:
    """The admin with its three users, for a module."""
    patched = pytest.MonkeyPatch()
    with serving(servers.redis_url, shop, f"t{uuid.uuid4().hex[:12]}") as made:
        here = runtime.runtime_of(made.app)
        patched.setattr(runtime, "current", lambda: here)
        made.user("ada", superuser=True)
        made.user("viewer", *PERMISSIONS)
        made.user("nobody")
        yield made
        made.empty()
        patched.undo()


@pytest.fixture
def night(served: Shop) -> Shop:
    """The bad night, for a test that changes it."""
    served.empty()
    bad_night(served)
    served.untouched = False
    return served


@pytest.fixture
def calm(served: Shop) -> Shop:
    """The bad night, for tests that only look."""
    if not served.untouched:
        served.empty()
        bad_night(served)
        served.untouched = True
    return served


class Visitor:
    """A browser with a user in it; ``problems`` is what its console complained of."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.problems: list[str] = []
        page.set_default_timeout(60_000)  # a busy machine must not fail them
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("dialog", lambda dialog: self.problems.append(f"dialog: {dialog.message}"))

    def _note(self, message: Any) -> None:
        # The favicon is no part of the admin.
        if message.type in ("error", "warning") and "favicon" not in str(message.location):
            self.problems.append(message.text)

    def log_in(self, name: str) -> Visitor:
        self.page.goto(f"{self.url}/admin/login/?next=/admin/")
        self.page.fill("#id_username", name)
        self.page.fill("#id_password", PASSWORD)
        self.follow(self.page.locator("input[type=submit]"))
        return self

    def open(self, page: str = "", **query: str) -> Page:
        """A page of the plugin, by its model's name and what follows it."""
        model, _, rest = page.partition("/")
        address = f"{self.url}/admin/once_fenced/{model}/{rest}"
        self.page.goto(address + ("?" + "&".join(f"{k}={v}" for k, v in query.items()) if query else ""))
        return self.page

    def follow(self, locator: Locator) -> Page:
        """Click on what leads to another page, and be there."""
        with self.page.expect_navigation():
            locator.click()
        return self.page

    def press(self, key: str) -> Page:
        """The same by keyboard."""
        with self.page.expect_navigation():
            self.page.keyboard.press(key)
        return self.page

    def keep(self, name: str, **options: Any) -> None:
        """Keep a screenshot with the documentation, where it was asked for: every run would change a pixel."""
        if os.environ.get("ONCE_FENCED_SCREENSHOTS"):
            IMAGES.mkdir(exist_ok=True)
            self.page.screenshot(path=IMAGES / f"{name}.png", **options)


Visit = Callable[..., Visitor]


@pytest.fixture
def visit(browser: Browser, served: Shop) -> Iterator[Visit]:
    """``visit("ada")``: a browser in which that user is logged in; nothing may have gone wrong in it at the end."""
    visitors: list[Visitor] = []

    def begin(name: str, viewport: dict[str, int] = DESK, **options: Any) -> Visitor:
        known: Any = served.sessions.get(name)
        context = browser.new_context(viewport=viewport, storage_state=known, **options)  # type: ignore[arg-type]
        visitor = Visitor(context.new_page(), served.url)
        visitors.append(visitor)
        if known is None:
            visitor.log_in(name)
            served.sessions[name] = context.storage_state()
        return visitor

    yield begin
    for visitor in visitors:
        visitor.page.context.close()
        assert visitor.problems == []
