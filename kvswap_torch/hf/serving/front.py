"""What a request passes before the model: who may ask, what may be asked, and the line."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvswap_torch.errors import KVSwapError
from kvswap_torch.hf.serving.counts import Counts
from kvswap_torch.hf.serving.line import CURRENT, Line, LineClosedError, LineFullError, Turn

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
BODY_BYTES_MAX = 64 << 20
NESTING_MAX = 100  # levels of a request's JSON
PATIENCE_SECONDS = 60.0  # for a client that sends or takes nothing, while others wait
_TEXTS = ("text", "input_text", "output_text", "refusal")
# Of transformers' generation_config: each has a cache, or sequences, of its own, or begins again
# with the whole prompt.
ALONE: dict[str, Any] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "use_cache": True,
    "cache_implementation": None,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "use_mtp": None,
}
# Of a request: what transformers' server would take, and answer as if it were not there.
_ONLY: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
}
# Of chat_template_kwargs: these are no template's own.
_NO_TEMPLATES = (
    *("chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
    *("return_dict", "tokenizer_kwargs", "processor_kwargs"),
)


class RefusedError(KVSwapError):
    """A request that is not answered, and its HTTP status."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Front:
    """An ASGI application around the one that generates.

    Parameters
    ----------
    app
        What answers a request of `PATHS`, `CURRENT` being set.
    name
        The model's.
    keys
        Who has one of them may ask; none: anybody who reaches the server.
    hosts
        What requests may call the server; none: anything. A page of another site that a browser on
        this machine shows could otherwise ask a server that listens on localhost.
    """

    def __init__(
        self,
        app: Callable,
        name: str,
        line: Line,
        counts: Counts,
        keys: Sequence[str] = (),
        hosts: Sequence[str] = (),
    ) -> None:
        self._app = app
        self.name = name
        self._line = line
        self._counts = counts
        self._keys = [key.encode() for key in keys]
        self._hosts = hosts

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            await self._serve(scope, receive, send)
        except RefusedError as error:
            if scope["path"] in PATHS:
                self._counts.add("requests", label=_status(error.status))
            await _reply(send, error.status, json.dumps(error_reply(str(error), error.code)))

    async def _serve(self, scope: dict, receive: Callable, send: Callable) -> None:
        method, path = scope["method"], scope["path"]
        headers = {name.lower(): value for name, value in scope["headers"]}
        self._check_host(headers)
        if (method, path) == ("GET", "/health"):
            return await _reply(send, 200, json.dumps({"status": "ok", "model": self.name}))
        self._check_key(headers)
        if (method, path) == ("GET", "/metrics"):
            self._counts.set("waiting", self._line.waiting)
            self._counts.set("running", self._line.running)
            return await _reply(send, 200, self._counts.text(), b"text/plain; version=0.0.4")
        if (method, path) == ("GET", "/v1/models"):
            model = {"id": self.name, "object": "model", "created": 0, "owned_by": "local"}
            return await _reply(send, 200, json.dumps({"object": "list", "data": [model]}))
        if path not in PATHS:
            raise RefusedError(404, f"there is no {path} here; there are {', '.join(PATHS)}")
        if method != "POST":
            raise RefusedError(405, f"{path} must be asked with POST, got {method}")
        if not headers.get(b"content-type", b"").lower().startswith(b"application/json"):
            raise RefusedError(415, "the content type must be application/json")
        body = await _body(receive)
        check_request(body, self.name)
        await self._in_turn(scope, receive, send, body)

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        host = headers.get(b"host", b"").decode("latin-1")
        host = host[: host.rfind("]") + 1] if host.startswith("[") else host.split(":")[0]
        if self._hosts and host not in self._hosts:
            raise RefusedError(403, f"the server is {' or '.join(self._hosts)}, got {host!r}")

    def _check_key(self, headers: dict[bytes, bytes]) -> None:
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        if matches and not any(matches):
            raise RefusedError(401, "the API key must be one of the server's", "invalid_api_key")

    async def _in_turn(self, scope: dict, receive: Callable, send: Callable, body: bytes) -> None:
        turn, began = Turn(), time.monotonic()
        entering = asyncio.ensure_future(self._line.enter())
        hanging_up = asyncio.ensure_future(_hang_up(receive, turn))
        try:
            await asyncio.wait({entering, hanging_up}, return_when=asyncio.FIRST_COMPLETED)
            if not entering.done():
                self._counts.add("gone")
                return
            entering.result()
            self._counts.add("wait_seconds", time.monotonic() - began)
            await self._answer(scope, hanging_up, send, body, turn)
        except (LineFullError, LineClosedError) as error:
            raise RefusedError(503, str(error)) from error
        finally:
            turn.gone.set()  # where the server ends at once, nobody else says it
            hanging_up.cancel()
            if not entering.cancel() and entering.exception() is None:
                self._line.leave()

    async def _answer(
        self, scope: dict, hanging_up: asyncio.Future, send: Callable, body: bytes, turn: Turn
    ) -> None:
        bodies = [{"type": "http.request", "body": body, "more_body": False}]
        is_whole = is_stalled = False

        async def receive() -> dict:
            if bodies:
                return bodies.pop()
            await asyncio.wait({hanging_up})
            return {"type": "http.disconnect"}

        async def count_and_send(message: dict) -> None:
            nonlocal is_whole, is_stalled
            if message["type"] == "http.response.start":
                self._counts.add("requests", label=_status(message["status"]))
            elif not message.get("more_body"):
                is_whole = True
            try:
                await asyncio.wait_for(send(message), PATIENCE_SECONDS)
            except TimeoutError:
                is_stalled = True  # others wait
                turn.gone.set()
                raise ConnectionError("the client takes nothing") from None

        token = CURRENT.set(turn)
        try:
            await self._app(scope, receive, count_and_send)
        except Exception:
            if not is_stalled:
                raise
        finally:
            CURRENT.reset(token)
            if turn.gone.is_set() and not is_whole:
                self._counts.add("gone")


