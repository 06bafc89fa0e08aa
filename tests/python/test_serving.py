"""`kvswap serve` as a client of OpenAI's API sees it."""

from __future__ import annotations

import errno
import http.client
import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers
from transformers import DynamicCache
from typer.testing import CliRunner

from kvswap_torch import ConfigError, KVSwapError, SwapConfig
from kvswap_torch.cli.app import app
from kvswap_torch.cli.serve import read_keys
from kvswap_torch.config import Summary, UserRetention
from kvswap_torch.errors import StorageError
from kvswap_torch.hf.serving import seam
from kvswap_torch.hf.serving.server import Server, ServerOptions, is_local
from tests.python.serving_process import Served, make_model
from tests.python.tiny_models import has_native

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]
TOKENS = 8


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any, Served]]:
    folder = tmp_path_factory.mktemp("served")
    model, tokenizer = make_model(folder)
    served = Served(folder)
    yield model, tokenizer, served
    served.close()


@pytest.fixture
def served(tiny: tuple[Any, Any, Served]) -> Iterator[Served]:
    yield tiny[2]
    if tiny[2]._pid:
        assert tiny[2].end() == 0


@pytest.fixture
def expected(tiny: tuple[Any, Any, Served]) -> Callable[[str], str]:
    """The answer of the full cache in memory."""
    model, tokenizer, _ = tiny

    def answer(prompt: str, tokens: int = TOKENS) -> str:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            out = model.generate(ids, past_key_values=cache, do_sample=False, max_new_tokens=tokens)
        return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)

    return answer


def client(served: Served, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=served.address + "/v1", api_key="any", max_retries=0, timeout=120, **options
    )


def document(seed: int, tokens: int = 80) -> str:
    generator = torch.Generator().manual_seed(seed)
    letters = torch.randint(ord("A"), ord("z"), (tokens,), generator=generator)
    return "".join(map(chr, letters.tolist()))


def complete(asking: openai.OpenAI, prompt: str, **options: Any) -> Any:
    given = {"model": "tiny", "temperature": 0, "max_tokens": TOKENS}
    return asking.completions.create(prompt=prompt, **(given | options))


def test_all_ways_to_ask_and_the_second_question(
    served: Served, tmp_path: Path, expected: Callable
) -> None:
    assert served.start(store=str(tmp_path))["saved"] == 0
    asking, book = client(served), document(1)
    first = complete(asking, book + "ab")
    assert first.choices[0].text == expected(book + "ab")
    assert first.usage.prompt_tokens == 82
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    second = complete(asking, book + "xyz", stream=True)
    pieces = list(second)
    assert "".join(piece.choices[0].text for piece in pieces) == expected(book + "xyz")
    assert pieces[-1].usage.prompt_tokens_details.cached_tokens == 80

    messages = [{"role": "user", "content": book}]
    options = {"model": "tiny", "temperature": 0, "messages": messages, "max_tokens": TOKENS}
    chat = asking.chat.completions.create(**options)
    assert chat.choices[0].message.content == expected(f"<{book}>")
    assert chat.choices[0].finish_reason == "length"
    pieces = list(asking.chat.completions.create(**options, stream=True))
    told = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert told == expected(f"<{book}>")
    assert pieces[-1].usage.prompt_tokens_details.cached_tokens == 81
    options = {"model": "tiny", "input": book, "temperature": 0, "max_output_tokens": TOKENS}
    response = asking.responses.create(**options)
    assert response.output_text == expected(f"<{book}>")
    assert response.usage.input_tokens_details.cached_tokens == 81
    events = list(asking.responses.create(**options, stream=True))
    assert events[-1].response.usage.input_tokens_details.cached_tokens == 81
    assert events[-1].response.output_text == expected(f"<{book}>")

    assert [model.id for model in asking.models.list()] == ["tiny"]
    assert json.loads(served.get("/health"))["status"] == "ok"
    told = served.metrics()
    assert told["kvswap_hits_total"] == 4 and told["kvswap_misses_total"] == 2
    assert told['kvswap_requests_total{status="200"}'] == 6
    assert told["kvswap_saves_total"] == told["kvswap_store_caches"] == 2
    assert told["kvswap_cached_tokens_total"] == 80 + 3 * 81
    assert told["kvswap_written_bytes_total"] > 0 < told["kvswap_store_bytes"]


