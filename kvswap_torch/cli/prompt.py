"""How a document and questions become one growing text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvswap_torch.errors import ConfigError

PLAIN = "{document}\n\nQuestion: {question}\nAnswer:"
# Unlikely in any chat template, and stripped by none.
_DOCUMENT, _FIRST, _ANSWER, _NEXT = (f"@kvswap-{word}@" for word in ("doc", "q1", "a1", "q2"))


@dataclass(frozen=True)
class Prompt:
    """The text around a document and its questions.

    Parameters
    ----------
    opening
        Before the document.
    first
        From the document's end to where the first answer begins, with ``{question}``.
    following
        From an answer's end to where the next one begins, with ``{question}``.
    special_tokens
        Whether the tokenizer adds its own first tokens; a chat template brings them itself.
    """

    opening: str
    first: str
    following: str
    special_tokens: bool

    def prefix_ids(self, tokenizer: Any, document: str) -> list[int]:
        """Tokens of everything up to the document's end."""
        encoded = tokenizer(self.opening + document, add_special_tokens=self.special_tokens)
        ids = list(encoded["input_ids"])
        # A closing </s> would end the text before the question.
        if self.special_tokens and ids and ids[-1] == tokenizer.eos_token_id:
            ids.pop()
        return ids

    def question_ids(self, tokenizer: Any, question: str, turn: int) -> list[int]:
        """Tokens that are appended for one question; `turn` counts from 0.

        Raises
        ------
        ConfigError
            It is no UTF-8.
        """
        check_text("question", question)
        text = (self.first if turn == 0 else self.following).replace("{question}", question)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def check_text(name: str, text: str) -> None:
    """That a tokenizer can read it: bytes that are no UTF-8 arrive as halves of characters.

    Raises
    ------
    ConfigError
        It cannot.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name}: must be UTF-8 text, got {text!r}") from error


def make_prompt(template: str, tokenizer: Any) -> Prompt:
    """The prompt for `template`: ``auto``, or a text with ``{document}`` and ``{question}``.

    Raises
    ------
    ConfigError
        When one of the two is missing, twice there, or in the wrong order, or it is no UTF-8.
    """
    check_text("--prompt-template", template)
    if template == "auto":
        if getattr(tokenizer, "chat_template", None):
            return _from_chat_template(tokenizer)
        template = PLAIN
    else:
        # A shell gives \n as two characters.
        template = template.replace("\\n", "\n").replace("\\t", "\t")
    if template.count("{document}") != 1 or template.count("{question}") != 1:
        raise ConfigError(
            "--prompt-template: must have {document} once and {question} once, "
            f"got {template!r}"
        )
    opening, rest = template.split("{document}")
    if "{question}" not in rest:
        raise ConfigError(
            f"--prompt-template: {{document}} must come before {{question}}, got {template!r}"
        )
    return Prompt(opening, rest, rest, special_tokens=True)


def _from_chat_template(tokenizer: Any) -> Prompt:
    """Renders a conversation of marks and reads off what stands between them."""
    asked = {"role": "user", "content": f"{_DOCUMENT}\n\n{_FIRST}"}
    answered = {"role": "assistant", "content": _ANSWER}
    again = {"role": "user", "content": _NEXT}
    first = tokenizer.apply_chat_template([asked], tokenize=False, add_generation_prompt=True)
    both = tokenizer.apply_chat_template(
        [asked, answered, again], tokenize=False, add_generation_prompt=True
    )
    try:
        opening, rest = first.split(_DOCUMENT)
        following = both.split(_ANSWER)[1].replace(_NEXT, "{question}")
        return Prompt(opening, rest.replace(_FIRST, "{question}"), following, special_tokens=False)
    except (ValueError, IndexError) as error:
        raise ConfigError(
            "--prompt-template: this model's chat template must carry the user's text unchanged, "
            "and does not; give a template with {document} and {question}"
        ) from error
