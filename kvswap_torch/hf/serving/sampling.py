"""How the next token of an answer is chosen, and when an answer ends."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria

from kvswap_torch.hf.serving.asked import Asked
from kvswap_torch.hf.serving.counts import Counts
from kvswap_torch.hf.serving.line import Row, Turn

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
        """``input_ids`` ``[answers, tokens]``, ``scores`` ``[answers, vocabulary]``."""
        answers, size = input_ids[:, self._prompt_tokens :], scores.shape[1]
        counts = torch.stack([torch.bincount(each, minlength=size)[:size] for each in answers])
        scores = scores - self._frequency * counts - self._presence * (counts > 0)
        for token, bias in self._biases.items():
            scores[:, token] += bias
        return scores

    @property
    def is_needed(self) -> bool:
        return bool(self._frequency or self._presence or self._biases)


class StopTexts(StoppingCriteria):
    """Ends an answer when what it says has one of its stop texts.

    Looks at decoded text alone, a token's at a time: it costs what the answer is long.
    """

    def __init__(self, tokenizer: Any, rows: Sequence[Row], prompt_tokens: int) -> None:
        self._tokenizer = tokenizer._tokenizer
        self._rows = rows
        self._most = max(len(stop) for row in rows for stop in row.stops)
        self._prompt_tokens = prompt_tokens
        self._begin()

    def _begin(self) -> None:
        from tokenizers.decoders import DecodeStream

        self._streams = [DecodeStream([], skip_special_tokens=True) for _ in self._rows]
        self._read, self._ends = self._prompt_tokens, ["" for _ in self._rows]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **rest: Any) -> torch.Tensor:
        if input_ids.shape[1] <= self._read:  # the answers begin anew
            self._begin()
        newest, over = input_ids[:, self._read :].tolist(), [False for _ in self._rows]
        self._read = input_ids.shape[1]
        for i, row in enumerate(self._rows):
            if row.is_over:
                continue
            end = self._ends[i]
            for token in newest[i]:
                end += self._streams[i].step(self._tokenizer, token) or ""
            row.is_over = over[i] = any(stop in end for stop in row.stops)
            self._ends[i] = end[max(0, len(end) - self._most + 1) :]
        return torch.tensor(over, device=input_ids.device)


class Ending(StoppingCriteria):
    """Ends answers after the longest time for one, or with the server; each row learns whether it
    is over, and whether it was cut.
    """

    def __init__(self, turn: Turn, prompt_tokens: int, config: Any) -> None:
        self._turn = turn
        self._most = prompt_tokens + config.max_new_tokens
        self._ends = set(ends_of(config))

    def __call__(self, input_ids: torch.Tensor, scores: Any, **rest: Any) -> torch.Tensor:
        is_late = self._turn.is_late
        is_cut = is_late or input_ids.shape[1] >= self._most
        for row, token in zip(self._turn.rows, input_ids[:, -1].tolist(), strict=True):
            if not row.is_over:
                row.is_cut = is_cut and token not in self._ends
                row.is_over = is_cut or token in self._ends
        return torch.full((len(input_ids),), is_late, device=input_ids.device)


def ends_of(config: Any) -> list[int]:
    """Tokens that end an answer."""
    ends = config.eos_token_id
    return [
        each for each in (ends if isinstance(ends, list | tuple) else [ends]) if each is not None
    ]


class Pace(StoppingCriteria):
    """Notes when tokens come, for the turn and the metrics; ends nothing."""

    def __init__(self, turn: Turn, counts: Counts) -> None:
        self._turn, self._counts = turn, counts

    def __call__(self, input_ids: torch.Tensor, scores: Any, **rest: Any) -> torch.Tensor:
        turn, now = self._turn, time.monotonic()
        if turn.first_token_seconds is None:
            turn.first_token_seconds = round(now - turn.began, 4)
            self._counts.observe("first_token_seconds", now - turn.began)
        else:
            self._counts.observe("token_seconds", now - turn.newest)
        turn.newest = now
        turn.generated_tokens += sum(not row.is_over for row in turn.rows)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@contextmanager
def drawn_from(seed: int | None, device: torch.device) -> Iterator[None]:
    """Random numbers of a request's own: what it asks for ends with it, others draw anew."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(secrets.randbits(62) if seed is None else seed)
        yield
