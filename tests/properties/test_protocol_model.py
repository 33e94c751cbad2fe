"""The protocol, through every interleaving of a small world: no call lost, one body at a time, the key free at the end.

What is explored, and which repeats remain: docs/explanation/protocol.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.properties.protocol_model import Model
from tests.properties.protocol_model_broken import BROKEN, Broken
from tests.properties.protocol_model_search import explore, violation_of
from tests.properties.protocol_model_store import Setup

SPANS = ("until_executed", "until_executing", "while_executing", "until_and_while_executing")
REPLACE = (("until_executed", "replace"), ("until_executing", "replace"))
KEEP_LAST = ("until_and_while_executing", "keep_last")
FIRST, SECOND = frozenset({1}), frozenset({2})


def both(unique: str, on_duplicate: str = "return_existing", **more: Any) -> list[Setup]:
    """Acknowledged late, and early."""
    return [Setup(unique, on_duplicate, late=late, **more) for late in (True, False)]


SETUPS = [
    *[setup for span in SPANS for setup in both(span, calls=3)],
    *[setup for span in SPANS for setup in both(span, calls=2, faults=2)],
    *[setup for span in SPANS for setup in both(span, calls=2, retried=FIRST)],
    *[setup for span in SPANS for setup in both(span, calls=2, awaited=FIRST, failing=FIRST)],
    *[setup for span in SPANS for setup in both(span, calls=2, awaited=SECOND, failing=FIRST)],
    *[setup for span in SPANS for setup in both(span, calls=3, awaited=SECOND, faults=0)],
    *[setup for span in SPANS[:2] for setup in both(span, calls=3, after_get=True)],
    *both(*KEEP_LAST, calls=3),
    *both(*KEEP_LAST, calls=2, retried=FIRST),
    *both(*KEEP_LAST, calls=3, retried=FIRST, faults=0),
    *both(*KEEP_LAST, calls=2, awaited=FIRST),
    *both(*KEEP_LAST, calls=2, awaited=SECOND),
    *[setup for what in REPLACE for setup in both(*what, calls=3, faults=0)],
    *[setup for what in REPLACE for setup in both(*what, calls=2)],
    *both(*REPLACE[0], calls=2, awaited=FIRST),
    *both(*REPLACE[1], calls=2, awaited=SECOND),
    *both(*REPLACE[0], calls=2, retried=FIRST, faults=0),
    *[Setup(*what, late=False, calls=2, retried=FIRST) for what in REPLACE],
    Setup(*REPLACE[0], late=False, calls=2, faults=2),
]
"""A span whose first call asks for a retry under replace has the most states; acknowledged late and with a fault it would
take as long as all others together.
"""


@pytest.mark.parametrize("setup", dict.fromkeys([*SETUPS, *(broken.setup for broken in BROKEN)]), ids=str)
def test_no_state_breaks_a_promise(setup: Setup) -> None:
    explore(Model(setup))


@pytest.mark.parametrize(
    "setup",
    [
        Setup("until_executed", calls=2),
        Setup("until_executing", calls=1, retried=FIRST),
        Setup(*KEEP_LAST, calls=2, late=False, awaited=SECOND),
        Setup(*REPLACE[0], calls=2, late=False),
    ],
    ids=str,
)
def test_steps_that_concern_nobody_else_need_not_be_interleaved(setup: Setup) -> None:
    """All outcomes are found without."""
    whole = Model(setup)
    whole.reduced = False
    assert explore(Model(setup)).ends == explore(whole).ends


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.variant.__name__)
def test_broken_variant_is_found(broken: Broken) -> None:
    assert broken.why in violation_of(broken.model).splitlines()[0]
