"""What a request may ask for: a field is had, changes nothing, or is refused by name."""

from __future__ import annotations

import inspect
import json
import math
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from kvswap_torch.hf.serving import limits, messages
from kvswap_torch.hf.serving.asked import Asked, read_request
from kvswap_torch.hf.serving.bodies import parsed
from kvswap_torch.hf.serving.fields import CHAT, COMPLETIONS, FIELDS, IGNORED, RESPONSES
from kvswap_torch.hf.serving.limits import Limits
from kvswap_torch.hf.serving.prompts import Prompts, plain_words
from kvswap_torch.hf.serving.refusal import RefusedError
from kvswap_torch.hf.serving.sampling import Penalties
from tests.python.serving_process import TEMPLATE
from tests.python.tiny_models import VOCABULARY, character_tokenizer

BOUNDS = Limits(max_context=400, answer_seconds=1.0)
HELLO = [{"role": "user", "content": "hello"}]
NEEDED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    COMPLETIONS: {"prompt": "x"},
    RESPONSES: {"input": "x"},
}
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}


def asked(path: str, **fields: Any) -> Asked:
    return read_request(path, json.dumps(NEEDED[path] | fields).encode(), "tiny", BOUNDS)


# Of each endpoint: values that would change the answer, which this server has not.
REFUSED = {
    CHAT: [
        {"functions": [FUNCTION]}, {"function_call": "auto"}, {"reasoning_effort": "high"},
        {"verbosity": "low"}, {"modalities": ["text", "audio"]}, {"audio": {"voice": "a"}},
        {"web_search_options": {}}, {"parallel_tool_calls": False}, {"logprobs": 1},
        {"top_logprobs": 2}, {"n": 0}, {"n": True}, {"response_format": {"type": "regex"}},
        {"response_format": {"type": "json_object", "schema": {}}}, {"response_format": []},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        {"response_format": {"type": "json_schema", "schema": {}}}, {"top_logprobs": 21},
        {"tool_choice": "required"}, {"prediction": {"type": "content", "content": "x"}},
        {"tools": [{"type": "web_search"}]}, {"suffix": "x"}, {"echo": True}, {"flavour": None},
        {"stream_options": {"include_usage": 1}}, {"stream_options": {"more": True}},
        {"chat_template_kwargs": {"add_generation_prompt": False}},
        {"tools": [{"type": "function", "function": FUNCTION | {"strict": True}}]},
    ],
    COMPLETIONS: [
        {"logprobs": -1}, {"logprobs": True}, {"best_of": 2}, {"suffix": "x"}, {"echo": 1},
        {"prompt": ["a", 1]}, {"prompt": [[1], []]}, {"prompt": [1.5]}, {"prompt": None},
        {"prompt": [True]}, {"messages": HELLO}, {"max_completion_tokens": 3}, {"tools": []},
    ],
    RESPONSES: [
        {"text": {"format": {"type": "json_schema"}}}, {"text": {"verbosity": "low"}},
        {"truncation": "auto"}, {"include": ["message.output_text.logprobs"]}, {"stop": "x"},
        {"reasoning": {"effort": "high"}}, {"max_tool_calls": 1}, {"prompt": {"id": "p"}},
        {"previous_response_id": "r"}, {"conversation": "c"}, {"background": True},
        {"frequency_penalty": 0.5}, {"max_tokens": 3}, {"top_logprobs": 3},
    ],
}  # fmt: skip
BAD_VALUES: dict[str, list[Any]] = {
    "temperature": [-0.1, 2.1, 1e-300, "1", True, [], {}],
    "top_p": [-0.1, 1.1, "a"],
    "top_k": [-1, 1.5],
    "min_p": [-0.1, 2],
    "repetition_penalty": [0, -1, 11],
    "seed": [1.5, "a", 1 << 63, True],
    "stream": [1, "true"],
    "generation_config": [
        {}, '{"num_beams": 2}', '{"stop_strings": "x"}', '{"top_p": 7}', '{"max_new_tokens": 0}',
        '{"temperature": 1e-40}', '{"use_cache": false}', '{"max_time": 1}', "[]", "{", "null",
    ],
}  # fmt: skip
BAD_OF_ANSWERS: dict[str, list[Any]] = {
    "max_tokens": [0, -1, "a", 1.5, True],
    "frequency_penalty": [-2.1, 2.1, "a"],
    "presence_penalty": [-3, 3],
    "stop": [5, "", ["a", ""], ["a", 1], {}, ["a"] * 5, "x" * 257, "\u4e2d" * 86],
    "logit_bias": [
        {"a": 1}, {"1": 101}, {"-1": 1}, {"1": "a"}, [], {str(i): 1 for i in range(1025)},
    ],
}  # fmt: skip


