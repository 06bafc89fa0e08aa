"""The line in which requests wait: first come, first served, one at a time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from contextvars import ContextVar
from typing import Any

from kvswap_torch.errors import KVSwapError


class LineFullError(KVSwapError):
    """As many wait as may."""


class LineClosedError(KVSwapError):
    """The server ends: nobody who waits is answered."""


class Row:
    """One answer to a request.

    `has_stopped`, when one of `stops` has ended it; `is_cut`, when the longest length or time has;
    `is_over`, when it has no further token.
    """

    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        self.stops = stops
        self.has_stopped = self.is_cut = self.is_over = False


class Turn(Row):
    """One request's: what its parts know of one another. It is its own first answer.

    `gone` is set when its client hangs up; `ending`, when the server ends. No answer takes longer
    than until `ends`, by the monotonic clock. Caches are those of `owner` alone.
    """

    def __init__(self, owner: str = "", ending: threading.Event | None = None) -> None:
        super().__init__()
        self.owner = owner
        self.gone = threading.Event()
        self.ending = ending or threading.Event()
        self.ends = float("inf")
        self.rows: list[Row] = [self]
        self.tells_usage = False
        self.request_id = ""
        self.began = self.newest = time.monotonic()
        self.waited_seconds = 0.0
        self.first_token_seconds: float | None = None
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0

    @property
    def is_late(self) -> bool:
        """Whether its time is over, or the server's."""
        return self.ending.is_set() or time.monotonic() >= self.ends


# Of the request that runs in this context, and what it asks.
CURRENT: ContextVar[tuple[Turn, Any]] = ContextVar("kvswap_turn")


class Line:
    """Who may run now. Of one event loop.

    Parameters
    ----------
    waiting_max
        How many may wait beside the one that runs.
    """

    def __init__(self, waiting_max: int) -> None:
        self._waiting_max = waiting_max
        self._waiting: deque[asyncio.Future] = deque()
        self._is_taken = False
        self._is_closed = False
        self.ending = threading.Event()  # the one that runs ends with its step

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        return self._is_taken and len(self._waiting) >= self._waiting_max

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def running(self) -> int:
        return int(self._is_taken)

    def check(self) -> None:
        """Whether one more may wait.

        Raises
        ------
        LineFullError, LineClosedError
            It may not.
        """
        if self._is_closed:
            raise LineClosedError("serve: the server ends")
        if self.is_full:
            raise LineFullError(
                f"serve: at most {self._waiting_max} requests may wait (--queue), and as many do; "
                "try again later"
            )

    async def enter(self) -> None:
        """Returns when it is the caller's turn, which `leave` ends.

        Raises
        ------
        LineFullError, LineClosedError
            It will not be.
        """
        self.check()
        if not self._is_taken:
            self._is_taken = True
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.leave()  # its turn came while its client left
            elif place in self._waiting:
                self._waiting.remove(place)
            raise

    def leave(self) -> None:
        """The turn is over; the next one's begins."""
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                return
        self._is_taken = False

    def close(self) -> None:
        """Sends away all who wait; the one that runs ends with its step."""
        self._is_closed = True
        self.ending.set()
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_exception(LineClosedError("serve: the server ends"))
