"""Where transformers' server and ours meet: nothing else imports ``transformers.cli.serving``.

Its handlers read requests, apply chat templates, make replies and events. Ours is what generates.
"""

from __future__ import annotations

import asyncio
import errno
import importlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from kvswap_torch.errors import BudgetError, StorageError
from kvswap_torch.hf.serving.counts import Counts
from kvswap_torch.hf.serving.front import error_reply
from kvswap_torch.hf.serving.line import CURRENT, Turn
from kvswap_torch.hf.serving.reuse import GoneError, PrefixReuse
from kvswap_torch.hf.serving.stops import EndedQueue, end_reply, tell_why

# Module of transformers.cli.serving -> what it must have.
NAMES = {
    "server": ("build_server",),
    "utils": ("GenerateManager", "GenerationState", "Modality", "_GenerationCancelled"),
    "chat_completion": ("ChatCompletionHandler",),
    "completion": ("CompletionHandler",),
    "response": ("ResponseHandler",),
}
_DONE = "data: [DONE]\n\n"
_EXTRA = "pip install 'kvswap_torch[serve]'"


def names() -> dict[str, Any]:
    """What is used of transformers' server.

    Raises
    ------
    ImportError
        A package is missing, or transformers has another server.
    """
    import transformers
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise ImportError(f"serve: fastapi, uvicorn and openai must be there; {_EXTRA}")
    found = {}
    for module, wanted in NAMES.items():
        try:
            loaded = importlib.import_module(f"transformers.cli.serving.{module}")
            found |= {name: getattr(loaded, name) for name in wanted}
        except (ImportError, AttributeError) as error:
            raise ImportError(
                "serve: transformers must have the server that this was made for, that of 5.23, "
                f"and {transformers.__version__} has not: {error}"
            ) from error
    return found


class _Pinned:
    """The one model, in the place of transformers' manager of many."""

    def __init__(self, name: str, model: Any, tokenizer: Any, modality: Any) -> None:
        self.force_model = name
        self._loaded = model, tokenizer
        self._modality = modality

    def process_model_name(self, name: str) -> str:
        return name

    def load_model_and_processor(self, name: str, **rest: Any) -> tuple[Any, Any]:
        return self._loaded

    def get_model_modality(self, model: Any, processor: Any = None) -> Any:
        return self._modality

    def shutdown(self) -> None:
        """The model stays until the process ends."""


class _Answering:
    """What a generate manager treats as the model: `PrefixReuse` for one request."""

    def __init__(
        self, reuse: PrefixReuse, turn: Turn, counts: Counts, cancelled: type[Exception]
    ) -> None:
        self._reuse, self._turn, self._counts = reuse, turn, counts
        self._cancelled = cancelled

    def generate(self, **arguments: Any) -> Any:
        prompt = arguments["input_ids"].shape[1]
        try:
            ids = self._reuse.generate(self._turn, **arguments)
        except Exception as error:
            if "streamer" not in arguments or isinstance(error, self._cancelled):
                raise
            # The server puts it into an event's JSON as it stands.
            raise RuntimeError(json.dumps(str(error) or repr(error))[1:-1]) from error
        self._counts.add("prompt_tokens", prompt)
        self._counts.add("cached_tokens", self._turn.cached_tokens)
        self._counts.add("generated_tokens", ids.shape[1] - prompt)
        return ids


def _manager(found: dict[str, Any], reuse: PrefixReuse, max_context: int, counts: Counts) -> Any:
    class Manager(found["GenerateManager"]):
        """Generates with `PrefixReuse`, and saves afterwards, on the one thread."""

        def async_submit(self, fn: Callable, *args: Any, **kwargs: Any) -> asyncio.Future:
            """As the base's, whose thread does not survive that the loop is closed meanwhile."""
            return asyncio.shield(asyncio.wrap_future(self.submit(fn, *args, **kwargs)))

        def generate_streaming(
            self, model: Any, processor: Any, inputs: Any, gen_config: Any, **rest: Any
        ) -> Any:
            answering = self._admit(inputs, gen_config)
            pieces, streamer = super().generate_streaming(
                answering, processor, inputs, gen_config, **rest
            )
            self.submit(reuse.settle)
            turn = CURRENT.get()
            return EndedQueue(pieces, turn) if turn.stops else pieces, streamer

        async def generate_non_streaming(
            self, model: Any, processor: Any, inputs: Any, gen_config: Any, **rest: Any
        ) -> Any:
            answering = self._admit(inputs, gen_config)
            try:
                return await super().generate_non_streaming(
                    answering, processor, inputs, gen_config, **rest
                )
            finally:
                self.submit(reuse.settle)

        def _admit(self, inputs: Any, gen_config: Any) -> _Answering:
            from fastapi import HTTPException

            tokens = inputs["input_ids"].shape[-1]
            if tokens == 0:
                raise HTTPException(400, "the prompt must have tokens, and has none")
            if tokens >= max_context:
                raise HTTPException(
                    400,
                    f"the prompt must be shorter than {max_context} tokens, which is the longest "
                    f"context here, got {tokens}",
                )
            room, asked = max_context - tokens, gen_config.max_new_tokens
            if asked is not None and asked < 1:
                raise HTTPException(
                    400,
                    "the longest answer must be at least 1 token (max_tokens, max_output_tokens; "
                    f"max_new_tokens of a generation_config), got {asked}",
                )
            gen_config.max_new_tokens = room if asked is None else min(asked, room)
            gen_config.return_dict_in_generate = False
            return _Answering(reuse, CURRENT.get(), counts, found["_GenerationCancelled"])

    return Manager()


