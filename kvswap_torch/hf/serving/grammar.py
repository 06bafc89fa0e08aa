"""Answers that are JSON, of any kind or of a schema, by llguidance.

It knows tokens alone: the cache, and how the next token is chosen, are as without it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessor

from kvswap_torch.hf.serving.line import Row
from kvswap_torch.hf.serving.refusal import RefusedError

EXTRA = "pip install 'kvswap_torch[json]'"
SCHEMA_BYTES_MAX = 64 << 10
# Lines and their indentation; small models would go on with blanks for ever.
_BLANKS = {"whitespace_pattern": r"[ \t\r\n]{1,16}"}


class Grammars:
    """Reads schemas for one tokenizer. Any thread.

    Parameters
    ----------
    tokenizer
        The model's, a fast one.
    vocabulary
        Scores that the model gives.
    ends
        Tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Sequence[int]) -> None:
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, list(ends)
        self._lock = threading.Lock()
        self._read: Any = None

    def check(self, schema: dict[str, Any]) -> None:
        """Whether answers can be held to it.

        Raises
        ------
        RefusedError
            The package is missing, or the schema is none that it knows.
        """
        self._matcher(schema)

    def processor(
        self, schema: dict[str, Any], rows: Sequence[Row], prompt_tokens: int
    ) -> JsonAnswers:
        """For one generation; an answer each of `rows`."""
        matchers = [self._matcher(schema) for _ in rows]
        return JsonAnswers(matchers, rows, prompt_tokens)

    def _matcher(self, schema: dict[str, Any]) -> Any:
        guidance = _package()
        text = json.dumps(schema)
        if len(text) > SCHEMA_BYTES_MAX:
            raise RefusedError(
                400, f"response_format must have a schema of at most {SCHEMA_BYTES_MAX} bytes, "
                f"got {len(text)}"
            )  # fmt: skip
        grammar = guidance.LLMatcher.grammar_from_json_schema(text, defaults=_BLANKS)
        matcher = guidance.LLMatcher(self._tokens(), grammar, log_level=0)
        if matcher.is_error():
            said = matcher.get_error().splitlines()[0][:300]
            raise RefusedError(400, f"response_format must have a schema that is known: {said}")
        return matcher

    def _tokens(self) -> Any:
        """The vocabulary as llguidance reads it: a second of work, once."""
        from llguidance.hf import from_tokenizer

        with self._lock:
            if self._read is None:
                self._read = from_tokenizer(
                    self._tokenizer, n_vocab=self._vocabulary, eos_token=self._ends
                )
            return self._read


class JsonAnswers(LogitsProcessor):
    """Of each answer's scores, those of tokens that the grammar has no place for are minus
    infinity.
    """

    def __init__(self, matchers: Sequence[Any], rows: Sequence[Row], prompt_tokens: int) -> None:
        self._matchers, self._rows, self._prompt_tokens = matchers, rows, prompt_tokens
        self._read = prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``input_ids`` ``[answers, tokens]``, ``scores`` ``[answers, vocabulary]``."""
        if input_ids.shape[1] < self._read:  # the answers begin anew
            for matcher in self._matchers:
                matcher.reset()
            self._read = self._prompt_tokens
        newest = input_ids[:, self._read :].tolist()
        self._read = input_ids.shape[1]
        scores = scores.clone()
        for i, (matcher, row) in enumerate(zip(self._matchers, self._rows, strict=True)):
            if row.is_over:
                continue
            matcher.consume_tokens(newest[i])
            allowed = matcher.compute_logit_bias()
            if matcher.is_error():
                said = matcher.get_error().splitlines()[0][:300]
                raise ValueError(f"response_format must have a simpler schema: {said}")
            allowed = torch.frombuffer(bytearray(allowed), dtype=torch.uint8)
            forbidden = torch.ones(scores.shape[1], dtype=torch.bool)
            count = min(len(allowed), len(forbidden))
            forbidden[:count] = allowed[:count] == 0
            scores[i].masked_fill_(forbidden.to(scores.device), float("-inf"))
        return scores


def _package() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise RefusedError(
            400, f"response_format must be text: the server has no llguidance; {EXTRA}",
            reason="no_llguidance",
        ) from error  # fmt: skip
    return llguidance
