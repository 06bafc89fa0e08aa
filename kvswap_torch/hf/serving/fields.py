"""Which fields a request may have, and which values: all others are refused by name.

A field that would change the answer, and that this server does not have, is never dropped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from kvswap_torch.hf.serving import limits
from kvswap_torch.hf.serving.refusal import RefusedError, shown

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
PATHS = (CHAT, COMPLETIONS, RESPONSES)
Rule = Callable[[Any], str]  # what a value must be; "" where it is

# The least temperature: scores divided by less are not finite.
COOLEST = 1e-6


def number(least: float, most: float, above: bool = False) -> Rule:
    """A number of a range; `above`: not its least."""

    def must(value: Any) -> str:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and least <= value <= most and not (above and value == least):
            return ""
        return f"be a number {'above' if above else 'from'} {least:g} to {most:g}"

    return must


def whole(least: int, most: int, unit: str = "") -> Rule:
    """A whole number of a range."""

    def must(value: Any) -> str:
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return ""
        if most >= _MANY:
            return f"be a whole number, at least {least}{unit}"
        return f"be a whole number from {least} to {most}{unit}"

    return must


def only(*values: Any) -> Rule:
    """One of these."""

    def must(value: Any) -> str:
        if any(type(value) is type(each) and value == each for each in values):
            return ""
        if not values:
            return "be left out: this server has no such thing"
        said = " or ".join(map(json.dumps, values))
        return f"be {said}: this server has nothing else"

    return must


def kind(wanted: type, said: str) -> Rule:
    """A value of a type of JSON's."""
    return lambda value: "" if isinstance(value, wanted) else f"be {said}"


def temperature(value: Any) -> str:
    """0, the most probable token, or what scores can be divided by."""
    must = number(0, 2)(value)
    if must or value == 0 or value >= COOLEST:
        return must
    return f"be 0 or from {COOLEST:g} to 2"


def stop(value: Any) -> str:
    """A text, or some of them."""
    texts = value if isinstance(value, list) else [value]
    if len(texts) > limits.STOP_TEXTS_MAX:
        return f"be at most {limits.STOP_TEXTS_MAX} texts"
    if not all(isinstance(text, str) and text for text in texts):
        return "be a text or texts, none empty"
    if any(len(text.encode("utf-8", "surrogatepass")) > limits.STOP_BYTES_MAX for text in texts):
        return f"have at most {limits.STOP_BYTES_MAX} bytes in each text"
    return ""


def logit_bias(value: Any) -> str:
    """Numbers by token."""
    said = f"be an object of at most {limits.BIASES_MAX} numbers from -100 to 100 by token"
    if not isinstance(value, dict) or len(value) > limits.BIASES_MAX:
        return said
    is_right = all(
        token.isascii() and token.isdigit() and len(token) < 10 and not number(-100, 100)(bias)
        for token, bias in value.items()
    )
    return "" if is_right else said


def logprobs(value: Any) -> str:
    """Of a completion: how many of the best are listed beside each token; false is none."""
    said = whole(0, limits.LOGPROBS_MAX)(value)
    return "" if value is False or not said else said