@pytest.mark.parametrize(("frequency", "presence"), [(0.1, 0), (1.5, 0), (0, 2), (-1, -2)])
def test_penalties_are_openais(
    tiny: tuple[Any, Any, Served], served: Served, tmp_path: Path, frequency: float, presence: float
) -> None:
    served.start(store=str(tmp_path))
    model, tokenizer, _ = tiny
    prompt, answer = "aabbcc" * 8, []
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    for _ in range(16):
        with torch.no_grad():
            scores = model(torch.cat([ids, torch.tensor([answer], dtype=torch.int64)], 1)).logits
        scores = scores[0, -1]
        for token in set(answer):
            scores[token] -= frequency * answer.count(token) + presence
        answer.append(int(scores.argmax()))
    asked = {"frequency_penalty": frequency, "presence_penalty": presence, "max_tokens": 16}
    told = complete(client(served), prompt, **asked).choices[0].text
    assert told == tokenizer.decode(answer, skip_special_tokens=True)


def test_killed_and_started_again(served: Served, tmp_path: Path, expected: Callable) -> None:
    served.start(store=str(tmp_path))
    book = document(2)
    complete(client(served), book + "ab")
    while served.metrics()["kvswap_store_caches"] == 0:
        time.sleep(0.01)
    assert served.end(signal.SIGKILL) == signal.SIGKILL
    assert served.start(store=str(tmp_path))["saved"] == 1
    again = complete(client(served), book + "cd")
    assert again.usage.prompt_tokens_details.cached_tokens == 80
    assert again.choices[0].text == expected(book + "cd")


