"""What a request asks for, checked: all that does not need the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvswap_torch.hf.serving import messages
from kvswap_torch.hf.serving.bodies import parsed
from kvswap_torch.hf.serving.fields import (
    CHAT,
    COMPLETIONS,
    FIELDS,
    GENERATION,
    IGNORED,
    checked,
)
from kvswap_torch.hf.serving.limits import Limits
from kvswap_torch.hf.serving.refusal import RefusedError, shown

# Of chat_template_kwargs: these are no template's own.
_NO_TEMPLATES = (
    *("chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
    *("return_dict", "tokenizer_kwargs", "processor_kwargs", "tools", "sanitize_control_tokens"),
    *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
    *("conversation", "messages", "self"),
)
_CHOICES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_MOST_TOKENS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@dataclass
class Asked:
    """One request.

    Parameters
    ----------
    path
        One of `fields.PATHS`.
    prompt
        A text or tokens; None where there are messages.
    messages, tools, template
        What the chat template gets, and its other variables.
    settings
        By `GenerationConfig`'s names.
    stops, frequency, presence, biases
        What ends an answer, and what is added to scores.
    ignored
        Fields that change nothing here.
    """

    path: str
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    template: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    stops: tuple[str, ...] = ()
    frequency: float = 0.0
    presence: float = 0.0
    biases: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    is_streamed: bool = False
    tells_usage: bool = False
    ignored: tuple[str, ...] = ()


def read_request(path: str, body: bytes, name: str, bounds: Limits) -> Asked:
    """What is asked of `path`.

    Raises
    ------
    RefusedError
        It is nothing that can be answered; names the field.
    """
    request = parsed(body, "the body must be JSON", bounds.values)
    if not isinstance(request, dict):
        raise RefusedError(400, f"the body must be a JSON object, got {type(request).__name__}")
    given = checked(request, FIELDS[path])
    if given.get("model", name) != name:
        said = shown(given["model"])
        raise RefusedError(404, f"the model must be {name!r}, got {said}", "model_not_found")
    stop = given.get("stop", ())
    asked = Asked(
        path=path,
        template=_template(given.get("chat_template_kwargs", {})),
        settings=_settings(given, bounds),
        stops=(stop,) if isinstance(stop, str) else tuple(stop),
        frequency=given.get("frequency_penalty", 0.0),
        presence=given.get("presence_penalty", 0.0),
        biases={int(token): bias for token, bias in given.get("logit_bias", {}).items()},
        seed=given.get("seed"),
        is_streamed=given.get("stream", False),
        tells_usage=bool(given.get("stream_options", {}).get("include_usage")),
        ignored=tuple(each for each in given if each in IGNORED),
    )
    if path == COMPLETIONS:
        asked.prompt = _prompt(given.get("prompt"))
    elif path == CHAT:
        asked.messages = messages.of_chat(given.get("messages"))
    else:
        asked.messages = messages.of_response(given.get("input"), given.get("instructions"))
    if given.get("tool_choice") != "none":
        asked.tools = _tools(given.get("tools", []))
    return asked


def _settings(given: dict[str, Any], bounds: Limits) -> dict[str, Any]:
    where = "generation_config"
    settings = {}
    if where in given:
        must = f"{where} must be a JSON object as text"
        read = parsed(given[where].encode("utf-8", "replace"), must, bounds.values)
        if not isinstance(read, dict):
            raise RefusedError(400, f"{must}, got {type(read).__name__}")
        settings = checked(read, GENERATION, f"{where}: ")
    settings |= {name: given[name] for name in _CHOICES if name in given}
    for name in _MOST_TOKENS:
        if name in given:
            settings["max_new_tokens"] = given[name]
    if given.get("temperature"):
        settings["do_sample"] = True  # as OpenAI's does
    return settings


def _prompt(given: Any) -> str | list[int]:
    """A text or a list of tokens; or a list of one of them."""
    prompt = given
    if isinstance(given, list) and len(given) == 1 and not isinstance(given[0], int):
        (prompt,) = given
    if isinstance(prompt, str):
        return prompt
    is_tokens = isinstance(prompt, list) and all(type(each) is int for each in prompt)
    if is_tokens and prompt:
        return prompt
    raise RefusedError(400, f"prompt must be one text, or one list of tokens; got {shown(given)}")


def _template(given: dict[str, Any]) -> dict[str, Any]:
    wrong = [name for name in _NO_TEMPLATES if name in given]
    if wrong:
        raise RefusedError(400, f"chat_template_kwargs must be without {', '.join(wrong)}")
    return given


def _tools(given: list[Any]) -> list[dict[str, Any]] | None:
    """As templates take them: a response's are flat."""
    tools = []
    for i, tool in enumerate(given):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise RefusedError(400, f"tools[{i}] must be of type function: there are no others")
        function = tool.get("function", {key: tool[key] for key in tool if key != "type"})
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RefusedError(400, f"tools[{i}] must be a function with a name")
        if function.get("strict"):
            raise RefusedError(400, f"tools[{i}].strict must be left out: nothing holds it here")
        tools.append({"type": "function", "function": function})
    return tools or None
