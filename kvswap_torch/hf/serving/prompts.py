"""From what was asked to tokens.

Measured in bytes first, so that a prompt that is far too long costs little.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from kvswap_torch.hf.serving.asked import Asked
from kvswap_torch.hf.serving.limits import PIECE_BYTES, TEXT_BYTES_TOKEN
from kvswap_torch.hf.serving.refusal import RefusedError, shown

_BETWEEN = "\n\n"


class Prompts:
    """Reads prompts with a model's tokenizer and chat template. Any thread.

    Parameters
    ----------
    tokenizer
        The model's.
    max_context
        A prompt has fewer tokens.
    vocabulary
        Tokens are below that.
    parses_calls
        Whether calls of tools are found in what the model says.
    """

    def __init__(
        self, tokenizer: Any, max_context: int, vocabulary: int, parses_calls: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._max_context = max_context
        self._vocabulary = vocabulary
        self._parses_calls = parses_calls

    def check(self, asked: Asked) -> None:
        """What can be said before a request waits.

        Raises
        ------
        RefusedError
            It asks for what this model has not.
        """
        if isinstance(asked.prompt, list):
            self._check_tokens(asked.prompt)
        wrong = [token for token in asked.biases if token >= self._vocabulary]
        if wrong:
            raise RefusedError(
                400, f"logit_bias must be of tokens below {self._vocabulary}, got {wrong[0]}"
            )
        if asked.messages is None:
            return
        if not self._has_template():
            plain_words(asked.messages)
        if asked.tools and not self._has_tools():
            raise RefusedError(
                400, "tools must be left out: this model's chat template has none, or nothing "
                "says how it calls them"
            )  # fmt: skip

    def read(self, asked: Asked) -> torch.Tensor:
        """``[1, tokens]`` int64.

        Raises
        ------
        RefusedError
            There are none, or as many as the longest context or more.
        jinja2.TemplateError
            The chat template refuses the messages.
        """
        if isinstance(asked.prompt, list):
            ids = asked.prompt
        elif isinstance(asked.prompt, str):
            self.check_text(asked.prompt)
            ids = self._tokenizer(asked.prompt)["input_ids"]
        elif not self._has_template():
            text = plain_words(asked.messages)
            self.check_text(text)
            ids = self._tokenizer(text)["input_ids"]
            if ids and ids[-1] == self._tokenizer.eos_token_id:
                ids = ids[:-1]  # it would end the text before the answer
        else:
            text = self._tokenizer.apply_chat_template(
                asked.messages,
                tools=asked.tools,
                add_generation_prompt=True,
                tokenize=False,
                **asked.template,
            )
            self.check_text(text)
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise RefusedError(400, "the prompt must have tokens, and has none")
        self.check_length(len(ids))
        return torch.tensor([ids], dtype=torch.int64)

    def _has_template(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None))

    def _has_tools(self) -> bool:
        if not self._has_template():
            return False
        template = self._tokenizer.chat_template
        texts = template.values() if isinstance(template, dict) else [template]
        return self._parses_calls and any(re.search(r"\btools\b", text) for text in texts)

    def _check_tokens(self, ids: list[int]) -> None:
        if not all(0 <= token < self._vocabulary for token in ids):
            raise RefusedError(
                400, f"prompt must be of tokens from 0 to {self._vocabulary - 1}, those that the "
                "model has"
            )  # fmt: skip
        self.check_length(len(ids))

    def check_length(self, tokens: int) -> None:
        """Raises a `RefusedError` where a prompt has as many as the longest context."""
        if tokens >= self._max_context:
            raise self._too_long(f"{tokens}")

    def check_text(self, text: str) -> None:
        """Counts a text that is very long for its tokens in pieces, and no further than needed.

        A cut costs a token or two that the whole has not: a twentieth more than the context is.
        """
        try:
            size = len(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise RefusedError(400, f"a text must be Unicode: {error.reason}") from None
        if size <= TEXT_BYTES_TOKEN * self._max_context:
            return
        most, found = self._max_context + self._max_context // 20 + 16, 0
        for begin in range(0, len(text), PIECE_BYTES):
            piece = text[begin : begin + PIECE_BYTES]
            found += len(self._tokenizer(piece, add_special_tokens=False)["input_ids"]) - 2
            if found >= most:
                raise self._too_long(f"{size} bytes, which are more")

    def _too_long(self, told: str) -> RefusedError:
        return RefusedError(
            400,
            f"the prompt must be shorter than {self._max_context} tokens, which is the longest "
            f"context here, got {told}",
            "context_length_exceeded",
            reason="prompt_length",
        )


def plain_words(messages: list[dict[str, Any]]) -> str:
    """For a model without a chat template, as ``kvswap ask`` puts a document and its questions.

    What the system says is the document; what was said is what comes after ``Answer:``.

    Raises
    ------
    RefusedError
        A message is of another role, or has calls.
    """
    text = ""
    for i, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role not in ("system", "developer", "user", "assistant") or message.get("tool_calls"):
            raise RefusedError(
                400, f"messages[{i}] must be words of system, user or assistant: this model has no "
                f"chat template (chat_template.jinja in its folder); got {shown(role)}"
            )  # fmt: skip
        if role == "user":
            text += f"{_BETWEEN if text else ''}Question: {content}\nAnswer:"
        elif role == "assistant":
            text += content
        else:
            text += f"{_BETWEEN if text else ''}{content}"
    return text
