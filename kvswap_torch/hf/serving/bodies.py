"""Bodies of requests: how much is read, for how long, and what JSON they may be."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvswap_torch.hf.serving import limits
from kvswap_torch.hf.serving.limits import Limits
from kvswap_torch.hf.serving.refusal import RefusedError, shown


class Bodies:
    """Reads them, and holds that all that are read or wait have a place together.

    Of one event loop.
    """

    def __init__(self, bounds: Limits) -> None:
        self._bounds = bounds
        self.bytes = 0  # of all that are read or wait

    @contextmanager
    def read(self, headers: dict[bytes, bytes]) -> Iterator[Callable]:
        """What reads the body, and gives its place back afterwards.

        Raises
        ------
        RefusedError
            It says, or is, larger than may be, or pauses, or there is no place now.
        """
        body = _Body(self, self._bounds.body_bytes, declared_bytes(headers))
        try:
            body.check(body.declared)
            yield body.read
        finally:
            self.bytes -= body.taken


class _Body:
    def __init__(self, bodies: Bodies, most: int, declared: int) -> None:
        self._bodies, self._most = bodies, most
        self.declared, self.taken = declared, 0

    def check(self, size: int) -> None:
        """Whether a body may be as large."""
        if size > self._most:
            raise RefusedError(
                413, f"the body must have at most {self._most} bytes, which is what the longest "
                f"context may need, got {size} or more"
            )  # fmt: skip

    def take(self, size: int) -> None:
        """A place for so many bytes in all."""
        self.check(size)
        others = self._bodies.bytes - self.taken
        if others and others + size > limits.BODIES_BYTES:
            raise RefusedError(
                503, "other requests take all the memory there is for bodies: try again later",
                reason="bodies",
            )  # fmt: skip
        self._bodies.bytes += size - self.taken
        self.taken = size

    async def read(self, receive: Callable) -> bytes:
        body, more = bytearray(), True
        try:
            async with asyncio.timeout(limits.BODY_SECONDS):
                while more:
                    message = await asyncio.wait_for(receive(), limits.PATIENCE_SECONDS)
                    if message["type"] == "http.disconnect":
                        raise RefusedError(400, "the client hung up", reason="gone")
                    body += message.get("body", b"")
                    self.take(len(body))
                    more = message.get("more_body", False)
        except TimeoutError:
            raise RefusedError(
                408, f"the body must come within {limits.BODY_SECONDS:g} s, without long pauses"
            ) from None
        return bytes(body)


def declared_bytes(headers: dict[bytes, bytes]) -> int:
    """What ``Content-Length`` says; 0 without one."""
    given = headers.get(b"content-length", b"0")
    return int(given) if given.isdigit() and len(given) < 20 else 0


def parsed(text: bytes, must: str, values_max: int) -> Any:
    """What JSON stands for.

    What it would take of memory, and of those who handle it by recursion, is counted before it is
    read: a list of empty lists takes twenty times its text.

    Raises
    ------
    RefusedError
        It is none, or too deep, or of too many values.
    """
    _count(text, must, values_max)
    try:
        return json.loads(text.decode("utf-8"), parse_constant=_no_number, parse_float=_number)
    except RecursionError as error:
        raise RefusedError(400, f"{must} of at most {limits.NESTING_MAX} levels") from error
    except (TypeError, ValueError) as error:
        raise RefusedError(400, f"{must}: {error}") from error


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _number(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{shown(digits)} is larger than any number here, infinity")
    return value


def _count(text: bytes, must: str, values_max: int) -> None:
    """Values and levels, by what stands outside of quotes."""
    plain = text.replace(rb"\\", b"").replace(rb"\"", b"")  # what is left of quotes ends texts
    if plain.count(b'"') > 4 * values_max:
        raise RefusedError(400, f"{must} of at most {values_max} values", reason="values")
    outside = b"".join(plain.split(b'"')[::2])
    if sum(map(outside.count, (b",", b"[", b"{"))) > values_max:
        raise RefusedError(400, f"{must} of at most {values_max} values", reason="values")
    level = 0
    for each in outside.translate(None, delete=_NOT_BRACKETS):
        level += 1 if each in b"[{" else -1
        if level > limits.NESTING_MAX:
            raise RefusedError(400, f"{must} of at most {limits.NESTING_MAX} levels")


_NOT_BRACKETS = bytes(each for each in range(256) if each not in b"[]{}")