def json_format(name: str = "") -> Rule:
    """What an answer is held to; `name`: of the field that has the schema, else it is beside."""

    def must(value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else None
        if kind in ("text", "json_object"):
            left = [each for each in value if each != "type"]
            return f"be without {shown(left[0])}" if left else ""
        if kind != "json_schema":
            return "be of type text, json_object or json_schema"
        where = f"{name} of " if name else ""
        named = value.get(name) if name else value
        if not isinstance(named, dict) or not isinstance(named.get("schema"), dict):
            return f"have {where}a schema, which is an object"
        known = ("type", "name", "schema", "strict", "description")
        left = [each for each in named if each not in known]
        left += [each for each in value if name and each not in ("type", name)]
        return f"be without {shown(left[0])}" if left else ""

    return must


def parts_of(fields: Mapping[str, Rule]) -> Rule:
    """An object of such fields, each of which may be null."""

    def must(value: Any) -> str:
        if not isinstance(value, dict):
            return "be an object"
        for name, each in value.items():
            if name not in fields:
                return f"be without {shown(name)}: this server has nothing of that name"
            said = "" if each is None else fields[name](each)
            if said:
                return f"have {name}, which must {said}"
        return ""

    return must


_MANY = 1 << 62
_FLAG = kind(bool, "true or false")
_TEXT = kind(str, "a text")
_OBJECT = kind(dict, "an object")
_LIST = kind(list, "a list")
_ANY: Rule = lambda value: ""  # noqa: E731
_TOKENS = whole(1, _MANY, " token")

# They change no answer: taken, and named in the reply's header.
IGNORED: dict[str, Rule] = {
    "user": _ANY,
    "metadata": _ANY,
    "store": _FLAG,
    "service_tier": _TEXT,
    "safety_identifier": _ANY,
    "prompt_cache_key": _ANY,
    "prompt_cache_retention": _ANY,
    "cache_prompt": _ANY,
    "session_id": _ANY,
}
_SAMPLING: dict[str, Rule] = {
    "temperature": temperature,
    "top_p": number(0, 1),
    "top_k": whole(0, _MANY),
    "min_p": number(0, 1),
    "repetition_penalty": number(0, 10, above=True),
}
_EVERY: dict[str, Rule] = {
    "model": _TEXT,
    "stream": _FLAG,
    "seed": whole(-(1 << 63), (1 << 63) - 1),
    "generation_config": _TEXT,
    **_SAMPLING,
    **IGNORED,
}
_OF_ANSWERS: dict[str, Rule] = {
    "max_tokens": _TOKENS,
    "stop": stop,
    "stream_options": parts_of({"include_usage": _FLAG, "include_obfuscation": only(False)}),
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "logit_bias": logit_bias,
    "n": whole(1, limits.ANSWERS_MAX),
}
_OF_CHATS: dict[str, Rule] = {
    "chat_template_kwargs": _OBJECT,
    "tools": _LIST,
    "tool_choice": only("auto", "none"),
    "parallel_tool_calls": only(True),
}
FIELDS: dict[str, dict[str, Rule]] = {
    CHAT: {
        **_EVERY,
        **_OF_ANSWERS,
        **_OF_CHATS,
        "messages": _ANY,
        "max_completion_tokens": _TOKENS,
        "logprobs": _FLAG,
        "top_logprobs": whole(0, limits.LOGPROBS_MAX),
        "response_format": json_format("json_schema"),
        "modalities": only(["text"]),
        **dict.fromkeys(
            ("audio", "functions", "function_call", "prediction", "reasoning_effort"), only()
        ),
        **dict.fromkeys(("verbosity", "web_search_options"), only()),
    },
    COMPLETIONS: {
        **_EVERY,
        **_OF_ANSWERS,
        "prompt": _ANY,
        "max_tokens": whole(0, _MANY, " token"),
        "best_of": only(1),
        "echo": _FLAG,
        "suffix": only(""),
        "logprobs": logprobs,
    },
    RESPONSES: {
        **_EVERY,
        **_OF_CHATS,
        "input": _ANY,
        "instructions": _TEXT,
        "max_output_tokens": _TOKENS,
        "text": parts_of({"format": json_format(), "verbosity": only()}),
        "top_logprobs": only(0),
        "reasoning": parts_of(dict.fromkeys(("effort", "summary", "generate_summary"), only())),
        "truncation": only("disabled"),
        "include": only([]),
        "background": only(False),
        "stream_options": parts_of({"include_obfuscation": only(False)}),
        **dict.fromkeys(("previous_response_id", "conversation", "prompt"), only()),
        **dict.fromkeys(("max_tool_calls", "context_management"), only()),
    },
}
# Of a generation_config, which is text of JSON: what says how a token is chosen, or when to end.
GENERATION: dict[str, Rule] = {
    **_SAMPLING,
    "do_sample": _FLAG,
    "top_k": whole(0, _MANY),
    "typical_p": number(0, 1, above=True),
    "epsilon_cutoff": number(0, 1),
    "eta_cutoff": number(0, 1),
    "no_repeat_ngram_size": whole(0, 1024),
    "max_new_tokens": _TOKENS,
    "min_new_tokens": whole(0, _MANY),
}


def checked(given: Mapping[str, Any], rules: Mapping[str, Rule], where: str = "") -> dict[str, Any]:
    """What is given and not null.

    Raises
    ------
    RefusedError
        A field or its value is none of these.
    """
    for name, value in given.items():
        if name not in rules:
            raise RefusedError(
                400, f"{where}{shown(name)[1:-1]} must be left out: this server has no field of "
                "that name here"
            )  # fmt: skip
        must = "" if value is None else rules[name](value)
        if must:
            raise RefusedError(400, f"{where}{name} must {must}; got {shown(value)}")
    return {name: value for name, value in given.items() if value is not None}
