"""How probable the tokens of an answer, or of a prompt, are: as OpenAI's replies have it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor

LEAST = -9999.0  # of a token that cannot come: JSON has no infinity


@dataclass(frozen=True)
class Token:
    """One, with the natural logarithm of its probability; `best` by token, the first first.

    `logprob` is None where nothing is before it.
    """

    number: int
    logprob: float | None
    best: tuple[tuple[int, float], ...] = ()


def tokens_of(scores: torch.Tensor, chosen: Sequence[int], count: int) -> list[Token]:
    """``scores`` ``[tokens, vocabulary]``, log-probabilities; `count` of the best of each."""
    values, best = scores.topk(count) if count else (scores[:, :0], scores[:, :0])
    found = scores.gather(1, torch.tensor(chosen, device=scores.device)[:, None])[:, 0].tolist()
    return [
        Token(
            number,
            max(logprob, LEAST),
            tuple((int(each), max(value, LEAST)) for each, value in zip(*pair, strict=True)),
        )
        for number, logprob, pair in zip(
            chosen, found, zip(best.tolist(), values.tolist(), strict=True), strict=True
        )
    ]


class Scores(LogitsProcessor):
    """Keeps the newest step's log-probabilities until it is known which tokens were chosen.

    The first of a request's processors: they are the model's own, before penalties of the answer,
    biases, temperature and what samples leave out.
    """

    def __init__(self) -> None:
        self._newest = torch.empty(0)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._newest = scores.float().log_softmax(-1)
        return scores

    def chosen(self, row: int, token: int, count: int) -> Token:
        """Of an answer, the token that was taken."""
        (found,) = tokens_of(self._newest[row : row + 1], [token], count)
        return found


class PromptScores:
    """Log-probabilities of a prompt's tokens, pass by pass."""

    def __init__(self, ids: Sequence[int], count: int) -> None:
        self._ids, self._count = ids, count
        self.tokens = [Token(ids[0], None)]

    def restart(self) -> None:
        """The prompt is read anew."""
        del self.tokens[1:]

    def take(self, logits: torch.Tensor) -> None:
        """``[tokens, vocabulary]`` of the next tokens of the prompt."""
        begin = len(self.tokens)
        chosen = self._ids[begin : begin + len(logits)]
        scores = logits[: len(chosen)].float().log_softmax(-1)
        self.tokens += tokens_of(scores, chosen, self._count)


class TokenTexts:
    """What single tokens say, blanks at their beginning included."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        anchors = tokenizer("a", add_special_tokens=False)["input_ids"]
        self._anchor = anchors[-1:]
        self._before = tokenizer.decode(self._anchor)
        self._known: dict[int, str] = {}

    def text(self, token: int) -> str:
        """A part of a character is what the vocabulary calls it."""
        if token not in self._known:
            both = self._tokenizer.decode([*self._anchor, token])
            text = both[len(self._before) :] if both.startswith(self._before) else both
            if "\ufffd" in text or not text:
                text = self._tokenizer.convert_ids_to_tokens(token) or text
            self._known[token] = text
        return self._known[token]

    def of_completion(self, tokens: Iterable[Token], begin: int = 0) -> dict[str, Any]:
        """A completion's ``logprobs``; texts begin after `begin` characters."""
        listed: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token in tokens:
            text = self.text(token.number)
            listed["tokens"].append(text)
            listed["token_logprobs"].append(token.logprob)
            best: dict[str, float] = {}
            for each, logprob in token.best:
                best.setdefault(self.text(each), logprob)
            if token.logprob is not None and token.best:
                best.setdefault(text, token.logprob)
            listed["top_logprobs"].append(best or None)
            listed["text_offset"].append(begin)
            begin += len(text)
        return listed

    def of_chat(self, tokens: Iterable[Token]) -> dict[str, Any]:
        """A chat's ``logprobs``."""
        content = [
            self._entry(token.number, token.logprob)
            | {"top_logprobs": [self._entry(*each) for each in token.best]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self.text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
