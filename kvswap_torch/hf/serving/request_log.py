"""A line for each request: what was asked, and what it took."""

from __future__ import annotations

import logging
import time
from typing import Any

from kvswap_torch.hf.serving.asked import Asked
from kvswap_torch.hf.serving.line import Turn
from kvswap_torch.hf.serving.refusal import RefusedError
from kvswap_torch.hf.serving.troubles import OnceAMinute, printable

logger = logging.getLogger(__name__)
_SHOWN_MAX = 200  # characters of a path or an identity that a client chose


class RequestLog:
    """Logs at level INFO; the record's ``request`` has the numbers by name.

    What was refused before it had its turn costs a client nothing, and is logged once a minute for
    each reason, with how many came in between.
    """

    def __init__(self) -> None:
        self._often = OnceAMinute()

    def answered(self, asked: Asked, status: int, turn: Turn, is_whole: bool) -> None:
        """A request that had its turn; `is_whole`: its client has all of the reply."""
        seconds = time.monotonic() - turn.began
        request: dict[str, Any] = {
            "id": _short(turn.request_id),
            "path": asked.path,
            "status": status,
            "seconds": round(seconds, 4),
            "waited_seconds": round(turn.waited_seconds, 4),
            "first_token_seconds": turn.first_token_seconds,
            "prompt_tokens": turn.prompt_tokens,
            "cached_tokens": turn.cached_tokens,
            "generated_tokens": turn.generated_tokens,
            "streamed": asked.is_streamed,
            "hung_up": not is_whole,
            "owner": turn.owner,
        }
        logger.info(
            "%s %d: %d tokens, %d of them cached, and %d more in %.2f s%s", asked.path, status,
            turn.prompt_tokens, turn.cached_tokens, turn.generated_tokens, seconds,
            "" if is_whole else ", the client hung up", extra={"request": request},
        )  # fmt: skip

    def refused(self, path: str, error: RefusedError) -> None:
        """A request that had none."""
        held = self._often.held((error.status, error.reason))
        if held is None:
            return
        request = {
            "path": _short(path),
            "status": error.status,
            "reason": error.reason,
            "more_like_it": held,
        }
        more = f" (and {held} more like it)" if held else ""
        logger.info(
            "%s %d: refused, %s%s", _short(path), error.status, printable(str(error)), more,
            extra={"request": request},
        )  # fmt: skip


def _short(text: str) -> str:
    return printable(text, _SHOWN_MAX)
