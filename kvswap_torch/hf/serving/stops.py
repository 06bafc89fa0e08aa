"""An answer ends before its stop text, as OpenAI's do; transformers' end with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from kvswap_torch.hf.serving.line import Turn


def end_before(text: str, stops: Sequence[str]) -> str:
    """What a text is before the first of the stop texts; all of it where it has none."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def end_reply(content: dict[str, Any], turn: Turn) -> None:
    """The choices of a reply that is no stream, each in place."""
    for choice in content.get("choices", ()):
        for said in (choice, choice.get("message", {})):
            for field in ("text", "content", "reasoning_content"):
                if said.get(field):
                    told = end_before(said[field], turn.stops)
                    turn.has_stopped |= len(told) < len(said[field])
                    said[field] = told


def tell_why(content: dict[str, Any], turn: Turn) -> None:
    """An answer that might have gone on has ended by its length; all others have stopped."""
    for choice in content.get("choices", ()):
        if choice.get("finish_reason") in ("length", "stop"):
            is_cut = turn.is_cut and not turn.has_stopped
            choice["finish_reason"] = "length" if is_cut else "stop"


class EndedQueue:
    """What a stream takes its pieces from: of text, nothing from a stop text on.

    Takes the place of an `asyncio.Queue`. The end of a piece that may begin a stop text is held
    back until the next one tells.

    Parameters
    ----------
    pieces
        Text, each kind of which (answer, reasoning) is a type of its own, and what is no text: that
        and the next kind end a text.
    turn
        The request's: which texts stop it, and whether one has.
    """

    def __init__(self, pieces: Any, turn: Turn) -> None:
        self._pieces, self._turn = pieces, turn
        self._ready: deque[Any] = deque()
        self._held: Any = ""

    async def get(self) -> Any:
        """The next piece."""
        while not self._ready:
            self._take(await self._pieces.get())
        return self._ready.popleft()

    def get_nowait(self) -> Any:
        """Raises `asyncio.QueueEmpty` where there is none yet."""
        while not self._ready:
            self._take(self._pieces.get_nowait())
        return self._ready.popleft()

    def _take(self, piece: Any) -> None:
        kind = type(piece)
        if kind is not type(self._held):
            self._give(self._held)
            self._held = kind() if isinstance(piece, str) else ""
        if not isinstance(piece, str):
            self._ready.append(piece)
        elif not self._turn.has_stopped:
            text = self._held + piece
            told = end_before(text, self._turn.stops)
            self._turn.has_stopped = len(told) < len(text)
            kept = 0 if self._turn.has_stopped else self._begun(told)
            self._give(kind(told[: len(told) - kept]))
            self._held = kind(told[len(told) - kept :])

    def _give(self, text: Any) -> None:
        if text:
            self._ready.append(text)

    def _begun(self, text: str) -> int:
        """How many of the last characters may begin a stop text."""
        longest = max(map(len, self._turn.stops)) - 1
        return next(
            (
                count
                for count in range(min(longest, len(text)), 0, -1)
                if any(stop.startswith(text[-count:]) for stop in self._turn.stops)
            ),
            0,
        )