def test_clients_at_once_get_what_they_would_get_one_by_one(
    served: Served, tmp_path: Path, expected: Callable
) -> None:
    served.start(store=str(tmp_path))
    asking = client(served)
    prompts = [document(number % 3) + "abcde"[: number // 3 % 5 + 1] for number in range(20)]

    def ask(prompt: str) -> str:
        return complete(asking, prompt).choices[0].text

    with ThreadPoolExecutor(20) as clients:
        answers = list(clients.map(ask, prompts))
    serial = [ask(prompt) for prompt in prompts]
    assert answers == serial == [expected(prompt) for prompt in prompts]


def test_the_signal_ends_the_running_answer_with_its_step_and_saves(
    served: Served, tmp_path: Path, expected: Callable
) -> None:
    served.start(store=str(tmp_path), prefill_chunk=64)
    book = document(3, 200)
    # Longer than it takes to wait in line and to signal, on any machine.
    with complete(client(served), book, stream=True, max_tokens=600) as stream:
        first = next(iter(stream))
        waiting = ThreadPoolExecutor(1)
        refused = waiting.submit(complete, client(served), book + "x")
        while served.metrics()["kvswap_waiting"] == 0:
            time.sleep(0.01)
        served.signal(signal.SIGTERM)
        rest = list(stream)
    told = "".join(piece.choices[0].text for piece in (first, *rest))
    whole = expected(book, 600)
    assert whole.startswith(told) and told != whole
    assert rest[-1].choices[0].finish_reason == "length"
    with pytest.raises(openai.InternalServerError, match="the server ends"):
        refused.result()
    waiting.shutdown()
    assert served.wait() == 0
    assert served.start(store=str(tmp_path))["saved"] == 1


def test_more_than_may_wait_are_sent_away(served: Served, tmp_path: Path) -> None:
    served.start(store=str(tmp_path), queue=1)
    asking = client(served)
    with complete(asking, document(4), stream=True, max_tokens=600) as stream:
        next(iter(stream))
        waiting = ThreadPoolExecutor(1)
        second = waiting.submit(complete, asking, "ab")
        while served.metrics()["kvswap_waiting"] == 0:
            time.sleep(0.01)
        with pytest.raises(openai.InternalServerError, match="at most 1 requests may wait"):
            complete(asking, "cd")
    assert second.result().choices[0].text
    waiting.shutdown()


def test_clients_that_hang_up(served: Served, tmp_path: Path, expected: Callable) -> None:
    served.start(store=str(tmp_path), prefill_chunk=64)
    asking, book = client(served), document(5, 300)
    # In the answer, streamed; in the answer, not streamed; before the first token; in line.
    with complete(asking, book, stream=True, max_tokens=1000) as stream:
        next(iter(stream))
    address = served.address.removeprefix("http://").split(":")
    for seed, tokens in ((5, 1000), (6, 1000), (7, 1)):
        body = {"prompt": document(seed, 300), "max_tokens": tokens, "temperature": 0}
        connection = http.client.HTTPConnection(address[0], int(address[1]))
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
    for seed in (5, 6, 7):
        prompt = document(seed, 300)
        assert complete(asking, prompt).choices[0].text == expected(prompt)
    assert served.metrics()["kvswap_running"] == 0


BAD = [
    ("POST /v1/completions", {"prompt": "x" * 500}, 400, "shorter than 400 tokens"),
    ("POST /v1/completions", {"prompt": "x", "model": "gpt"}, 404, "must be 'tiny', got 'gpt'"),
    ("POST /v1/completions", {"prompt": "x", "n": 17}, 400, "n must be a whole number"),
    ("POST /v1/completions", {"prompt": ["x", 5]}, 400, "prompt must be a text"),
    ("POST /v1/completions", {"prompt": ""}, 400, "must have tokens"),
    ("POST /v1/completions", {"prompt": "x", "flavour": 1}, 400, "flavour must be left out"),
    ("POST /v1/completions", {"prompt": "x", "max_tokens": -1}, 400, "max_tokens must be a whole"),
    ("POST /v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "at least 1 token"),
    ("POST /v1/responses", {"input": "x", "max_output_tokens": 0}, 400, "at least 1 token"),
    ("POST /v1/completions", {"prompt": "x", "max_tokens": "a"}, 400, "a whole number"),
    ("POST /v1/completions", {"prompt": "x", "generation_config": '{"num_beams": 2}'}, 400,
     "num_beams must be left out"),
    ("POST /v1/completions", {"prompt": "x", "generation_config":
     '{"prompt_lookup_num_tokens": 2}'}, 400, "prompt_lookup_num_tokens must be left out"),
    ("POST /v1/completions", {"prompt": "x", "echo": 1}, 400, "echo must be true or false"),
    ("POST /v1/completions", {"prompt": "x", "logprobs": 21}, 400, "logprobs must be a whole"),
    ("POST /v1/responses", {"input": "x", "previous_response_id": "r"}, 400, "must be left out"),
    ("POST /v1/chat/completions", {"messages": [{"role": "user", "content": "x"}],
     "response_format": {"type": "regex"}}, 400, "response_format must be"),
    ("POST /v1/chat/completions", {"messages": [{"role": "user", "content": "x"}],
     "chat_template_kwargs": {"chat_template": "x"}}, 400, "without chat_template"),
    ("POST /v1/chat/completions", {"messages": [{"role": "system", "content": "x"}]}, 400,
     "chat template takes: no system here"),
    ("POST /v1/completions", b'{"prompt": "x", "max_tokens": 1e999}', 400, "infinity"),
    ("POST /v1/completions", b'{"prompt": ', 400, "must be JSON"),
    ("POST /v1/completions", b"[1]", 400, "a JSON object, got list"),
    ("POST /v1/completions", b"[" * 100_000, 400, "JSON of at most 50400 values"),
    ("POST /v1/completions", b"[" * 10_000, 400, "JSON of at most 100 levels"),
    ("POST /v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "tools": [{'
     b'"function": ' + b"[" * 500 + b"]" * 500 + b"}]}", 400, "JSON of at most 100 levels"),
    ("POST /v1/completions", {"prompt": "x", "generation_config": "[" * 10_000}, 400,
     "as text of at most 100 levels"),
    ("POST /v1/completions", {"prompt": "x", "generation_config": "[]"}, 400, "text, got list"),
    ("POST /v1/chat/completions", {}, 400, "messages"),
    ("POST /v1/chat/completions", {"messages": []}, 400, "is empty"),
    ("POST /v1/chat/completions", {"messages": [{"content": "x"}]}, 400, "role"),
    ("POST /v1/chat/completions", {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "x"}}]}]}, 400, "no images"),
    ("POST /v1/responses", {"input": [{"role": "user", "content": [
        {"type": "input_image", "image_url": "x"}]}]}, 400, "no images"),
    ("GET /v1/completions", None, 405, "POST"),
    ("POST /load_model", {"model": "x"}, 404, "there is no /load_model"),
    ("POST /reset", {}, 404, "there is no /reset"),
]  # fmt: skip


