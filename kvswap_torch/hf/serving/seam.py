"""Where transformers' server and ours meet: nothing else imports ``transformers.cli.serving``.

Its handlers make replies and events, and find calls of tools. What a request may say, what the chat
template gets and what generates is ours.
"""

from __future__ import annotations

import asyncio
import errno
import importlib
import importlib.util
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from kvswap_torch.errors import BudgetError, StorageError
from kvswap_torch.hf.families import input_device
from kvswap_torch.hf.serving.asked import Asked
from kvswap_torch.hf.serving.counts import Counts
from kvswap_torch.hf.serving.fields import COMPLETIONS, PATHS, RESPONSES
from kvswap_torch.hf.serving.grammar import Grammars
from kvswap_torch.hf.serving.limits import LOGPROB_VALUES_MAX, Limits
from kvswap_torch.hf.serving.line import CURRENT, Turn
from kvswap_torch.hf.serving.page import INGEST, Documents, ingested
from kvswap_torch.hf.serving.prompts import Prompts
from kvswap_torch.hf.serving.refusal import RefusedError
from kvswap_torch.hf.serving.replies import told, whole
from kvswap_torch.hf.serving.reuse import EndedError, GoneError, LateError, PrefixReuse
from kvswap_torch.hf.serving.sampling import (
    ANSWER_TOKENS,
    Ending,
    Pace,
    Penalties,
    StopTexts,
    drawn_from,
    ends_of,
    generation_config,
)
from kvswap_torch.hf.serving.several import Replies, Sheet
from kvswap_torch.hf.serving.stops import EndedQueue
from kvswap_torch.hf.serving.store import reason_of

