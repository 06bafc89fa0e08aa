"""Clients: how many there are at once, and how long one may take to say what it wants."""

from __future__ import annotations

import asyncio
from typing import Any

from kvswap_torch.hf.serving import limits

_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
    b"connection: close\r\n\r\n"
    b'{"error": {"message": "as many clients are connected as may", "type": "error", "code": null}}'
)


class Connections:
    """All that are open, those that have asked nothing yet beside.

    Beyond `most`, the one that has said nothing for the longest time makes room; where all have a
    request, the new one is sent away. Of one event loop.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: set[Any] = set()
        self._silent: dict[Any, asyncio.TimerHandle] = {}  # the oldest first
        self.refused = 0

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, client: Any) -> bool:
        """Whether there is a place for it."""
        if len(self._open) >= self._most:
            oldest = next(iter(self._silent), None)
            if oldest is None:
                self.refused += 1
                return False
            oldest.transport.abort()
            self.closed(oldest)
        self._open.add(client)
        self.silent(client)
        return True

    def silent(self, client: Any) -> None:
        """It has no request now, and so long for the next one's head."""
        self.speaks(client)
        loop = asyncio.get_running_loop()
        self._silent[client] = loop.call_later(limits.HEAD_SECONDS, self._end, client)

    def speaks(self, client: Any) -> None:
        """Its request is here."""
        timer = self._silent.pop(client, None)
        if timer is not None:
            timer.cancel()

    def closed(self, client: Any) -> None:
        """It is gone."""
        self.speaks(client)
        self._open.discard(client)

    def _end(self, client: Any) -> None:
        self.speaks(client)
        client.transport.close()


def protocol(connections: Connections) -> type:
    """A class for uvicorn's ``http``."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Bounded(H11Protocol):
        """HTTP/1.1 that `Connections` counts."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if not connections.opened(self):
                transport.write(_FULL)
                transport.close()

        def handle_events(self) -> None:
            super().handle_events()
            if self.cycle is not None and not self.cycle.response_complete:
                connections.speaks(self)

        def on_response_complete(self) -> None:
            if not self.transport.is_closing():
                connections.silent(self)
            super().on_response_complete()  # which may find the next request

        def connection_lost(self, exc: Exception | None) -> None:
            connections.closed(self)
            super().connection_lost(exc)

    return Bounded
