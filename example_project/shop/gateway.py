"""The shop's way to the payment gateway at ``SHOP_GATEWAY_URL``."""

from __future__ import annotations

import json
import os
import urllib.request
from typing import Any

TIMEOUT = 10
"""Seconds."""


def charge(order_id: int, amount: int, *, idempotency_key: str) -> dict[str, Any]:
    """Charge an amount and return the receipt; under a key that was charged before, the receipt of then.

    Raises ``OSError`` when the gateway cannot be reached or does not answer: then nobody knows.
    """
    request = urllib.request.Request(
        f"{os.environ['SHOP_GATEWAY_URL']}/charges",
        json.dumps({"order": order_id, "amount": amount}).encode(),
        {"Idempotency-Key": idempotency_key},
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        receipt: dict[str, Any] = json.load(answer)
    return receipt
