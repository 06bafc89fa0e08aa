"""What a request passes before the model: who may ask, what may be asked, and the line."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Callable
from typing import Any

from kvswap_torch.hf.serving import limits, page
from kvswap_torch.hf.serving.access import Access
from kvswap_torch.hf.serving.asked import Asked, read_request
from kvswap_torch.hf.serving.bodies import Bodies
from kvswap_torch.hf.serving.counts import Counts
from kvswap_torch.hf.serving.fields import PATHS
from kvswap_torch.hf.serving.health import Health
from kvswap_torch.hf.serving.limits import Limits
from kvswap_torch.hf.serving.line import Line, LineClosedError, LineFullError, Turn
from kvswap_torch.hf.serving.refusal import RefusedError, error_reply, shown
from kvswap_torch.hf.serving.request_log import RequestLog

logger = logging.getLogger(__name__)
_CLOSE = (b"connection", b"close")


class Front:
    """An ASGI application around what generates.

    Parameters
    ----------
    answers
        `check(asked)`, and `answer(asked, turn, request_id)`, which gives an ASGI response.
    name
        The model's.
    access
        Who may ask.
    health
        Whether the server can answer.
    bounds
        What one client may take.
    has_page
        Whether there is a page at ``/``.
    """

    def __init__(
        self,
        answers: Any,
        name: str,
        line: Line,
        counts: Counts,
        access: Access,
        health: Health,
        bounds: Limits,
        has_page: bool = False,
    ) -> None:
        self._answers = answers
        self.name = name
        self._line = line
        self._counts = counts
        self._access = access
        self._health = health
        self._bounds = bounds
        self._bodies = Bodies(bounds)
        self._log = RequestLog()
        self._has_page = has_page
        self._paths = (*PATHS, page.INGEST) if has_page else PATHS

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"serve: there is nothing but HTTP here, got {scope['type']}")
        has_begun = False

        async def begin_and_send(message: dict) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._serve(scope, receive, begin_and_send)
        except RefusedError as error:
            await self._refuse(scope, receive, send, error)
        except Exception:
            if has_begun:
                raise  # nothing is left to say but the connection's end
            logger.exception("serve: a request failed")
            said = RefusedError(500, "the server failed with this request; its log has the reason")
            await self._refuse(scope, receive, send, said)

    async def _refuse(
        self, scope: dict, receive: Callable, send: Callable, error: RefusedError
    ) -> None:
        self._counts.add("refusals", reason=error.reason)
        self._log.refused(scope["path"], error)
        if scope["path"] in self._paths:
            self._counts.add("requests", status=str(error.status))
        await _refuse(receive, send, error)

    async def _serve(self, scope: dict, receive: Callable, send: Callable) -> None:
        method, path = scope["method"], scope["path"]
        headers = {name.lower(): value for name, value in scope["headers"]}
        self._access.check_host(headers)
        if method == "GET" and path == "/health":
            return await _reply(send, 200, {"status": "ok", "model": self.name})
        if method == "GET" and path == "/ready":
            reasons = await self._health.reasons()
            status = "not ready" if reasons else "ready"
            said = {"status": status, "model": self.name, "reasons": reasons}
            return await _reply(send, 503 if reasons else 200, said)
        if method == "GET" and self._has_page and path in page.FILES:
            text, kind = page.file_of(path)
            return await _reply(send, 200, text, kind, page.HEADERS)
        owner = self._access.owner(headers)
        if method == "GET" and self._has_page and path == page.DOCUMENTS:
            listed = await asyncio.to_thread(self._answers.documents.listed, owner)
            return await _reply(send, 200, listed)
        if method == "GET" and self._has_page and path.startswith(f"{page.DOCUMENTS}/"):
            said = await asyncio.to_thread(self._answers.documents.text, owner, path)
            return await _reply(send, 200, said)
        if method == "GET" and path == "/metrics":
            self._health.measure()
            return await _reply(send, 200, self._counts.text(), b"text/plain; version=0.0.4")
        if method == "GET" and path.startswith("/v1/models"):
            return await _reply(send, 200, self._models(path))
        if path not in self._paths:
            said = f"there is no {shown(path)[1:-1]} here; there are {', '.join(self._paths)}"
            raise RefusedError(404, said)
        if method != "POST":
            raise RefusedError(405, f"{path} must be asked with POST, got {shown(method)}")
        if not headers.get(b"content-type", b"").lower().startswith(b"application/json"):
            raise RefusedError(415, "the content type must be application/json")
        with _as_refusals(), self._bodies.read(headers) as read:
            self._line.check()  # nothing is read for those who would be sent away
            body = await read(receive)
            if path == page.INGEST:
                asked = page.read_document(body, self._bounds)
            else:
                asked = read_request(path, body, self.name, self._bounds)
            self._answers.check(asked)
            await self._in_turn(scope, receive, send, asked, Turn(owner, self._line.ending))

    def _models(self, path: str) -> dict[str, Any]:
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": "local"}
        if path == "/v1/models":
            return {"object": "list", "data": [model]}
        if path != f"/v1/models/{self.name}":
            said = shown(path.removeprefix("/v1/models/"))
            raise RefusedError(404, f"the model is {self.name!r}, got {said}", "model_not_found")
        return model

    async def _in_turn(
        self, scope: dict, receive: Callable, send: Callable, asked: Asked, turn: Turn
    ) -> None:
        began = time.monotonic()
        entering = asyncio.ensure_future(self._line.enter())
        hanging_up = asyncio.ensure_future(_hang_up(receive, turn))
        try:
            await asyncio.wait({entering, hanging_up}, return_when=asyncio.FIRST_COMPLETED)
            if not entering.done():
                self._counts.add("gone")
                return
            entering.result()
            turn.waited_seconds = time.monotonic() - began
            self._counts.add("wait_seconds", turn.waited_seconds)
            await self._answer(scope, hanging_up, send, asked, turn)
        finally:
            turn.gone.set()  # where the server ends at once, nobody else says it
            hanging_up.cancel()
            if not entering.cancel() and entering.exception() is None:
                self._line.leave()

    async def _answer(
        self, scope: dict, hanging_up: asyncio.Future, send: Callable, asked: Asked, turn: Turn
    ) -> None:
        is_whole = is_stalled = False
        status, request_id = 0, _request_id(scope)
        turn.request_id = request_id

        async def receive() -> dict:
            await asyncio.wait({hanging_up})
            return {"type": "http.disconnect"}

        async def count_and_send(message: dict) -> None:
            nonlocal is_whole, is_stalled, status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._counts.add("requests", status=str(message["status"]))
                message["headers"] = [*message["headers"], *_more(asked, request_id)]
            elif not message.get("more_body"):
                is_whole = True
            try:
                await asyncio.wait_for(send(message), limits.PATIENCE_SECONDS)
            except TimeoutError:
                is_stalled = True  # others wait
                turn.gone.set()
                raise ConnectionError("the client takes nothing") from None

        try:
            response = await self._answers.answer(asked, turn, request_id)
            await response(scope, receive, count_and_send)
        except Exception as error:
            if isinstance(error, RefusedError) or not is_stalled:
                raise
        finally:
            if turn.gone.is_set() and not is_whole:
                self._counts.add("gone")
            if status:  # else it is refused, or nobody heard of it
                self._log.answered(asked, status, turn, is_whole)
            self._counts.observe("request_seconds", time.monotonic() - turn.began)


class _as_refusals:
    """What the line says becomes a reply."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, LineFullError):
            raise RefusedError(503, str(error), reason="line_full") from error
        if isinstance(error, LineClosedError):
            raise RefusedError(503, str(error), reason="ending") from error