@pytest.mark.parametrize("path", REFUSED)
def test_what_would_change_the_answer_is_refused_by_name(path: str) -> None:
    wrong = [({name: value}) for each in REFUSED[path] for name, value in each.items()]
    values = BAD_VALUES if path == RESPONSES else BAD_VALUES | BAD_OF_ANSWERS
    wrong += [{name: value} for name, bad in values.items() for value in bad]
    for fields in wrong:
        (name,) = fields
        with pytest.raises(RefusedError, match=name) as caught:
            asked(path, **fields)
        assert caught.value.status == 400, fields
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize("path", FIELDS)
def test_a_field_of_null_is_none(path: str) -> None:
    optional = {name: None for name in FIELDS[path] if name not in NEEDED[path]}
    assert asked(path, **optional) == asked(path)


@pytest.mark.parametrize("path", FIELDS)
def test_harmless_fields_are_taken_and_named(path: str) -> None:
    values = {"store": True, "service_tier": "auto"}
    given = {name: values.get(name, "a") for name in IGNORED}
    assert asked(path, **given).ignored == tuple(IGNORED)


def test_answers_logprobs_and_formats_are_taken() -> None:
    schema = {"type": "object", "properties": {}}
    chat = asked(CHAT, n=3, logprobs=True, top_logprobs=2, response_format={
        "type": "json_schema", "json_schema": {"name": "a", "schema": schema}})  # fmt: skip
    assert (chat.answers, chat.logprobs, chat.schema, chat.is_plain) == (3, 2, schema, False)
    assert asked(CHAT, logprobs=True).logprobs == 0
    assert asked(CHAT, logprobs=False, response_format={"type": "text"}).is_plain
    assert asked(CHAT, response_format={"type": "json_object"}).schema == {"type": "object"}
    flat = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    assert asked(RESPONSES, text=flat).schema == schema
    told = asked(COMPLETIONS, prompt=["a", "b"], n=2, logprobs=0, echo=True, max_tokens=0)
    assert [each.prompt for each in told.each()] == ["a", "b"]
    assert (told.answers, told.logprobs, told.echo) == (2, 0, True)
    assert asked(COMPLETIONS, prompt=[[1], [2, 3]]).prompts == ([1], [2, 3])
    assert asked(COMPLETIONS, logprobs=False).is_plain


def test_what_is_had_is_taken() -> None:
    chat = asked(
        CHAT,
        model="tiny",
        max_tokens=5,
        max_completion_tokens=3,
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        min_p=0.1,
        repetition_penalty=1.1,
        seed=-5,
        stop=["a", "b"],
        frequency_penalty=-2,
        presence_penalty=2,
        logit_bias={"3": -100},
        tools=[{"type": "function", "function": FUNCTION}],
        generation_config='{"do_sample": false, "typical_p": 0.5, "top_k": 9}',
        stream=True,
        stream_options={"include_usage": True},
        chat_template_kwargs={"thinks": True},
    )
    assert chat.settings == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "typical_p": 0.5,
        "repetition_penalty": 1.1,
        "max_new_tokens": 3,
        "do_sample": True,
    }
    assert (chat.stops, chat.seed, chat.is_streamed) == (("a", "b"), -5, True)
    assert (chat.frequency, chat.presence, chat.biases) == (-2, 2, {3: -100})
    assert chat.tells_usage and chat.template == {"thinks": True}
    assert chat.tools == [{"type": "function", "function": FUNCTION}]
    flat = asked(RESPONSES, tools=[{"type": "function", **FUNCTION}])
    assert flat.tools == chat.tools
    assert asked(CHAT, tools=flat.tools, tool_choice="none").tools is None
    assert asked(COMPLETIONS, prompt=[5, 6]).prompt == asked(COMPLETIONS, prompt=[[5, 6]]).prompt
    assert asked(COMPLETIONS, prompt=["x"]).prompt == "x"


# Histories.

SAID = "The colour of the moon is violet, as you know."
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def call_with(arguments: Any) -> dict[str, Any]:
    return CALL | {"function": {"name": "f", "arguments": arguments}}


def message(**fields: Any) -> dict[str, Any]:
    (only,) = messages.of_chat([{"role": "assistant", "content": SAID} | fields])
    return only


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_calls": None},
        {"tool_calls": []},
        {"refusal": None, "audio": None, "function_call": None, "annotations": None},
        {"content": [{"type": "text", "text": SAID}]},
        {"content": [{"type": "text", "text": SAID[:23]}, {"type": "text", "text": SAID[23:]}]},
        {"content": [{"type": "refusal", "refusal": SAID}]},
        {"content": None, "refusal": SAID},
        {"id": "17", "opts": {"visible": False}},
    ],
)
def test_a_message_reaches_the_template_as_it_was_said(fields: dict[str, Any]) -> None:
    assert message(**fields) == {"role": "assistant", "content": SAID}


