"""One document, several questions, any cache: prefill once, then ask turn by turn.

Nothing here knows which cache it drives. That is what makes a comparison fair: the same tokens go
through the same calls, and only the cache differs.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kvswap_torch.cache_argument import cache_argument
from kvswap_torch.chunks import even_chunks
from kvswap_torch.cli.reading import Advance, counted_by_layers
from kvswap_torch.errors import KVSwapError

if TYPE_CHECKING:
    from kvswap_torch.cli.prompt import Prompt


class CannotGoBackError(KVSwapError):
    """A layer keeps too little of what is past: a window, or a state of fixed size."""


@dataclass
class Turn:
    """A question, its answer and how long it took.

    `first_token_seconds` includes reading the question; `tokens_per_second` is what follows the
    first token, or None for an answer of one token.
    """

    question: str
    answer: str
    question_tokens: int
    answer_tokens: int
    first_token_seconds: float
    tokens_per_second: float | None
    answer_ids: list[int] = field(repr=False, default_factory=list)


class AnswerStream:
    """The streamer that ``generate()`` feeds: text to `write`, times of tokens kept.

    Text is held back until it is certain: a character may be made of several tokens.
    """

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        self._write = write
        self._ids: list[int] = []
        self._written = 0
        self._prompt_seen = False
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.times.append(time.perf_counter())
        self._ids.extend(value.flatten().tolist())
        text = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        if not text.endswith("\ufffd"):
            self._flush(text)

    def end(self) -> None:
        self._flush(self._tokenizer.decode(self._ids, skip_special_tokens=True))

    def _flush(self, text: str) -> None:
        if len(text) > self._written:
            self._write(text[self._written :])
            self._written = len(text)


class Conversation:
    """A model, a cache and the tokens both have seen so far.

    Parameters
    ----------
    model, tokenizer
        From transformers; one sequence, greedy.
    cache
        Any that the model's ``generate()`` takes.
    prompt
        How document and questions are put.
    """

    def __init__(self, model: Any, tokenizer: Any, cache: Any, prompt: Prompt) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.cache = cache
        self.prompt = prompt
        self.ids: list[int] = []
        self.turns: list[Turn] = []
        self._device = _input_device(model)

    @torch.no_grad()  # what is made in inference mode, generate() could not write to
    def read(self, document_ids: Sequence[int], chunk: int, progress: Advance) -> float:
        """Prefills the document, with `progress` after each layer; returns the seconds."""
        started = time.perf_counter()
        with counted_by_layers(self.model, progress):
            for begin, end in even_chunks(len(document_ids), chunk):
                self._pass(document_ids[begin:end])
        self.ids.extend(document_ids)
        return time.perf_counter() - started

    def ask(
        self,
        question: str,
        max_new_tokens: int,
        write: Callable[[str], None],
        ends: Callable[[], bool] = lambda: False,
    ) -> Turn:
        """Appends a question and generates its answer, streamed to `write`.

        After each token it is asked whether the answer `ends`: raises KeyboardInterrupt then, the
        layers having read the same.
        """
        asked = self.prompt.question_ids(self.tokenizer, question, len(self.turns))
        self.ids.extend(asked)
        stream = AnswerStream(self.tokenizer, write)
        ids = torch.tensor([self.ids], device=self._device)
        started = time.perf_counter()
        output = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **cache_argument(self.model, self.cache),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            streamer=stream,
            stopping_criteria=[lambda ids, scores: torch.full((1,), ends(), device=ids.device)],
            pad_token_id=self._pad_token_id(),
        )
        if ends():
            raise KeyboardInterrupt
        answer = output[0, len(self.ids) :].tolist()
        # The end token is not in the cache yet, and the next turn's text brings its own.
        ended = bool(answer) and answer[-1] in self._end_ids()
        self.ids.extend(answer[:-1] if ended else answer)
        turn = Turn(
            question=question,
            answer=self.tokenizer.decode(answer, skip_special_tokens=True),
            question_tokens=len(asked),
            answer_tokens=len(answer),
            first_token_seconds=stream.times[0] - started,
            tokens_per_second=_speed(stream.times),
            answer_ids=answer,
        )
        self.turns.append(turn)
        return turn

    def go_back(self, tokens: int, turns: int) -> None:
        """Forgets all but the first `tokens` and `turns`.

        Raises
        ------
        CannotGoBackError
            When the cache cannot.
        """
        beyond = self.cache.get_seq_length() - tokens
        if beyond > 0:
            self._crop(beyond)
        del self.ids[tokens:], self.turns[turns:]

    def accept(self, question: str) -> None:
        """Makes a turn of what the cache has read of an interrupted one."""
        answer = self.cache.token_ids[0, len(self.ids) :].tolist()
        self.ids[:] = self.cache.token_ids[0].tolist()
        text = self.tokenizer.decode(answer, skip_special_tokens=True)
        self.turns.append(Turn(question, text, 0, len(answer), 0.0, None, answer))

    @torch.no_grad()
    def log_likelihoods(self, turns: Sequence[Turn], document_tokens: int) -> list[float]:
        """Of each turn's answer under this cache, in nats, all turns before it read.

        The cache is cropped back to the document; answers are read a token at a time, as they are
        generated.

        Raises
        ------
        CannotGoBackError
            When the cache cannot be cropped.
        """
        self._crop(self.cache.get_seq_length() - document_tokens)
        sums, unread = [], []
        for index, turn in enumerate(turns):
            unread += self.prompt.question_ids(self.tokenizer, turn.question, index)
            total = 0.0
            for token in turn.answer_ids:
                scores = self._pass(unread).logits[0, -1].float().log_softmax(-1)
                total += scores[token].item()
                unread = [token]
            if unread and unread[-1] in self._end_ids():
                unread = []
            sums.append(total)
        return sums

    def _crop(self, tokens: int) -> None:
        try:
            self.cache.crop(-tokens)
        except (RuntimeError, ValueError) as error:
            stuck = _stuck(self.cache)
            if stuck is None or isinstance(error, KVSwapError):
                raise
            raise CannotGoBackError(
                "going back: every layer must keep what is past, and this model has "
                f"{type(stuck).__name__}s, which do not; open the document again"
            ) from error

    def _pass(self, ids: Sequence[int]) -> Any:
        """The model's output of one forward pass over `ids`, logits of the last token alone."""
        keep_last: dict[str, Any] = {}
        # Logits of a long chunk over a large vocabulary would take more memory than its KV.
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            keep_last["logits_to_keep"] = 1
        inputs = torch.tensor([list(ids)], device=self._device)
        keep_last |= cache_argument(self.model, self.cache)
        return self.model(input_ids=inputs, use_cache=True, **keep_last)

    def _end_ids(self) -> set[int]:
        ends = self.model.generation_config.eos_token_id
        if ends is None:
            return set()
        return {ends} if isinstance(ends, int) else set(ends)

    def _pad_token_id(self) -> int | None:
        """A pad token, so that ``generate()`` does not warn; one sequence never uses it."""
        if self.model.generation_config.pad_token_id is not None:
            return self.model.generation_config.pad_token_id
        return min(self._end_ids(), default=None)


def _input_device(model: Any) -> torch.device:
    from kvswap_torch.hf.families import input_device

    return input_device(model)


def _stuck(cache: Any) -> Any:
    """The first layer that cannot be cropped, or None.

    A window that is not full yet can, and so can what records its past for assisted decoding.
    """
    for layer in cache.layers:
        window = getattr(layer, "sliding_window", None)
        is_full = window is not None and layer.get_seq_length() >= window
        if (is_full or hasattr(layer, "conv_states")) and not getattr(layer, "record_past", False):
            return layer
    return None


def _speed(times: list[float]) -> float | None:
    if len(times) < 2 or times[-1] <= times[0]:
        return None
    return (len(times) - 1) / (times[-1] - times[0])
