"""Several answers, several prompts, and how probable tokens are, as OpenAI's API has them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.python.serving_process import TEMPLATE, Served, make_model
from tests.python.test_serving import document, send
from tests.python.tiny_models import EOS, VOCABULARY, has_native

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread_throughout"),
]
TOKENS = 6
BOOK = document(1)


def byte_tokenizer() -> Any:
    """A printable character a token, quotes and braces too, as usual tokenizers have them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = ["\u0120", *map(chr, range(ord("!"), ord("~")))]  # the first is a blank
    names = ["<pad>", "<eos>", "<bos>", *letters]
    assert len(names) == VOCABULARY
    made = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class World:
    """A served model, and the same one in memory."""

    def __init__(self, folder: Path) -> None:
        self.model, _ = make_model(folder / "model")
        self.tokenizer = byte_tokenizer()
        self.tokenizer.save_pretrained(folder / "model")
        self.served = Served(folder / "model")
        self.served.start(store=str(folder / "store"))

    def ask(self, **fields: Any) -> dict[str, Any]:
        path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
        body = {"max_tokens": TOKENS, "temperature": 0} | fields
        status, told = send(self.served, "POST", path, body)
        assert status == 200, told
        return events(told) if fields.get("stream") else json.loads(told)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text)["input_ids"]

    def scores(self, ids: list[int]) -> torch.Tensor:
        """``[tokens, vocabulary]`` log-probabilities of what follows each."""
        with torch.no_grad():
            return self.model(torch.tensor([ids])).logits[0].log_softmax(-1)

    def answer(self, ids: list[int]) -> list[int]:
        answer: list[int] = []
        while len(answer) < TOKENS and EOS not in answer:
            answer.append(int(self.scores(ids + answer)[-1].argmax()))
        return answer

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def events(told: str) -> list[dict[str, Any]]:
    assert told.endswith("data: [DONE]\n\n")
    return [json.loads(line[6:]) for line in told.splitlines() if line.startswith("data: {")]


def streamed(pieces: list[dict[str, Any]], text: Callable[[dict], str]) -> list[str]:
    """Each choice's text, put together."""
    found: dict[int, str] = {}
    for piece in pieces:
        for choice in piece["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + (text(choice) or "")
    return [found[i] for i in range(len(found))]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("several"))
    yield made
    assert made.served.end() == 0
    made.served.close()