def test_a_text_beside_calls_stays_and_arguments_are_what_they_are() -> None:
    for arguments, right in (
        ("{}", {}),
        ("", {}),
        (None, {}),
        ('{"x": 1}', {"x": 1}),
        ({"x": 1}, {"x": 1}),
        ("{oops", "{oops"),
        ("[1]", "[1]"),
    ):
        told = message(tool_calls=[call_with(arguments)])
        assert told["content"] == SAID
        assert told["tool_calls"] == [call_with(right)]
    assert message(content=None, tool_calls=[CALL])["content"] == ""
    assert message(name="bob", reasoning_content="hm")["reasoning_content"] == "hm"


def test_what_is_no_message_is_refused_by_its_place() -> None:
    for wrong, told in (
        ({"content": "x"}, r"messages\[1\] must have a role"),
        ({"role": "user"}, r"messages\[1\].content must be a text"),
        ({"role": "user", "content": 5}, r"messages\[1\].content must be a text"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "no images"),
        ({"role": "user", "content": ["x"]}, r"messages\[1\].content\[0\]"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "without function_call"),
        ({"role": "assistant", "tool_calls": {}}, r"messages\[1\].tool_calls must be a list"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, r"tool_calls\[0\] must be a func"),
        ({"role": "assistant", "tool_calls": [call_with(5)]}, "arguments must be a text"),
    ):
        with pytest.raises(RefusedError, match=told):
            messages.of_chat([*HELLO, wrong])


def test_a_responses_items_are_a_history_too() -> None:
    told = messages.of_response(
        [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [
                {"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"x": 1}'},
            {"type": "function_call_output", "call_id": "a", "output": "none"},
        ],
        "Be brief.",
    )  # fmt: skip
    assert told == [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [
            call_with({"x": 1})]},
        {"role": "tool", "content": "none", "tool_call_id": "a"},
    ]  # fmt: skip
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages.of_response(parts, None) == [{"role": "user", "content": "ab"}]
    for wrong in ([{"type": "item_reference", "id": "x"}], [], 5, [{"type": "input_image"}],
                  [{"type": []}]):  # fmt: skip
        with pytest.raises(RefusedError, match="input"):
            messages.of_response(wrong, None)


def test_tokens_are_those_that_the_template_gives() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    prompts = Prompts(tokenizer, 400, VOCABULARY, parses_calls=False)
    history = [*HELLO, {"role": "assistant", "content": SAID.replace(" ", "_")}]
    whole = tokenizer.apply_chat_template(history, add_generation_prompt=True, return_tensors="pt")
    assert torch.equal(prompts.read(asked(CHAT, messages=history)), whole["input_ids"])
    for more in ({"tool_calls": None}, {"tool_calls": []}, {"tool_calls": [CALL]}):
        again = [history[0], history[1] | more]
        assert torch.equal(prompts.read(asked(CHAT, messages=again)), whole["input_ids"])
    assert prompts.read(asked(COMPLETIONS, prompt=[5, 6])).tolist() == [[5, 6]]
    for wrong, told in (
        (asked(COMPLETIONS, prompt=[VOCABULARY]), "tokens from 0 to 96"),
        (asked(COMPLETIONS, prompt=[3] * 400), "shorter than 400"),
        (asked(COMPLETIONS, logit_bias={str(VOCABULARY): 1}), "below 97"),
        (asked(CHAT, tools=[{"type": "function", "function": FUNCTION}]), "tools must be left out"),
    ):
        with pytest.raises(RefusedError, match=told):
            prompts.check(wrong)
    for prompt, told in (("\ud800", "Unicode"), ("", "has none"), ("x" * 400, "got 400")):
        with pytest.raises(RefusedError, match=told):
            prompts.read(Asked(COMPLETIONS, prompt=prompt))


def test_without_a_chat_template_a_chat_is_plain_words() -> None:
    """Those of ``kvswap ask``, so that a document that was ingested for it is gone on from."""
    from kvswap_torch.cli.prompt import make_prompt

    tokenizer = character_tokenizer()
    prompts = Prompts(tokenizer, 400, VOCABULARY, parses_calls=False)
    history = [{"role": "system", "content": "abc"}, {"role": "user", "content": "who?"}]
    plain = make_prompt("auto", tokenizer)
    right = plain.prefix_ids(tokenizer, "abc") + plain.question_ids(tokenizer, "who?", 0)
    assert prompts.read(asked(CHAT, messages=history))[0].tolist() == right
    history += [{"role": "assistant", "content": "me"}, {"role": "user", "content": "why?"}]
    right += tokenizer("me")["input_ids"] + plain.question_ids(tokenizer, "why?", 1)
    assert prompts.read(asked(CHAT, messages=history))[0].tolist() == right
    assert plain_words(HELLO) == "Question: hello\nAnswer:"
    for wrong in ({"role": "tool", "content": "x"}, {"role": "assistant", "tool_calls": [CALL]}):
        with pytest.raises(RefusedError, match=r"messages\[1\] must be words of system"):
            prompts.check(asked(CHAT, messages=[*HELLO, wrong]))
    with pytest.raises(RefusedError, match="tools must be left out"):
        prompts.check(asked(CHAT, tools=[{"type": "function", "function": FUNCTION}]))


def test_a_prompt_that_is_far_too_long_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, seen = character_tokenizer(), []
    prompts = Prompts(tokenizer, 400, VOCABULARY, parses_calls=False)
    usual = type(tokenizer).__call__

    def counting(self: Any, text: str, **rest: Any) -> Any:
        seen.append(len(text))
        return usual(self, text, **rest)

    monkeypatch.setattr(type(tokenizer), "__call__", counting)
    with pytest.raises(RefusedError, match="got 8388608 bytes"):
        prompts.read(Asked(COMPLETIONS, prompt="x" * (8 << 20)))
    assert sum(seen) <= limits.PIECE_BYTES


# Penalties.


def test_penalties_are_over_the_answer_alone() -> None:
    ids = torch.tensor([[4, 4, 4, 5, 7, 7, 6]])  # a prompt of 4, an answer of 3
    scores = torch.randn(1, 9, generator=torch.Generator().manual_seed(1))
    for frequency, presence in ((0.5, 0.0), (0.0, 1.5), (-2.0, 0.25), (0.1, -2.0)):
        once = asked(CHAT, frequency_penalty=frequency, presence_penalty=presence)
        told = Penalties(once, 4)(ids, scores)
        right = scores.clone()
        right[0, 7] -= 2 * frequency + presence
        right[0, 6] -= frequency + presence
        torch.testing.assert_close(told, right)
    biased = Penalties(asked(CHAT, logit_bias={"2": -100}), 4)
    assert biased(ids, scores)[0, 2] == scores[0, 2] - 100
    assert not Penalties(asked(CHAT), 4).is_needed


# JSON.

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(allow_nan=False,
    allow_infinity=False), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.text(max_size=4), inner, max_size=4), max_leaves=20)  # fmt: skip


