"""Several answers in one reply, and what is reported of their tokens.

They are generated side by side, one batch for each prompt. Each is made into a reply by
transformers' handlers as if it were alone, and the replies become one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import torch
from transformers import StoppingCriteria

from kvswap_torch.hf.serving.asked import Asked
from kvswap_torch.hf.serving.fields import CHAT
from kvswap_torch.hf.serving.line import Row, Turn
from kvswap_torch.hf.serving.logprobs import PromptScores, Scores, Token, TokenTexts
from kvswap_torch.hf.serving.refusal import error_reply
from kvswap_torch.hf.serving.stops import EndedQueue, end_reply, tell_why


class Sheet(StoppingCriteria):
    """The answers to one prompt while they are generated.

    Parameters
    ----------
    asked
        Of one prompt.
    ids
        The prompt's tokens, ``[1, tokens]``.
    """

    def __init__(self, asked: Asked, ids: torch.Tensor) -> None:
        self.asked, self.prompt = asked, ids
        self.rows = [Row(asked.stops) for _ in range(asked.answers)]
        self.answers: list[list[int]] = [[] for _ in self.rows]
        self.tokens: list[list[Token]] = [[] for _ in self.rows]
        self.scores = None if asked.logprobs is None else Scores()
        echoes = asked.echo and asked.logprobs is not None
        self.of_prompt = PromptScores(ids[0].tolist(), asked.logprobs or 0) if echoes else None
        self._streams: list[Any] = []

    def stream(self, streamer: Any) -> None:
        """One more answer's tokens are passed on too."""
        streamer.put(None)  # in the place of the prompt
        self._streams.append(streamer)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **rest: Any) -> torch.Tensor:
        """After each step, as the first of what may end an answer, and it ends none."""
        for i, token in enumerate(input_ids[:, -1].tolist()):
            if self.rows[i].is_over:
                continue
            self.answers[i].append(token)
            if self.scores is not None:
                self.tokens[i].append(self.scores.chosen(i, token, self.asked.logprobs or 0))
            if self._streams:
                self._streams[i].put(input_ids[i, -1:])
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def put(self, value: torch.Tensor) -> None:
        """As a streamer: it is enough to know that there are tokens."""

    def end(self) -> None:
        """No answer has a further token. Idempotent, since one of no tokens ends here too."""
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.end()

    def fail(self, error: Any) -> bool:
        """Every answer's stream ends with that; False: there are none to hear of it."""
        streams, self._streams = self._streams, []
        for stream in streams:
            stream._enqueue(error)
        return bool(streams)


class _One:
    """What a handler takes for the manager that generates: one answer of a sheet."""

    def __init__(self, sheet: Sheet, index: int, streamer: Callable[..., Any] | None) -> None:
        self._sheet, self._index, self._streamer = sheet, index, streamer

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: Any,
        request_id: str,
        response_parser: Any = None,
    ) -> tuple[Any, Any]:
        pieces: asyncio.Queue = asyncio.Queue()
        loop, row = asyncio.get_running_loop(), self._sheet.rows[self._index]
        streamer = self._streamer(processor._tokenizer, loop, pieces, response_parser)
        self._sheet.stream(streamer)
        return EndedQueue(pieces, row) if row.stops else pieces, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, **rest: Any
    ) -> tuple[str, int, torch.Tensor]:
        ids = torch.tensor(self._sheet.answers[self._index], dtype=torch.int64)
        text = processor.decode(ids, skip_special_tokens=True)
        return text, inputs["input_ids"].shape[1], ids