def test_several_answers_to_one_prompt(world: World) -> None:
    right = world.text(world.answer(world.ids(BOOK + "ab")))
    reply = world.ask(prompt=BOOK + "ab", n=3)
    assert [each["text"] for each in reply["choices"]] == [right] * 3
    assert [each["index"] for each in reply["choices"]] == [0, 1, 2]
    usage = reply["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (82, 3 * TOKENS)
    assert usage["total_tokens"] == 82 + 3 * TOKENS
    again = world.ask(prompt=BOOK + "cd", n=2)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 80, "what was saved before"
    pieces = world.ask(prompt=BOOK + "ab", n=2, stream=True, stream_options={"include_usage": True})
    assert streamed(pieces, lambda choice: choice["text"]) == [right] * 2
    assert pieces[-1]["choices"] == [] and pieces[-1]["usage"]["completion_tokens"] == 2 * TOKENS
    one = world.ask(prompt=BOOK + "ab")
    assert one["choices"][0]["text"] == right
    assert one["usage"]["prompt_tokens_details"]["cached_tokens"] >= 80

    messages = [{"role": "user", "content": "hello"}]
    right = world.text(world.answer(world.ids("<hello>")))
    reply = world.ask(messages=messages, n=2)
    assert [each["message"]["content"] for each in reply["choices"]] == [right] * 2
    assert {each["finish_reason"] for each in reply["choices"]} == {"length"}
    pieces = world.ask(messages=messages, n=2, stream=True)
    assert streamed(pieces, lambda choice: choice["delta"].get("content")) == [right] * 2


def test_sampled_answers_differ_and_a_seed_has_them_again(world: World) -> None:
    hot = {"prompt": "xyz" * 20, "temperature": 2.0, "n": 4, "seed": 7, "max_tokens": 12}
    told = [each["text"] for each in world.ask(**hot)["choices"]]
    assert len(set(told)) == 4
    assert [each["text"] for each in world.ask(**hot)["choices"]] == told
    # Each ends where its own stop text is; the others go on.
    stop = told[1][4]
    ended = [each["text"] for each in world.ask(**hot, stop=stop)["choices"]]
    assert ended == [text.split(stop)[0] for text in told]
    pieces = world.ask(**hot, stop=stop, stream=True)
    assert streamed(pieces, lambda choice: choice["text"]) == ended


def test_prompts_of_a_list_are_answered_each(world: World) -> None:
    prompts = [BOOK + "x", "hello", BOOK]
    right = [world.text(world.answer(world.ids(each))) for each in prompts]
    for given in (prompts, [world.ids(each) for each in prompts]):
        reply = world.ask(prompt=given)
        assert [each["text"] for each in reply["choices"]] == right
        assert reply["usage"]["prompt_tokens"] == sum(map(len, prompts))
    pieces = world.ask(prompt=prompts, n=2, stream=True)
    assert streamed(pieces, lambda choice: choice["text"]) == [each for each in right for _ in "ab"]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_completion_and_its_prompt(world: World, stream: bool) -> None:
    ids = world.ids(BOOK)
    answer = world.answer(ids)
    scores = world.scores(ids + answer)
    given = {"prompt": ids, "logprobs": 2, "echo": True, "stream": stream}
    reply = world.ask(**given)
    listed: dict[str, list[Any]] = {}
    for piece in reply if stream else [reply]:
        for name, values in (piece["choices"][0].get("logprobs") or {}).items():
            listed.setdefault(name, []).extend(values)
    text = BOOK + world.text(answer)
    if stream:
        assert streamed(reply, lambda choice: choice["text"]) == [text]
    else:
        assert reply["choices"][0]["text"] == text
    whole = ids + answer
    assert listed["tokens"] == [world.tokenizer.decode([each]) for each in whole]
    assert listed["text_offset"] == list(range(len(whole)))
    assert listed["token_logprobs"][0] is None and listed["top_logprobs"][0] is None
    right = [float(scores[i, token]) for i, token in enumerate(whole[1:])]
    assert listed["token_logprobs"][1:] == pytest.approx(right, abs=1e-4)
    for i, best in enumerate(listed["top_logprobs"][1:]):
        values, tokens = scores[i].topk(2)
        pairs = zip(tokens.tolist(), values.tolist(), strict=True)
        wanted = {world.tokenizer.decode([each]): value for each, value in pairs}
        wanted.setdefault(world.tokenizer.decode([whole[i + 1]]), right[i])
        assert best == pytest.approx(wanted, abs=1e-4)


def test_a_prompt_alone_is_scored(world: World) -> None:
    """As log-likelihoods of choices are asked for: of every token, and whether it is the best."""
    ids = world.ids("abcabcabc")
    reply = world.ask(prompt=[ids, ids[:3]], echo=True, logprobs=1, max_tokens=0)
    scores = world.scores(ids)
    for choice, tokens in zip(reply["choices"], (ids, ids[:3]), strict=True):
        told = choice["logprobs"]["token_logprobs"]
        assert told[1:] == pytest.approx(
            [float(scores[i, token]) for i, token in enumerate(tokens[1:])], abs=1e-4
        )
        assert choice["text"] == world.text(tokens)
        best = [max(each.values()) for each in choice["logprobs"]["top_logprobs"][1:]]
        assert best == pytest.approx(scores[: len(best)].max(-1).values.tolist(), abs=1e-4)
    assert reply["usage"]["completion_tokens"] == 0


def test_logprobs_of_a_chat(world: World) -> None:
    messages = [{"role": "user", "content": "hello"}]
    ids = world.ids("<hello>")
    answer = world.answer(ids)
    scores = world.scores(ids + answer)[len(ids) - 1 :]
    reply = world.ask(messages=messages, logprobs=True, top_logprobs=3, n=2)
    for choice in reply["choices"]:
        content = choice["logprobs"]["content"]
        assert [each["token"] for each in content] == [world.tokenizer.decode([t]) for t in answer]
        for i, each in enumerate(content):
            assert each["logprob"] == pytest.approx(float(scores[i, answer[i]]), abs=1e-4)
            assert bytes(each["bytes"]).decode() == each["token"]
            best = [one["logprob"] for one in each["top_logprobs"]]
            assert best == pytest.approx(scores[i].topk(3).values.tolist(), abs=1e-4)
    pieces = world.ask(messages=messages, logprobs=True, stream=True)
    told = [
        each["token"]
        for piece in pieces
        for choice in piece["choices"]
        for each in (choice.get("logprobs") or {}).get("content", ())
    ]
    assert told == [world.tokenizer.decode([each]) for each in answer]


def test_what_is_too_much_is_refused(world: World) -> None:
    for fields, words in (
        ({"n": 17}, "n must be a whole number from 1 to 16"),
        ({"prompt": ["a"] * 129}, "at most 128 prompts"),
        ({"prompt": ["a"] * 9, "n": 16}, "at most 128 prompts"),
        ({"logprobs": 21}, "logprobs must be a whole number from 0 to 20"),
        ({"logprobs": 20, "max_tokens": 2000, "n": 16}, "at most 500000 numbers"),
        ({"prompt": ["a", ""]}, "must have tokens"),
        ({"prompt": ["a", 5]}, "prompt must be a text, a list of tokens"),
        ({"max_tokens": 0}, "where nothing is echoed"),
    ):
        body = {"prompt": "x", "max_tokens": 1} | fields
        status, told = send(world.served, "POST", "/v1/completions", body)
        assert (status, words in told) == (400, True), (fields, told)
    body = {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}
    status, told = send(world.served, "POST", "/v1/chat/completions", body)
    assert status == 400 and "top_logprobs must come with logprobs" in told


# Answers that are JSON.

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "sure": {"type": "boolean"}},
    "required": ["colour", "sure"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_of_its_schema(world: World, stream: bool) -> None:
    pytest.importorskip("llguidance")
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    ask = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "stream": stream}
    for more in ({}, {"n": 3, "temperature": 1.5, "seed": 5}):
        reply = world.ask(response_format=named, **(ask | more))
        if stream:
            texts = streamed(reply, lambda choice: choice["delta"].get("content"))
        else:
            texts = [each["message"]["content"] for each in reply["choices"]]
        assert len(texts) == more.get("n", 1)
        for text in texts:
            told = json.loads(text)
            assert told["colour"] in ("red", "blue") and isinstance(told["sure"], bool)
            assert set(told) == {"colour", "sure"}
    body = {"input": "hi", "temperature": 0, "max_output_tokens": 400}
    body["text"] = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
    status, told = send(world.served, "POST", "/v1/responses", body)
    (item,) = json.loads(told)["output"]
    assert status == 200 and set(json.loads(item["content"][0]["text"])) == {"colour", "sure"}


