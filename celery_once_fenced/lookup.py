"""Which key a person means by a text: its digest, what is shown of it, the value as it was passed, or a resource.

Text is for people (rule K3): it may be shortened, escaped, or read alike for several keys.  The digest decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from dataclasses import dataclass

from celery_once_fenced import runtime
from celery_once_fenced.errors import ConfigError, StoreUnavailableError
from celery_once_fenced.stores import LedgerStore
from celery_once_fenced.wording import did_you_mean, safe

__all__ = ["DIGEST", "SHORTENED", "Found", "find", "hint", "look_up"]

DIGEST = re.compile("[0-9a-f]{64}")
SHORTENED = 100
"""Characters of readable key in a slot: a longer key matches by its beginning."""


@dataclass(frozen=True, slots=True)
class Found:
    """A key that somebody knows."""

    digest: str
    """Empty for a fence that is held outside of tasks."""
    text: str
    """As it is shown."""
    resource: str = ""
    """Where it was given as a resource that is held."""


def find(here: runtime.Runtime, key: str) -> Found:
    """What a key given as digest or readable text is.  Raises ``ConfigError`` where nobody knows the text."""
    found = look_up(here, key)
    if found is None:
        raise ConfigError(
            f"no key {key!r} is held or recorded: give the readable key as shown, or its digest"
        )
    return found


def look_up(here: runtime.Runtime, key: str) -> Found | None:
    """The same; None where nobody knows the text.  Also finds a value that is shown escaped, as it was passed."""
    if not isinstance(key, str):
        raise ConfigError(f"a key is given as text, its digest or what is shown of it, not as {key!r}")
    if DIGEST.fullmatch(key):
        return Found(key, key)
    found = (_found(here, text) for text in dict.fromkeys((key, safe(key))))
    return next((one for one in found if one is not None), None)


def hint(here: runtime.Runtime, key: str, scopes: Set[str]) -> str:
    """What may be wrong with a text that nobody knows, as a sentence without its end; empty where nothing is seen.

    ``scopes``: what keys may begin with.
    """
    known = next(_with_scope(here, safe(key), scopes), "")
    if known:
        return f"did you mean {known!r}, which begins with its scope?"
    scope, _, _ = key.partition(":")
    if not scopes or scope in scopes:
        return ""
    return f"no registered task has the scope {scope!r}{did_you_mean(scope, scopes)}"


def _found(here: runtime.Runtime, text: str) -> Found | None:
    digests = sorted({hold.digest for hold in here.leases.holds() if _reads(hold.text, text)})
    if len(digests) > 1:
        raise ConfigError(
            f"{len(digests)} keys read {text!r}: give the digest of one of them: {', '.join(digests)}"
        )
    if digests:
        return Found(digests[0], text)
    return None if here.ledger is None else _found_recorded(here.ledger, text)


def _found_recorded(ledger: LedgerStore, text: str) -> Found | None:
    recorded = ledger.find(text)
    if recorded is not None:
        return Found(recorded.hex(), text)
    fence = ledger.fence(text)
    return None if fence is None else Found(fence.digest.hex() if fence.digest else "", text, text)


def _reads(shown: str, text: str) -> bool:
    return shown == text or (len(shown) >= SHORTENED and text.startswith(shown))


def _with_scope(here: runtime.Runtime, text: str, scopes: Set[str]) -> Iterator[str]:
    """Keys that somebody knows and that read like the text once a scope stands in front."""
    yield from (hold.text for hold in here.leases.holds() if hold.text.endswith(f":{text}"))
    if here.ledger is None:
        return
    try:
        yield from (full for scope in sorted(scopes) if here.ledger.find(full := f"{scope}:{text}"))
    except StoreUnavailableError:  # a hint is no answer
        return
