"""A request that is not answered, and what is said of it."""

from __future__ import annotations

import json
from typing import Any

from kvswap_torch.errors import KVSwapError
from kvswap_torch.hf.serving.limits import SHOWN_MAX
from kvswap_torch.hf.serving.troubles import printable

_REASONS = {
    400: "request",
    401: "key",
    403: "host",
    404: "unknown",
    405: "method",
    408: "slow",
    413: "size",
    415: "content_type",
    499: "gone",
    500: "failed",
    503: "busy",
    507: "disk_full",
}


class RefusedError(KVSwapError):
    """A request that is not answered, its HTTP status, and why in a word, for the metrics."""

    def __init__(
        self, status: int, message: str, code: str | None = None, reason: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code = status, code
        self.reason = reason or _REASONS.get(status, str(status))


def shown(value: Any) -> str:
    """What came, short, and of printable characters."""
    if isinstance(value, str):
        text = json.dumps(value[: SHOWN_MAX + 1], ensure_ascii=False)[1:-1]
        return f"'{_cut(text)}'"
    if isinstance(value, list | dict):
        kind = "a list" if isinstance(value, list) else "an object"
        return f"{kind} of {len(value)}"
    return _cut(json.dumps(value))


def _cut(text: str) -> str:
    return printable(text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}...")


def error_reply(message: str, code: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's form."""
    return {"error": {"message": message, "type": "error", "code": code}}
