"""While nothing is asked, saved caches are read again: damage is found before it matters."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvswap_torch.errors import CorruptionError
from kvswap_torch.hf.serving import limits
from kvswap_torch.hf.serving.counts import Counts
from kvswap_torch.hf.serving.line import Line
from kvswap_torch.hf.serving.store import CacheStore
from kvswap_torch.hf.serving.troubles import printable
from kvswap_torch.saved_scrub import Checked, check

logger = logging.getLogger(__name__)


class IdleCheck:
    """Reads one saved cache each `limits.CHECK_SECONDS`, if no request runs or waits.

    A damaged one is moved aside, or, while somebody has it open, is not used any more. One is read
    on a thread of its own, which a server that ends does not wait for: `is_reading`.

    Parameters
    ----------
    submit
        Calls a function on the thread that uses the store; an awaitable.
    """

    def __init__(
        self, line: Line, store: CacheStore, counts: Counts, submit: Callable[..., Any]
    ) -> None:
        self._line, self._store, self._counts, self._submit = line, store, counts, submit
        self._last = Path()
        self._thread: threading.Thread | None = None

    @property
    def is_reading(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(limits.CHECK_SECONDS)
            if self._line.running or self._line.waiting:
                continue
            path = await self._submit(self._next)
            if path is not None:
                await self._check(path)

    def _next(self) -> Path | None:
        """In the order of their names, the first after the last."""
        self._store.refresh()
        paths = self._store.paths()
        self._last = next((path for path in paths if path > self._last), min(paths, default=Path()))
        return self._last if paths else None

    async def _check(self, path: Path) -> None:
        found = await self._read(path)
        if found.failure == "passing":
            return  # or it is gone meanwhile
        self._counts.add("verified", found="damaged" if found.is_damaged else "whole")
        if not found.is_damaged:
            return
        where = f"; moved to {found.moved_to.name}" if found.moved_to else ""
        logger.warning("serve: %s", printable(f"{path} is damaged{where}: {found.error}"))
        error = CorruptionError(found.error)
        await self._submit(self._store.leave_out, path, error)

    async def _read(self, path: Path) -> Checked:
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Checked] = loop.create_future()

        def tell(found: Checked) -> None:
            if not result.done():
                result.set_result(found)

        def read() -> None:
            try:
                found = check(path, move=True)
            except Exception as error:
                found = Checked(path, None, "passing", repr(error))
            if not loop.is_closed():
                loop.call_soon_threadsafe(tell, found)

        self._thread = threading.Thread(target=read, name="idle check", daemon=True)
        self._thread.start()
        return await result
