"""Where transformers' server and ours meet: nothing else imports ``transformers.cli.serving``.

Its handlers make replies and events, and find calls of tools. What a request may say, what the chat
template gets and what generates is ours.
"""

from __future__ import annotations

import asyncio
import errno
import importlib
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from kvswap_torch.errors import BudgetError, StorageError
from kvswap_torch.hf.serving.asked import Asked
from kvswap_torch.hf.serving.counts import Counts
from kvswap_torch.hf.serving.fields import COMPLETIONS, PATHS, RESPONSES
from kvswap_torch.hf.serving.limits import Limits
from kvswap_torch.hf.serving.line import CURRENT, Turn
from kvswap_torch.hf.serving.prompts import Prompts
from kvswap_torch.hf.serving.refusal import RefusedError
from kvswap_torch.hf.serving.replies import told, whole
from kvswap_torch.hf.serving.reuse import GoneError, LateError, PrefixReuse
from kvswap_torch.hf.serving.sampling import (
    Ending,
    Penalties,
    StopTexts,
    drawn_from,
    generation_config,
)
from kvswap_torch.hf.serving.stops import EndedQueue
from kvswap_torch.hf.serving.store import reason_of

# Module of transformers.cli.serving -> what it must have.
NAMES = {
    "utils": ("GenerateManager", "_GenerationCancelled", "get_response_template"),
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


class _Answering:
    """What a generate manager treats as the model: `PrefixReuse` for one request."""

    def __init__(
        self, answers: Answers, turn: Turn, asked: Asked, counts: Counts, cancelled: type[Exception]
    ) -> None:
        self._answers, self._turn, self._asked, self._counts = answers, turn, asked, counts
        self._cancelled = cancelled

    def generate(self, **arguments: Any) -> Any:
        prompt = arguments["input_ids"].shape[1]
        del arguments["tokenizer"]  # for stop texts in its vocabulary, which are ours
        try:
            ids = self._answers.generate(self._turn, self._asked, arguments)
        except Exception as error:
            if "streamer" not in arguments or isinstance(error, self._cancelled):
                raise
            # The server puts it into an event's JSON as it stands.
            raise RuntimeError(json.dumps(str(error) or repr(error))[1:-1]) from error
        self._counts.add("prompt_tokens", prompt)
        self._counts.add("cached_tokens", self._turn.cached_tokens)
        self._counts.add("generated_tokens", ids.shape[1] - prompt)
        return ids


def _manager(found: dict[str, Any], answers: Answers, counts: Counts) -> Any:
    class Manager(found["GenerateManager"]):
        """Generates with `PrefixReuse`, and saves afterwards, on the one thread."""

        def async_submit(self, fn: Callable, *args: Any, **kwargs: Any) -> asyncio.Future:
            """As the base's, whose thread does not survive that the loop is closed meanwhile."""
            return asyncio.shield(asyncio.wrap_future(self.submit(fn, *args, **kwargs)))

        def generate_streaming(
            self, model: Any, processor: Any, inputs: Any, gen_config: Any, **rest: Any
        ) -> Any:
            turn, asked = CURRENT.get()
            answering = _Answering(answers, turn, asked, counts, found["_GenerationCancelled"])
            pieces, streamer = super().generate_streaming(
                answering, processor, inputs, gen_config, **rest
            )
            self.submit(answers.reuse.settle)
            return EndedQueue(pieces, turn) if turn.stops else pieces, streamer

        async def generate_non_streaming(
            self, model: Any, processor: Any, inputs: Any, gen_config: Any, **rest: Any
        ) -> Any:
            turn, asked = CURRENT.get()
            answering = _Answering(answers, turn, asked, counts, found["_GenerationCancelled"])
            try:
                return await super().generate_non_streaming(
                    answering, processor, inputs, gen_config, **rest
                )
            finally:
                self.submit(answers.reuse.settle)

    return Manager()


class Answers:
    """Answers requests with transformers' handlers, one at a time.

    Parameters
    ----------
    model, tokenizer
        What is served, as `name`.
    reuse
        What generates.
    bounds
        The longest context, and the longest time for an answer.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        reuse: PrefixReuse,
        bounds: Limits,
        counts: Counts,
    ) -> None:
        found = names()
        self._model, self._tokenizer, self._name = model, tokenizer, name
        self.reuse = reuse
        self._bounds = bounds
        self._manager = _manager(found, self, counts)
        handlers = ("ChatCompletionHandler", "CompletionHandler", "ResponseHandler")
        self._handlers = {
            path: found[handler](model_manager=None, generation_state=None)
            for path, handler in zip(PATHS, handlers, strict=True)
        }
        template = found["get_response_template"](tokenizer, model) or {}
        vocabulary = model.get_input_embeddings().weight.shape[0]
        self._prompts = Prompts(
            tokenizer, bounds.max_context, vocabulary, "tool_calls" in template.get("fields", {})
        )

    def check(self, asked: Asked) -> None:
        """Before it waits.

        Raises
        ------
        RefusedError
            The model has not what is asked for.
        """
        self._prompts.check(asked)

    async def answer(self, asked: Asked, turn: Turn, request_id: str) -> Any:
        """A response, itself an ASGI application.

        Raises
        ------
        RefusedError
            There is none, and why.
        """
        turn.stops, turn.tells_usage = asked.stops, asked.tells_usage
        turn.ends = time.monotonic() + self._bounds.answer_seconds
        token = CURRENT.set((turn, asked))
        try:
            return await self._answer(asked, turn, request_id)
        except Exception as error:
            raise _refusal(error) from error
        finally:
            CURRENT.reset(token)

    async def read(self, asked: Asked) -> torch.Tensor:
        """The prompt's tokens; others are answered meanwhile."""
        return await asyncio.to_thread(self._prompts.read, asked)

    async def _answer(self, asked: Asked, turn: Turn, request_id: str) -> Any:
        ids = await self.read(asked)
        inputs = {"input_ids": ids.to(self._model.device)}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        room = self._bounds.max_context - ids.shape[1]
        config = generation_config(self._model, asked, room)
        handler = self._handlers[asked.path]
        # In the order of transformers' 5.23.
        given = [request_id, self._model, self._tokenizer, self._name]
        given += [{}] if asked.path == RESPONSES else []
        given += [inputs, config, self._manager]
        given += [None if asked.path == COMPLETIONS else asked.tools]  # no suffix
        if asked.is_streamed:
            response = handler._streaming(*given)
            last = "" if asked.path == RESPONSES else _DONE
            response.body_iterator = told(response.body_iterator, turn, last)
            return response
        return whole(await handler._non_streaming(*given), turn)

    def generate(self, turn: Turn, asked: Asked, arguments: dict[str, Any]) -> Any:
        """On the manager's thread."""
        prompt = arguments["input_ids"].shape[1]
        criteria = [Ending(turn, prompt, arguments["generation_config"])]
        if turn.stops:
            criteria.append(StopTexts(self._tokenizer, turn, prompt))
        penalties = Penalties(asked, prompt)
        processors = [penalties] if penalties.is_needed else []
        with drawn_from(asked.seed, self._model.device):
            return self.reuse.generate(
                turn, **arguments, stopping_criteria=criteria, logits_processor=processors
            )

    def finish(self) -> None:
        """Waits for what is being saved, and frees the cache."""
        self._manager.submit(self.reuse.close).result()


def _refusal(error: Exception) -> RefusedError:
    from fastapi import HTTPException
    from jinja2 import TemplateError

    said = f"{type(error).__name__}: {error}"
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, LateError):
        return RefusedError(503, str(error), reason="late")
    if isinstance(error, GoneError):
        return RefusedError(499, str(error))
    if isinstance(error, BudgetError):
        return RefusedError(400, str(error), reason="budget")
    if isinstance(error, StorageError):
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return RefusedError(507 if is_full else 500, str(error), reason=reason_of(error))
    if isinstance(error, TemplateError):
        told = f"the messages must be what the model's chat template takes: {error}"
        return RefusedError(400, told, reason="template")
    if isinstance(error, HTTPException):
        return RefusedError(error.status_code, str(error.detail))
    if isinstance(error, LookupError | TypeError | ValueError | AttributeError | ArithmeticError):
        return RefusedError(400, f"the request must be one that the model takes: {said}")
    return RefusedError(500, said)