@given(values, st.booleans())
def test_json_is_read_as_it_is(value: Any, is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    try:
        right = json.loads(text.decode("utf-8"))
    except UnicodeDecodeError:
        with pytest.raises(RefusedError):
            parsed(text, "it must be JSON", 1000)
        return
    assert parsed(text, "it must be JSON", 1000) == right


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"[" * 101 + b"]" * 101, "at most 100 levels"),
        (b'{"a":' * 101 + b"1" + b"}" * 101, "at most 100 levels"),
        (b"[" + b"[]," * 1000 + b"[]]", "at most 1000 values"),
        (b"[" + b'"",' * 5000 + b'""]', "at most 1000 values"),
        (b'["' + b'\\"' * 5000 + b'", ' + b"[" * 101 + b"]" * 101 + b"]", "at most 100 levels"),
        (b'["\\\\", ' + b"[" * 101 + b"]" * 101 + b"]", "at most 100 levels"),
        (b"NaN", "NaN is no number"),
        (b"-Infinity", "is no number"),
        (b"1e999", "infinity"),
        (b"1" * 5000, "must be JSON"),
        (b'"a', "must be JSON"),
        ('"a"'.encode("utf-16"), "must be JSON"),
        (b"\xff", "must be JSON"),
        (b"", "must be JSON"),
    ],
)
def test_json_that_is_refused(text: bytes, told: str) -> None:
    with pytest.raises(RefusedError, match=told):
        parsed(text, "it must be JSON", 1000)


def test_brackets_in_a_text_are_text() -> None:
    text = "[" * 5000 + ', "\\' + "{" * 5000
    assert parsed(json.dumps({"prompt": text}).encode(), "it must be JSON", 1000)["prompt"] == text
    assert math.isclose(parsed(b"1.5e3", "it must be JSON", 10), 1500)


def test_a_template_gets_its_own_variables_alone() -> None:
    """What `apply_chat_template` itself takes is not a client's to say."""
    names = inspect.signature(transformers.PreTrainedTokenizerBase.apply_chat_template).parameters
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    for name, each in names.items():
        if each.kind in kinds or name == "documents":  # templates' own
            continue
        with pytest.raises(RefusedError, match=f"without {name}"):
            asked(CHAT, chat_template_kwargs={name: 1})
    assert asked(CHAT, chat_template_kwargs={"enable_thinking": False}).template