def test_a_schema_that_is_none_is_refused(world: World) -> None:
    pytest.importorskip("llguidance")
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    for schema in ({"type": "nonsense"}, {"$ref": "#/nowhere"}, {"pattern": "(", "type": "string"}):
        body["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
        status, told = send(world.served, "POST", "/v1/chat/completions", body)
        assert status == 400 and "response_format must have a schema that is known" in told, told
    body["response_format"]["json_schema"]["schema"] = {"title": "x" * 70_000}
    status, told = send(world.served, "POST", "/v1/chat/completions", body)
    assert status == 400 and "at most 65536 bytes" in told


def test_a_schema_that_takes_too_much_is_its_clients_fault(world: World) -> None:
    """It is known, and too complex once an answer is held to it; others are answered as before."""
    pytest.importorskip("llguidance")
    field = {"type": "string", "pattern": "^[a-z]{1,40}$"}
    schema = {"type": "object", "properties": {f"field{i}": field for i in range(900)}}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    right = send(world.served, "POST", "/v1/chat/completions", body | {"temperature": 0})
    body["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    status, told = send(world.served, "POST", "/v1/chat/completions", body)
    assert status in (200, 400) and (status == 200 or "response_format" in told), told
    del body["response_format"]
    again = send(world.served, "POST", "/v1/chat/completions", body | {"temperature": 0})
    choices = [json.loads(each[1])["choices"] for each in (right, again)]
    assert choices[0] == choices[1]


def test_without_llguidance_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from kvswap_torch.hf.serving.grammar import Grammars
    from kvswap_torch.hf.serving.refusal import RefusedError

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RefusedError, match=r"pip install 'kvswap_torch\[json\]'") as caught:
        Grammars(None, 10, [1]).check({"type": "object"})
    assert caught.value.status == 400
