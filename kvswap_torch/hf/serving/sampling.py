"""How the next token of an answer is chosen, and when an answer ends."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria

from kvswap_torch.hf.serving.asked import Asked
from kvswap_torch.hf.serving.line import Turn

ANSWER_TOKENS = 1024  # at most, of a request that does not say


def generation_config(model: Any, asked: Asked, room: int) -> Any:
    """The model's own, and what the request says; at most `room` tokens."""
    config = deepcopy(model.generation_config)
    for name, value in asked.settings.items():
        setattr(config, name, value)
    if asked.settings.get("temperature") == 0:
        config.do_sample, config.temperature = False, None
    config.max_length = None  # max_new_tokens says it
    config.max_new_tokens = min(asked.settings.get("max_new_tokens", ANSWER_TOKENS), room)
    config.stop_strings = None  # `StopTexts` finds them in what is said, without a table
    config.return_dict_in_generate = False
    return config


class Penalties(LogitsProcessor):
    """OpenAI's: of a token's score, ``frequency`` for each time that the answer has it, and
    ``presence`` if it has it at all; and what `biases` add. The prompt counts nothing.
    """

    def __init__(self, asked: Asked, prompt_tokens: int) -> None:
        self._frequency, self._presence = asked.frequency, asked.presence
        self._prompt_tokens = prompt_tokens
        self._biases = asked.biases

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``input_ids`` ``[1, tokens]``, ``scores`` ``[1, vocabulary]``."""
        answer = input_ids[0, self._prompt_tokens :]
        counts = torch.bincount(answer, minlength=scores.shape[1])[: scores.shape[1]]
        scores = scores - self._frequency * counts - self._presence * (counts > 0)
        for token, bias in self._biases.items():
            scores[:, token] += bias
        return scores

    @property
    def is_needed(self) -> bool:
        return bool(self._frequency or self._presence or self._biases)


class StopTexts(StoppingCriteria):
    """Ends an answer when what it says has one of the turn's stop texts.

    Looks at decoded text alone, a token's at a time: it costs what the answer is long.
    """

    def __init__(self, tokenizer: Any, turn: Turn, prompt_tokens: int) -> None:
        self._tokenizer = tokenizer._tokenizer
        self._stops = turn.stops
        self._most = max(map(len, turn.stops))
        self._prompt_tokens = prompt_tokens
        self._begin()

    def _begin(self) -> None:
        from tokenizers.decoders import DecodeStream

        self._stream = DecodeStream([], skip_special_tokens=True)
        self._read, self._end = self._prompt_tokens, ""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **rest: Any) -> torch.Tensor:
        if input_ids.shape[1] <= self._read:  # the answer begins anew
            self._begin()
        for token in input_ids[0, self._read :].tolist():
            self._end += self._stream.step(self._tokenizer, token) or ""
        self._read = input_ids.shape[1]
        is_over = any(stop in self._end for stop in self._stops)
        self._end = self._end[max(0, len(self._end) - self._most + 1) :]
        return torch.full((len(input_ids),), is_over, device=input_ids.device)


class Ending(StoppingCriteria):
    """Ends an answer after the longest time for one; the turn learns whether it was cut."""

    def __init__(self, turn: Turn, prompt_tokens: int, config: Any) -> None:
        self._turn = turn
        self._most = prompt_tokens + config.max_new_tokens
        ends = config.eos_token_id
        self._ends = set(ends if isinstance(ends, list | tuple) else [ends])

    def __call__(self, input_ids: torch.Tensor, scores: Any, **rest: Any) -> torch.Tensor:
        is_late = time.monotonic() >= self._turn.ends
        is_over = is_late or input_ids.shape[1] >= self._most
        self._turn.is_cut = is_over and int(input_ids[0, -1]) not in self._ends
        return torch.full((len(input_ids),), is_late, device=input_ids.device)


@contextmanager
def drawn_from(seed: int | None, device: torch.device) -> Iterator[None]:
    """Random numbers of a request's own: what it asks for ends with it, others draw anew."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(secrets.randbits(62) if seed is None else seed)
        yield