def test_bad_input_has_its_sentence(served: Served, tmp_path: Path) -> None:
    served.start(store=str(tmp_path), max_context=400)
    for request, body, status, words in BAD:
        told = send(served, *request.split(), body)
        assert (told[0], words in told[1]) == (status, True), (request, body, told)
    told = send(served, "POST", "/v1/completions", {"prompt": "x"}, {"Content-Type": "text/plain"})
    assert told[0] == 415
    told = send(served, "GET", "/metrics", None, {"Host": "evil.example"})
    assert told[0] == 403
    # The longest prompt there may be has an answer of one token.
    whole = complete(client(served), "x" * 399, max_tokens=50)
    assert whole.usage.completion_tokens == 1 and whole.choices[0].finish_reason == "length"
    refused = json.loads(send(served, "POST", "/v1/completions", {"prompt": "x" * 500})[1])
    assert refused["error"]["message"].startswith("the prompt must be shorter")


def send(
    served: Served, method: str, path: str, body: Any, headers: dict[str, str] | None = None
) -> tuple[int, str]:
    host, port = served.address.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port))
    data = body if isinstance(body, bytes | None) else json.dumps(body)
    connection.request(method, path, data, {"Content-Type": "application/json"} | (headers or {}))
    reply = connection.getresponse()
    told = reply.read().decode()
    connection.close()
    return reply.status, told


def test_keys(served: Served, tmp_path: Path) -> None:
    served.start(store=str(tmp_path), keys=["one", "two"])
    for key, status in (("one", 200), ("two", 200), ("three", 401), ("", 401)):
        told = send(served, "GET", "/metrics", None, {"Authorization": f"Bearer {key}"})
        assert told[0] == status
    assert send(served, "GET", "/health", None)[0] == 200


def test_only_this_machine_without_keys(tmp_path: Path) -> None:
    assert is_local("::1") and is_local("127.0.0.2") and is_local("localhost")
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        options = ServerOptions(name="x", store=tmp_path, store_limit_bytes=1, host=host)
        with pytest.raises(ConfigError, match="--api-key-file must be given"):
            Server(None, None, options, None)


@pytest.mark.parametrize(
    ("number", "status"), [(errno.ENOSPC, 507), (errno.EDQUOT, 507), (errno.EIO, 500)]
)
def test_the_status_says_whether_the_disk_is_full(number: int, status: int) -> None:
    assert seam._refusal(StorageError(number, "refused", "x")).status == status


def test_the_server_that_this_was_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert transformers.__version__.startswith("5.23.")
    assert set(seam.names()) == {name for wanted in seam.NAMES.values() for name in wanted}
    module = __import__("transformers.cli.serving.utils", fromlist=["utils"])
    monkeypatch.delattr(module, "GenerateManager")
    with pytest.raises(ImportError, match=r"that of 5\.23, and .* has not: .*GenerateManager"):
        seam.names()


def test_the_command(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: Server, started: Callable[[], None]) -> None:
        started()
        self.close()

    monkeypatch.setattr(Server, "run", run)
    store, keys = tmp_path / "store", tmp_path / "keys"
    words = ["serve", "--model", tiny_model_dir, "--store", store, "--port", "0", "--json"]
    words = [*map(str, words), "--host", "0.0.0.0"]

    def serve(*more: str) -> Any:
        return CliRunner().invoke(app, [*words, *more], catch_exceptions=False)

    keys.write_text("one\n\n two \n")
    assert read_keys(keys) == ("one", "two")
    done = serve("--api-key-file", str(keys))
    assert json.loads(done.stdout)["model"] == tiny_model_dir.name
    assert json.loads(done.stdout)["saved_caches"] == 0 and store.is_dir()
    keys.write_text("\n")
    asked = SwapConfig(summary=Summary(kind="none"), retention=UserRetention())
    asked.save(tmp_path / "keeps.json")
    for more, told in (
        (["--config", str(tmp_path / "keeps.json")], "--config: retention.policy must not be user"),
        ([], "--api-key-file must be given to listen on 0.0.0.0"),
        (["--api-key-file", str(keys)], "must have a key"),
        (["--continuous-batching"], "a paged cache of its own"),
        (["--store-limit", "x"], "--store-limit"),
        (["--model", str(tmp_path)], "--model: must be a model's folder"),
        (["--device", "mps"], "--device: must be cpu or cuda"),
        (["--host", "localhost", "--path", str(tmp_path / "no")], "--path: must be a directory"),
        (["--host", "localhost", "--kv-memory", "1KiB"], "kv_memory_bytes: must be at least"),
    ):
        with pytest.raises((KVSwapError, ValueError), match=told):
            serve(*more)
    assert "circle of trust" in CliRunner().invoke(app, ["serve", "--help"]).output