def error_reply(message: str, code: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's form."""
    return {"error": {"message": message, "type": "error", "code": code}}


def check_request(body: bytes, name: str) -> None:
    """What every request must be, before it waits.

    Raises
    ------
    RefusedError
        It is not.
    """
    request = _parsed(body, "the body must be JSON")
    if not isinstance(request, dict):
        raise RefusedError(400, f"the body must be a JSON object, got {type(request).__name__}")
    asked = request.get("model", name)
    if asked != name:
        raise RefusedError(404, f"the model must be {name!r}, got {asked!r}", "model_not_found")
    for field, only in _ONLY.items():
        if request.get(field) is not None and request[field] not in only:
            must = f"be {' or '.join(map(json.dumps, only))}" if only else "be left out"
            raise RefusedError(400, f"{field} must {must}: this server has nothing else")
    _check_stop(request.get("stop"))
    _check_template(request.get("chat_template_kwargs"))
    if request.get("generation_config") is not None:
        _check_generation(request["generation_config"])
    for field in ("messages", "input"):
        if field in request and not isinstance(request[field], str):
            _check_messages(request[field], field)
    if "messages" in request and isinstance(request["messages"], str):
        raise RefusedError(400, "messages must be a list of messages, got a text")


def _parsed(text: Any, must: str) -> Any:
    """What JSON stands for, as deep as those who handle it by recursion can take."""
    try:
        value = json.loads(text)
    except (TypeError, ValueError) as error:
        raise RefusedError(400, f"{must}: {error}") from error
    except RecursionError as error:
        raise RefusedError(400, f"{must} of at most {NESTING_MAX} levels") from error
    level, depth = [value], 0
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        if depth > NESTING_MAX:
            raise RefusedError(400, f"{must} of at most {NESTING_MAX} levels")
        level = [
            part for each in level for part in (each.values() if isinstance(each, dict) else each)
        ]
    return value


def _check_messages(messages: Any, field: str) -> None:
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise RefusedError(400, f"{field} must be a list of messages, each a JSON object")
    if not messages:
        raise RefusedError(400, f"{field} must hold a message, and is empty")
    for message in messages:
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else []:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in _TEXTS:
                raise RefusedError(400, f"{field} must be text: no images, no sound; got {kind!r}")


def _check_stop(given: Any) -> None:
    texts = given if isinstance(given, list) else [given]
    if given is not None and not all(isinstance(text, str) and text for text in texts):
        raise RefusedError(400, f"stop must be a text or texts, none empty, got {given!r}")


def _check_template(given: Any) -> None:
    if given is None:
        return
    if not isinstance(given, dict):
        raise RefusedError(400, "chat_template_kwargs must be a JSON object")
    wrong = [name for name in _NO_TEMPLATES if name in given]
    if wrong:
        raise RefusedError(400, f"chat_template_kwargs must be without {', '.join(wrong)}")


def _check_generation(config: Any) -> None:
    must = "generation_config must be a JSON object as text"
    settings = _parsed(config, must)
    if not isinstance(settings, dict):
        raise RefusedError(400, f"{must}, got {type(settings).__name__}")
    wrong = [name for name, only in ALONE.items() if settings.get(name, only) != only]
    if wrong:
        raise RefusedError(400, f"generation_config must be without {', '.join(wrong)}")


async def _body(receive: Callable) -> bytes:
    pieces, size, more = [], 0, True
    while more:
        try:
            message = await asyncio.wait_for(receive(), PATIENCE_SECONDS)
        except TimeoutError:
            raise RefusedError(408, "the body must come without long pauses") from None
        if message["type"] == "http.disconnect":
            raise RefusedError(400, "the client hung up")
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > BODY_BYTES_MAX:
            raise RefusedError(413, f"the body must have at most {BODY_BYTES_MAX} bytes")
        more = message.get("more_body", False)
    return b"".join(pieces)


async def _hang_up(receive: Callable, turn: Turn) -> None:
    """Returns when the client has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass
    turn.gone.set()


def _status(status: int) -> str:
    return f'{{status="{status}"}}'


async def _reply(send: Callable, status: int, text: str, kind: bytes = b"application/json") -> None:
    body = text.encode()
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