# Module of transformers.cli.serving -> what it must have.
NAMES = {
    "utils": (
        "DirectStreamer",
        "GenerateManager",
        "_GenerationCancelled",
        "_StreamError",
        "get_response_template",
    ),
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
    if importlib.util.find_spec("prometheus_client") is None:
        raise ImportError(f"serve: prometheus_client must be there; {_EXTRA}")
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
            raise RuntimeError(_in_json(error)) from error
        count_tokens(self._counts, self._turn, prompt, ids.shape[1] - prompt)
        return ids


def count_tokens(counts: Counts, turn: Turn, prompt: int, answers: int) -> None:
    """Of one prompt that was read, and its answers."""
    turn.prompt_tokens += prompt
    counts.add("prompt_tokens", prompt)
    counts.add("cached_tokens", turn.cached_tokens)
    counts.add("generated_tokens", answers)


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
        self._found = found = names()
        self._counts = counts
        self._model, self._tokenizer, self._name = model, tokenizer, name
        self._device = input_device(model)
        self.reuse = reuse
        self._bounds = bounds
        self._manager = _manager(found, self, counts)
        handlers = ("ChatCompletionHandler", "CompletionHandler", "ResponseHandler")
        self._handlers = {
            path: found[handler](model_manager=None, generation_state=None)
            for path, handler in zip(PATHS, handlers, strict=True)
        }
        if not getattr(tokenizer, "chat_template", None):
            tokenizer.response_template = _plain_answers(tokenizer)
        template = found["get_response_template"](tokenizer, model) or {}
        vocabulary = model.get_input_embeddings().weight.shape[0]
        self._prompts = Prompts(
            tokenizer, bounds.max_context, vocabulary, "tool_calls" in template.get("fields", {})
        )
        self._grammars = Grammars(tokenizer, vocabulary, ends_of(model.generation_config))
        self.documents = Documents(reuse.store, tokenizer)
        self._replies = Replies(self._handle, self._submit, found["DirectStreamer"], tokenizer)

    def check(self, asked: Asked) -> None:
        """Before it waits.

        Raises
        ------
        RefusedError
            The model has not what is asked for.
        """
        for each in asked.each() if asked.path != INGEST else ():
            self._prompts.check(each)

    async def answer(self, asked: Asked, turn: Turn, request_id: str) -> Any:
        """A response, itself an ASGI application.

        Raises
        ------
        RefusedError
            There is none, and why.
        """
        turn.stops, turn.tells_usage = asked.stops, asked.tells_usage
        turn.ends = time.monotonic() + self._bounds.answer_seconds
        CURRENT.set((turn, asked))  # of this request's task alone
        try:
            return await self._answer(asked, turn)
        except Exception as error:
            raise _refusal(error) from error

    async def read(self, asked: Asked) -> torch.Tensor:
        """The prompt's tokens; others are answered meanwhile."""
        return await asyncio.to_thread(self._prompts.read, asked)

    async def _ingest(self, asked: Asked, turn: Turn) -> Any:
        from fastapi.responses import StreamingResponse

        self._prompts.check_text(asked.prompt)
        ids = await asyncio.to_thread(self.documents.ids, asked.prompt)
        self._prompts.check_length(ids.shape[1])

        def read(progress: Callable[[int], None]) -> asyncio.Future:
            arguments = (turn, ids.to(self._device), progress)
            return self._manager.async_submit(self._read_document, *arguments)

        events = ingested(self.documents, read, ids, turn)
        return StreamingResponse(events, media_type="text/event-stream")

    def _read_document(self, turn: Turn, ids: torch.Tensor, progress: Callable) -> None:
        self.reuse.read(turn, ids, progress)
        count_tokens(self._counts, turn, ids.shape[1], 0)

    async def _answer(self, asked: Asked, turn: Turn) -> Any:
        if asked.path == INGEST:
            return await self._ingest(asked, turn)
        if asked.schema is not None:
            await asyncio.to_thread(self._grammars.check, asked.schema)
        if not asked.is_plain:
            return await self._answer_several(asked, turn)
        response = await self._handle(
            asked, await self.read(asked), self._manager, asked.is_streamed
        )
        if not asked.is_streamed:
            return whole(response, turn)
        last = "" if asked.path == RESPONSES else _DONE
        response.body_iterator = told(response.body_iterator, turn, last)
        return response

    async def _answer_several(self, asked: Asked, turn: Turn) -> Any:
        from fastapi.responses import StreamingResponse

        sheets = [Sheet(each, await self.read(each)) for each in asked.each()]
        _check_logprobs(sheets)
        if not asked.is_streamed:
            return await self._replies.whole(sheets, turn)
        return StreamingResponse(self._replies.stream(sheets, turn), media_type="text/event-stream")

    async def _handle(self, asked: Asked, ids: torch.Tensor, manager: Any, streams: bool) -> Any:
        """A reply of transformers' handler to one answer."""
        turn, _ = CURRENT.get()
        inputs = self._inputs(ids)
        handler = self._handlers[asked.path]
        # In the order of transformers' 5.23.
        given = [turn.request_id, self._model, self._tokenizer, self._name]
        given += [{}] if asked.path == RESPONSES else []
        given += [inputs, self._config(asked, ids), manager]
        given += [None if asked.path == COMPLETIONS else asked.tools]  # no suffix
        return handler._streaming(*given) if streams else await handler._non_streaming(*given)

    def _inputs(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        ids = ids.to(self._device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def _config(self, asked: Asked, ids: torch.Tensor) -> Any:
        return generation_config(self._model, asked, self._bounds.max_context - ids.shape[1])

    def _submit(self, sheet: Sheet, turn: Turn) -> asyncio.Future:
        """Generates a sheet's answers on the manager's thread, and saves afterwards."""
        running = self._manager.async_submit(self._generate_sheet, sheet, turn)
        self._manager.submit(self.reuse.settle)
        return running

    def _generate_sheet(self, sheet: Sheet, turn: Turn) -> None:
        turn.rows = sheet.rows
        cached = turn.cached_tokens
        arguments = self._inputs(sheet.prompt)
        arguments |= {"generation_config": self._config(sheet.asked, sheet.prompt)}
        try:
            self.generate(turn, sheet.asked, arguments | {"streamer": sheet}, sheet)
        except Exception as error:
            if not sheet.fail(self._found["_StreamError"](_in_json(error))):
                raise
            return
        sheet.end()
        answers = sum(map(len, sheet.answers))
        count_tokens(self._counts, turn, sheet.prompt.shape[1], answers)
        turn.cached_tokens += cached

    def generate(
        self, turn: Turn, asked: Asked, arguments: dict[str, Any], sheet: Sheet | None = None
    ) -> Any:
        """On the manager's thread."""
        prompt, rows = arguments["input_ids"].shape[1], turn.rows
        criteria: list[Any] = [*([] if sheet is None else [sheet]), Pace(turn, self._counts)]
        criteria.append(Ending(turn, prompt, arguments["generation_config"]))
        if asked.stops:
            criteria.append(StopTexts(self._tokenizer, rows, prompt))
        processors: list[Any] = [sheet.scores] if sheet and sheet.scores else []
        penalties = Penalties(asked, prompt)
        processors += [penalties] if penalties.is_needed else []
        if asked.schema is not None:
            processors.append(self._grammars.processor(asked.schema, rows, prompt))
        if sheet is not None:
            arguments |= {"answers": len(rows), "scores": sheet.of_prompt}
        with drawn_from(asked.seed, self._device):
            return self.reuse.generate(
                turn, **arguments, stopping_criteria=criteria, logits_processor=processors
            )

    def submit(self, call: Callable, *arguments: Any) -> asyncio.Future:
        """Calls it on the thread that generates, between two requests; what awaits it may be
        cancelled, it is not.
        """
        return self._manager.async_submit(call, *arguments)

    def finish(self) -> None:
        """Waits for what is being saved, and frees the cache."""
        self._manager.submit(self.reuse.close).result()


def _plain_answers(tokenizer: Any) -> dict[str, Any]:
    """How the answers of a model without a chat template are read: as text up to their end.

    transformers would look for what templates of such models write before an answer, and without it
    take the prompt for a part of the answer.
    """
    content: dict[str, Any] = {"content": "text"}
    if tokenizer.eos_token:
        content["close"] = tokenizer.eos_token
    all_of_the_prompt = r"(?s)\A.*\Z"
    return {
        "defaults": {"role": "assistant"},
        "start_anchor_pattern": all_of_the_prompt,
        "fields": {"content": content},
    }


def _check_logprobs(sheets: list[Sheet]) -> None:
    values = sum(
        (1 + (sheet.asked.logprobs or 0))
        * (
            len(sheet.rows) * sheet.asked.settings.get("max_new_tokens", ANSWER_TOKENS)
            + (sheet.prompt.shape[1] if sheet.of_prompt else 0)
        )
        for sheet in sheets
        if sheet.asked.logprobs is not None
    )
    if values > LOGPROB_VALUES_MAX:
        raise RefusedError(
            400, f"logprobs must come to at most {LOGPROB_VALUES_MAX} numbers for all tokens of a "
            f"reply, got up to {values}: ask for fewer tokens, answers or prompts at once",
            reason="logprobs",
        )  # fmt: skip


def _in_json(error: Exception) -> str:
    """What an event's JSON gets between quotes, as it stands."""
    return json.dumps(str(error) or repr(error))[1:-1]


def _refusal(error: Exception) -> RefusedError:
    from fastapi import HTTPException
    from jinja2 import TemplateError

    said = f"{type(error).__name__}: {error}"
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, LateError):
        return RefusedError(503, str(error), reason="late")
    if isinstance(error, EndedError):
        return RefusedError(503, str(error), reason="ending")
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