def _request_id(scope: dict) -> str:
    given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    is_one = given.isascii() and given.isprintable() and len(given) <= limits.REQUEST_ID_MAX
    return given if given and is_one else str(uuid.uuid4())


def _more(asked: Asked, request_id: str) -> list[tuple[bytes, bytes]]:
    ignored = [(b"x-kvswap-ignored", ", ".join(asked.ignored).encode())] if asked.ignored else []
    return [(b"x-request-id", request_id.encode()), *ignored]


async def _hang_up(receive: Callable, turn: Turn) -> None:
    """Returns when the client has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass
    turn.gone.set()


async def _refuse(receive: Callable, send: Callable, error: RefusedError) -> None:
    """Replies; what a client still sends is read for a moment, or the reply would be lost to it."""
    more = [(b"retry-after", b"1")] if error.status == 503 else []
    said = error_reply(str(error), error.code)
    if error.status not in (408, 413) and error.reason != "bodies":
        return await _reply(send, error.status, said, more=more)
    await _reply(send, error.status, said, more=[*more, _CLOSE], is_whole=False)
    try:
        left = limits.LINGER_BYTES
        async with asyncio.timeout(limits.LINGER_SECONDS):
            while left > 0 and (message := await receive()).get("more_body"):
                left -= len(message.get("body", b""))
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b""})


async def _reply(
    send: Callable,
    status: int,
    said: Any,
    kind: bytes = b"application/json",
    more: Any = (),
    is_whole: bool = True,
) -> None:
    body = (said if isinstance(said, str) else json.dumps(said)).encode()
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": not is_whole})