class Replies:
    """Makes one reply of a request's sheets.

    Parameters
    ----------
    handle
        `handle(asked, ids, manager, streams)`: the handler's reply to one answer.
    generate
        `generate(sheet, turn)`: a future of all of a sheet's answers.
    streamer
        What transformers streams an answer's tokens to.
    """

    def __init__(
        self,
        handle: Callable[..., Any],
        generate: Callable[[Sheet, Turn], asyncio.Future],
        streamer: Callable[..., Any],
        tokenizer: Any,
    ) -> None:
        self._handle, self._generate, self._streamer = handle, generate, streamer
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer)

    async def whole(self, sheets: Sequence[Sheet], turn: Turn) -> Any:
        """The reply that is no stream."""
        from fastapi.responses import JSONResponse

        reply: dict[str, Any] = {}
        for sheet in sheets:
            await self._generate(sheet, turn)
            for i, row in enumerate(sheet.rows):
                one = _One(sheet, i, None)
                made = await self._handle(sheet.asked, sheet.prompt, one, streams=False)
                content = json.loads(made.body)
                end_reply(content, row)
                tell_why(content, row)
                self._complete(content["choices"][0], sheet, i)
                _join(reply, content, is_same_prompt=i > 0)
        usage = reply["usage"]
        usage.setdefault("prompt_tokens_details", {})["cached_tokens"] = turn.cached_tokens
        return JSONResponse(reply)

    async def stream(self, sheets: Sequence[Sheet], turn: Turn) -> AsyncIterator[str]:
        """A stream's events: those of each answer, with its number."""
        before, usage = 0, {}
        for sheet in sheets:
            ones = [_One(sheet, i, self._streamer) for i in range(len(sheet.rows))]
            replies = [
                await self._handle(sheet.asked, sheet.prompt, each, streams=True) for each in ones
            ]
            running = self._generate(sheet, turn)
            told: list[int | None] = [None for _ in ones]
            async with aclosing(_merged([reply.body_iterator for reply in replies])) as events:
                async for i, text in events:
                    for content in _contents(text):
                        if content.get("error"):
                            yield _event(error_reply(str(content["error"])))
                            return
                        if found := content.pop("usage", None):
                            found["prompt_tokens"] *= i == 0
                            usage = {name: usage.get(name, 0) + found[name] for name in _USAGE}
                        tell_why(content, sheet.rows[i])
                        for choice in content["choices"]:
                            told[i] = self._extend(choice, sheet, i, told[i])
                            choice["index"] = before + i
                        yield _event(content)
            await running
            before += len(ones)
        if turn.tells_usage:
            usage["total_tokens"] = sum(usage.values())
            usage["prompt_tokens_details"] = {"cached_tokens": turn.cached_tokens}
            yield _event(content | {"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"

    def _complete(self, choice: dict[str, Any], sheet: Sheet, i: int) -> None:
        """A whole choice gets what was asked for of its tokens, and its prompt."""
        if sheet.scores is not None:
            tokens = sheet.tokens[i]
            if sheet.rows[i].has_stopped:
                tokens = self._until(
                    tokens, choice.get("text", choice.get("message", {}).get("content"))
                )
            choice["logprobs"] = self._logprobs(sheet, tokens, is_first=True)
        if sheet.asked.echo:
            choice["text"] = self._echo(sheet) + choice["text"]

    def _extend(self, choice: dict[str, Any], sheet: Sheet, i: int, told: int | None) -> int:
        """A piece of a choice gets the tokens that are new; how many of them there were now.

        told: how many have been reported; None: this is the first piece.
        """
        is_first, begin = told is None, told or 0
        if sheet.asked.echo and is_first:
            choice["text"] = self._echo(sheet) + choice["text"]
        if sheet.scores is None:
            return 0
        tokens = sheet.tokens[i][begin:]
        if tokens or (is_first and sheet.of_prompt):
            before = sheet.tokens[i][:begin]
            choice["logprobs"] = self._logprobs(sheet, tokens, is_first, before)
        return begin + len(tokens)

    def _logprobs(
        self, sheet: Sheet, tokens: list[Token], is_first: bool, before: Sequence[Token] = ()
    ) -> dict[str, Any]:
        if sheet.asked.path == CHAT:
            return self._texts.of_chat(tokens)
        of_prompt = sheet.of_prompt.tokens if sheet.of_prompt else []
        if is_first:
            return self._texts.of_completion([*of_prompt, *tokens])
        offset = sum(len(self._texts.text(each.number)) for each in (*of_prompt, *before))
        return self._texts.of_completion(tokens, offset)

    def _until(self, tokens: list[Token], text: str | None) -> list[Token]:
        """Those that a text of an answer is made of."""
        length, text = 0, text or ""
        for count, token in enumerate(tokens):
            if length >= len(text):
                return tokens[:count]
            length += len(self._texts.text(token.number))
        return tokens

    def _echo(self, sheet: Sheet) -> str:
        prompt = sheet.asked.prompt
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)


_USAGE = ("prompt_tokens", "completion_tokens")


def _join(reply: dict[str, Any], content: dict[str, Any], is_same_prompt: bool) -> None:
    """One more answer's reply becomes part of the whole one."""
    if not reply:
        reply |= content
        return
    (choice,), usage = content["choices"], content["usage"]
    choice["index"] = len(reply["choices"])
    reply["choices"].append(choice)
    total = reply["usage"]
    total["prompt_tokens"] += 0 if is_same_prompt else usage["prompt_tokens"]
    total["completion_tokens"] += usage["completion_tokens"]
    total["total_tokens"] = total["prompt_tokens"] + total["completion_tokens"]


def _contents(text: str) -> Iterator[dict[str, Any]]:
    for line in text.split("\n"):
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


async def _merged(streams: Sequence[Any]) -> AsyncIterator[tuple[int, str]]:
    """What all of them yield, as it comes, with the number of each."""
    ready: asyncio.Queue = asyncio.Queue(maxsize=len(streams))

    async def pump(number: int, stream: Any) -> None:
        async with aclosing(stream):
            async for text in stream:
                await ready.put((number, text))
        await ready.put((number, None))

    pumps = [asyncio.ensure_future(pump(i, each)) for i, each in enumerate(streams)]
    try:
        left = len(pumps)
        while left:
            number, text = await ready.get()
            if text is None:
                left -= 1
            else:
                yield number, text
    finally:
        for each in pumps:
            each.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
