"""What a request asks for, checked: all that does not need the model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from kvswap_torch.hf.serving import limits, messages
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
_ANY_OBJECT = {"type": "object"}  # a response_format of json_object
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
    prompts
        All of them, where there are several.
    messages, tools, template
        What the chat template gets, and its other variables.
    settings
        By `GenerationConfig`'s names.
    stops, frequency, presence, biases
        What ends an answer, and what is added to scores.
    answers
        To each prompt.
    logprobs
        How many of the best are listed beside each token; None: nothing is.
    echo
        Whether an answer begins with its prompt.
    schema
        What an answer is held to; None: nothing.
    ignored
        Fields that change nothing here.
    """

    path: str
    prompt: str | list[int] | None = None
    prompts: tuple[str | list[int], ...] = ()
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
    answers: int = 1
    logprobs: int | None = None
    echo: bool = False
    schema: dict[str, Any] | None = None
    ignored: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether there is one answer, and nothing is reported of its tokens."""
        is_one = self.answers == 1 and not self.prompts and not self.echo
        return is_one and self.logprobs is None and self.settings.get("max_new_tokens") != 0

    def each(self) -> list[Asked]:
        """The same of each prompt."""
        return [replace(self, prompt=each, prompts=()) for each in self.prompts] or [self]


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
    _read_answers(asked, given)
    if path == COMPLETIONS:
        asked.prompt, asked.prompts = _prompts(given.get("prompt"))
        if len(asked.prompts) * asked.answers > limits.PROMPTS_MAX:
            raise RefusedError(
                400, f"prompt must be of at most {limits.PROMPTS_MAX} prompts, answers to the same "
                f"one counted (n); got {len(asked.prompts)} of {asked.answers} answers each"
            )  # fmt: skip
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


def _read_answers(asked: Asked, given: dict[str, Any]) -> None:
    """How many answers, what is reported of their tokens, and what they are held to."""
    asked.answers = given.get("n", 1)
    if asked.path == COMPLETIONS:
        asked.echo = given.get("echo", False)
        count = given.get("logprobs", False)
        asked.logprobs = None if count is False else count
        if given.get("max_tokens") == 0 and not asked.echo:
            raise RefusedError(400, "max_tokens must be at least 1 token where nothing is echoed")
        if asked.answers > 1 and "best_of" in given:
            raise RefusedError(400, "best_of must be left out where n is more than 1")
        return
    if given.get("logprobs"):
        asked.logprobs = given.get("top_logprobs", 0)
    elif given.get("top_logprobs"):
        raise RefusedError(400, "top_logprobs must come with logprobs of true")
    wanted = given.get("response_format") or given.get("text", {}).get("format") or {}
    asked.schema = _schema_of(wanted)


def _schema_of(given: dict[str, Any]) -> dict[str, Any] | None:
    """What a ``response_format`` holds an answer to: a schema; None: nothing."""
    kind = given.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return _ANY_OBJECT
    named = given.get("json_schema", given)  # a response's has the schema beside its name
    return named["schema"]


def _prompts(given: Any) -> tuple[str | list[int], tuple[str | list[int], ...]]:
    """The prompt, and all of them where they are several: a text or tokens, or a list of such."""
    is_list = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
    if not is_list:
        return _prompt(given), ()
    prompts = tuple(_prompt(each) for each in given)
    return prompts[0], prompts if len(prompts) > 1 else ()


def _prompt(given: Any) -> str | list[int]:
    if isinstance(given, str):
        return given
    if isinstance(given, list) and given and all(type(each) is int for each in given):
        return given
    raise RefusedError(
        400, f"prompt must be a text, a list of tokens, or a list of such; got {shown(given)}"
    )


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
