"""Whatever is sent, a request has one reply, in OpenAI's form, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvswap_torch.hf.serving import seam
from kvswap_torch.hf.serving.access import Access
from kvswap_torch.hf.serving.asked import Asked
from kvswap_torch.hf.serving.counts import Counts
from kvswap_torch.hf.serving.fields import CHAT, COMPLETIONS, FIELDS, PATHS, RESPONSES
from kvswap_torch.hf.serving.front import Front
from kvswap_torch.hf.serving.health import Health
from kvswap_torch.hf.serving.limits import Limits
from kvswap_torch.hf.serving.line import Line, Turn
from kvswap_torch.hf.serving.prompts import Prompts
from kvswap_torch.hf.serving.sampling import generation_config
from tests.python.serving_process import TEMPLATE
from tests.python.tiny_models import VOCABULARY, character_tokenizer, tiny_model

BOUNDS = Limits(max_context=64, answer_seconds=10.0)


class Answers:
    """All that a server does with a request but for the model."""

    def __init__(self) -> None:
        tokenizer = character_tokenizer()
        tokenizer.chat_template = TEMPLATE
        self._prompts = Prompts(tokenizer, BOUNDS.max_context, VOCABULARY, parses_calls=True)
        self._model = tiny_model("llama")
        self.asked: Asked | None = None

    def check(self, asked: Asked) -> None:
        self._prompts.check(asked)

    async def answer(self, asked: Asked, turn: Turn, request_id: str) -> Any:
        try:
            ids = await asyncio.to_thread(self._prompts.read, asked)
            generation_config(self._model, asked, BOUNDS.max_context - ids.shape[1]).validate()
        except Exception as error:
            raise seam._refusal(error) from error
        self.asked = asked

        async def reply(scope: dict, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})

        return reply


class Desk:
    """A server without sockets."""

    def __init__(self, folder: Path) -> None:
        counts = Counts()
        self.line, self.answers = Line(4), Answers()
        health = Health(self.line, counts, {"the store": folder}, lambda: 0)
        access = Access((), ("localhost",), False)
        self.front = Front(self.answers, "tiny", self.line, counts, access, health, BOUNDS)

    def ask(self, method: str, path: str, body: bytes, **headers: str) -> tuple[int, bytes]:
        given = {"host": "localhost", "content-type": "application/json"} | headers
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in given.items()],
        }
        pieces = [body[:7], body[7:]]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if pieces:
                piece = pieces.pop(0)
                return {"type": "http.request", "body": piece, "more_body": bool(pieces)}
            await asyncio.sleep(3600)
            raise AssertionError

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        asyncio.run(self.front(scope, receive, send))
        starts = [each for each in sent if each["type"] == "http.response.start"]
        assert len(starts) == 1 and sent[0] is starts[0] and not sent[-1].get("more_body")
        assert self.line.running == self.line.waiting == self.front._bodies.bytes == 0
        return starts[0]["status"], b"".join(each.get("body", b"") for each in sent)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return Desk(tmp_path_factory.mktemp("store"))


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([1e-300, 1e300, 10**30, -1, 0, "auto", "user", "text", "function", "\ud800"])
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=4) | st.sampled_from(["type", "text", "role"]), inner,
                      max_size=3),
    max_leaves=8,
)  # fmt: skip
messages = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "assistant", "tool", "system"]) | anything,
            "content": st.text("abc", max_size=9) | anything,
            "tool_calls": anything,
            "name": anything,
            "refusal": anything,
            "type": st.sampled_from(["message", "function_call", "reasoning"]) | anything,
            "output": anything,
            "arguments": anything,
        },
    ),
    max_size=3,
)
PROMPTS = {CHAT: "messages", COMPLETIONS: "prompt", RESPONSES: "input"}


@st.composite
def requests(draw: Any) -> tuple[str, bytes]:
    path = draw(st.sampled_from(PATHS))
    names = st.sampled_from(sorted(FIELDS[path])) | st.text(max_size=4)
    body = draw(st.dictionaries(names, anything, max_size=4))
    likely = st.just([{"role": "user", "content": "abc"}]) if path == CHAT else st.just("abc")
    body[PROMPTS[path]] = draw(likely | messages | anything)
    text = json.dumps(body).encode("utf-8", "surrogatepass")
    cut = draw(st.none() | st.integers(0, len(text)))
    return path, text[:cut]


@settings(max_examples=120)
@given(requests())
@example((COMPLETIONS, b'{"prompt": "abc", "temperature": 1e-300}'))
@example((COMPLETIONS, b'{"prompt": "abc", "generation_config": "{\\"top_k\\": 1e300}"}'))
@example((COMPLETIONS, b'{"prompt": "abc", "seed": 99999999999999999999999999}'))
@example((CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}'))
def test_any_body_has_one_reply_that_is_no_failure_of_ours(
    desk: Desk, request_: tuple[str, bytes]
) -> None:
    status, told = desk.ask("POST", *request_)
    assert status in (200, 400, 404), told
    assert len(told) < 2000
    if status != 200:
        error = json.loads(told)["error"]
        assert error["message"].isprintable() and error["type"] == "error"


@given(
    st.sampled_from(["GET", "POST", "PUT", "\x1b"]),
    st.sampled_from([*PATHS, "/health", "/ready", "/metrics", "/v1/models", "/v1/models/tiny", "/"])
    | st.text(max_size=9),
    st.dictionaries(
        st.sampled_from(["host", "content-type", "content-length", "authorization",
                         "x-request-id"]),
        st.text(st.characters(max_codepoint=255), max_size=9), max_size=2),
)  # fmt: skip
def test_any_head_has_one_reply(
    desk: Desk, method: str, path: str, headers: dict[str, str]
) -> None:
    status, _ = desk.ask(method, path, b'{"prompt": "abc"}', **headers)
    assert status in (200, 400, 403, 404, 405, 413, 415)


def test_a_failure_of_ours_is_one_reply_too(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(asked: Asked) -> None:
        raise AssertionError("of ours")

    monkeypatch.setattr(desk.answers, "check", fail)
    status, told = desk.ask("POST", COMPLETIONS, b'{"prompt": "abc"}')
    assert status == 500 and "its log" in json.loads(told)["error"]["message"]


def test_the_loop_goes_on_while_a_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the event loop it would wait for what only the loop can do."""
    loop_runs = threading.Event()

    class Slow:
        def read(self, asked: Asked) -> torch.Tensor:
            assert loop_runs.wait(60), "the loop waits for the tokenizer"
            return torch.ones(1, 3)

    answers = object.__new__(seam.Answers)
    monkeypatch.setattr(answers, "_prompts", Slow(), raising=False)

    async def both() -> torch.Tensor:
        reading = asyncio.ensure_future(answers.read(Asked(COMPLETIONS, prompt="abc")))
        await asyncio.sleep(0)
        loop_runs.set()
        return await reading

    assert asyncio.run(both()).shape == (1, 3)