def _handler(base: type, last_event: str = "") -> type:
    class Handler(base):
        """Says what is wrong with a request, and how many tokens were in a cache.

        Samples at a temperature above 0, and ends before a `stop` text, as OpenAI's does.
        """

        def _build_generation_config(self, body: dict, *args: Any, **kwargs: Any) -> Any:
            stop = body.get("stop") or None  # no text in a list is none
            config = super()._build_generation_config(body | {"stop": stop}, *args, **kwargs)
            if body.get("temperature"):
                config.do_sample = True
            CURRENT.get().stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
            return config

        async def handle_request(self, body: dict, request_id: str) -> Any:
            from fastapi import HTTPException
            from jinja2 import TemplateError

            body.setdefault("stream", False)  # transformers streams responses unless it is there
            try:
                response = await super().handle_request(body, request_id)
            except GoneError as error:
                raise HTTPException(499, str(error)) from error
            except BudgetError as error:
                raise HTTPException(400, str(error)) from error
            except StorageError as error:
                is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                raise HTTPException(507 if is_full else 500, str(error)) from error
            except TemplateError as error:
                raise HTTPException(
                    400, f"the messages must be what the model's chat template takes: {error}"
                ) from error
            except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
                said = f"{type(error).__name__}: {error}"
                raise HTTPException(400, f"the request must be one of OpenAI's: {said}") from error
            except (RuntimeError, OSError) as error:
                raise HTTPException(500, f"{type(error).__name__}: {error}") from error
            return _as_openais(response, CURRENT.get(), last_event)

    return Handler


def build_app(
    model: Any, tokenizer: Any, name: str, max_context: int, reuse: PrefixReuse, counts: Counts
) -> tuple[Any, Callable[[], None]]:
    """An ASGI application that answers POST requests, and what ends it: all is saved then.

    `CURRENT` must be set where it is called, and one request runs at a time.
    """
    found = names()
    manager = _manager(found, reuse, max_context, counts)

    class State(found["GenerationState"]):
        def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
            return manager

    pinned = _Pinned(name, model, tokenizer, found["Modality"].LLM)
    state = State()
    kinds = {"ChatCompletionHandler": _DONE, "CompletionHandler": _DONE, "ResponseHandler": ""}
    chat, completion, response = (
        _handler(found[kind], last)(model_manager=pinned, generation_state=state)
        for kind, last in kinds.items()
    )
    app = found["build_server"](pinned, chat, completion, response, None, None, state)
    _word_errors(app)

    def finish() -> None:
        manager.submit(reuse.close).result()

    return app, finish


def _word_errors(app: Any) -> None:
    """In OpenAI's form, as `Front` words its own."""
    from fastapi import HTTPException, Request
    from fastapi.responses import JSONResponse

    @app.exception_handler(HTTPException)
    async def word(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(error_reply(error.detail), error.status_code)


# What a reply says.


def _as_openais(response: Any, turn: Turn, last_event: str) -> Any:
    """The reply with the number of cached tokens in its usage, and the end that OpenAI's has."""
    from fastapi.responses import JSONResponse

    if hasattr(response, "body_iterator"):
        response.body_iterator = _told(response.body_iterator, turn, last_event)
        return response
    content = json.loads(response.body)
    end_reply(content, turn)
    _tell(content, turn)
    return JSONResponse(content, response.status_code)


async def _told(events: Any, turn: Turn, last_event: str) -> AsyncIterator[str]:
    async with aclosing(events):
        async for text in events:
            is_told = '"usage"' in text or '{"error": "' in text
            yield _tell_lines(text, turn) if is_told else text
    if last_event:
        yield last_event


def _tell_lines(text: str, turn: Turn) -> str:
    lines = []
    for line in text.split("\n"):
        if line.startswith("data: {"):
            content = json.loads(line.removeprefix("data: "))
            if isinstance(content.get("error"), str):
                content |= error_reply(content["error"])
            _tell(content, turn)
            line = f"data: {json.dumps(content)}"
        lines.append(line)
    return "\n".join(lines)


def _tell(content: dict[str, Any], turn: Turn) -> None:
    tell_why(content, turn)
    usage = content.get("usage") or (content.get("response") or {}).get("usage")
    if usage:
        name = "input_tokens_details" if "input_tokens" in usage else "prompt_tokens_details"
        usage.setdefault(name, {})["cached_tokens"] = turn.cached_tokens
