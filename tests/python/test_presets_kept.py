"""Every preset saved, forked and served: what goes on from there is what never left.

`make presets-matrix` runs all on every model; `make test` one preset of each kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvswap_torch import ConfigError, KVSwapCache, SwapConfig
from kvswap_torch.cli.app import app
from kvswap_torch.config.nested import settings_of
from kvswap_torch.hf.serving.reuse import CacheOptions
from kvswap_torch.hf.serving.server import Server, ServerOptions
from kvswap_torch.keep import drops, drops_for_good
from kvswap_torch.preset import find
from tests.python.saved_conversation import goes_on
from tests.python.test_presets_generate import ALL, GQA, NAMES, model_of, small
from tests.python.tiny_models import character_tokenizer, greedy, has_native, prompt

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]
CELLS = [
    (name, ratio)
    for name in (NAMES if ALL else ("kvswap", "kvswap-int4", "dynakv", "prkv", "arkv"))
    for ratio in (GQA if ALL else (2,))
]
RETAINING = [name for name in NAMES if "retention.policy" in find(name).settings]
PADDING = (0, 9)
DOCUMENT, ANSWER = 80, 6  # tokens of what is served


def tight(name: str, model: Any) -> SwapConfig:
    """4 groups a step, so that most tokens are left out; the same in every run.

    With "verify" what is prefetched goes by measured times, and what clusters are packed by what
    is in memory.
    """
    return small(name, model, 4, **({"look_ahead": "trust"} if name == "dynakv" else {}))


@contextlib.contextmanager
def filled(name: str, ratio: int, tmp_path: Path, count: int) -> Iterator[tuple]:
    """A model, as many caches as asked for that have read and answered the same, and their text."""
    model = model_of(ratio)
    config = tight(name, model)
    inputs = prompt(2, 15 * config.group_tokens, padding=PADDING)
    with contextlib.ExitStack() as stack:
        caches = [stack.enter_context(KVSwapCache(model, tmp_path, config)) for _ in range(count)]
        texts = [greedy(model, inputs, each, tokens=ANSWER) for each in caches]
        assert all(torch.equal(text, texts[0]) for text in texts)
        yield model, caches, texts[0]


@pytest.mark.parametrize(("name", "ratio"), CELLS)
def test_a_saved_one_goes_on_in_another_cache(name: str, ratio: int, tmp_path: Path) -> None:
    with filled(name, ratio, tmp_path, 2) as (model, (never, cache), text):
        cache.save(tmp_path / "a")
        expected = goes_on(model, never, text, PADDING, tokens=12)
        with KVSwapCache.open(model, tmp_path / "a", path=tmp_path) as found:
            assert settings_of(found.driver.config) == settings_of(cache.driver.config)
            assert goes_on(model, found, text, PADDING, tokens=12) == expected
        assert goes_on(model, cache, text, PADDING, tokens=12) == expected


@pytest.mark.parametrize(("name", "ratio"), CELLS)
def test_both_branches_of_a_fork_go_on(name: str, ratio: int, tmp_path: Path) -> None:
    """Each with a question of its own, as caches that read it and were never forked."""
    with filled(name, ratio, tmp_path, 3) as (model, (cache, *never), text):
        asked = [torch.cat([text, prompt(2, 9, seed=seed)["input_ids"]], 1) for seed in (5, 6)]
        expected = [
            goes_on(model, each, question, PADDING, tokens=12)
            for each, question in zip(never, asked, strict=True)
        ]
        assert expected[0] != expected[1]
        with cache.fork() as fork:
            assert goes_on(model, fork, asked[0], PADDING, tokens=12) == expected[0]
            assert goes_on(model, cache, asked[1], PADDING, tokens=12) == expected[1]


@pytest.mark.parametrize("name", RETAINING)
def test_what_is_dropped_for_good_is_neither_saved_nor_forked(name: str, tmp_path: Path) -> None:
    model = model_of(2)
    config = tight(name, model)
    if not drops_for_good(config):
        with pytest.raises(
            ValueError, match="path: must be given where|must be attended without a path"
        ):
            KVSwapCache(model, config=config)
        return
    with KVSwapCache(model, config=config) as cache:
        greedy(model, prompt(1, 60), cache, tokens=4)
        for refused in (lambda: cache.save(tmp_path / "book"), cache.fork):
            with pytest.raises(ValueError, match="must have a directory"):
                refused()
    assert not list(tmp_path.iterdir())


def document() -> str:
    letters = torch.randint(ord("A"), ord("z"), (DOCUMENT,), generator=torch.manual_seed(1))
    return "".join(map(chr, letters.tolist()))


async def completion(server: Server, text: str) -> dict[str, Any]:
    """What the server answers to a request of OpenAI's API: no socket between."""
    asked = {"model": "tiny", "prompt": text, "temperature": 0, "max_tokens": ANSWER}
    body = json.dumps(asked).encode()
    named = ((b"host", b"localhost"), (b"content-type", b"application/json"))
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [*named, (b"content-length", str(len(body)).encode())],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    whole = [{"type": "http.request", "body": body, "more_body": False}]
    sent = []

    async def receive() -> dict[str, Any]:
        if not whole:
            await asyncio.Event().wait()  # the client stays
        return whole.pop()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await server.app(scope, receive, send)
    assert sent[0]["status"] == 200, sent
    return json.loads(b"".join(message.get("body", b"") for message in sent))


def answers_in_a_program(model: Any, config: SwapConfig, path: Path, asked: list[str]) -> list[str]:
    """By stock ``generate()``: the second question after a crop to the document's end."""
    tokenizer, told = character_tokenizer(), []
    with KVSwapCache(model, path, config) as cache:
        for text in asked:
            ids = tokenizer(text, return_tensors="pt")["input_ids"]
            if cache.get_seq_length():
                cache.crop(DOCUMENT - cache.get_seq_length())
            mask = torch.ones_like(ids)
            out = model.generate(
                ids, attention_mask=mask, past_key_values=cache, do_sample=False,
                max_new_tokens=ANSWER,
            )  # fmt: skip
            told.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return told


@pytest.mark.parametrize(("name", "ratio"), CELLS)
def test_a_server_answers_as_generate_does(name: str, ratio: int, tmp_path: Path) -> None:
    """From a config of the preset, two questions about a document: what --config takes."""
    model = model_of(ratio)
    config = tight(name, model)
    asked = [document() + question for question in ("abc", "defgh")]
    (tmp_path / "own").mkdir()
    (tmp_path / "store").mkdir()
    expected = answers_in_a_program(model, config, tmp_path / "own", asked)
    server = Server(
        model,
        character_tokenizer(),
        ServerOptions(name="tiny", store=tmp_path / "store", store_limit_bytes=1 << 30, port=0),
        CacheOptions(path=tmp_path / "store", config=config, save_from=32),
    )
    try:
        replies = [asyncio.run(completion(server, text)) for text in asked]
    finally:
        server.close()
    assert [reply["choices"][0]["text"] for reply in replies] == expected
    cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies]
    assert cached == [0, DOCUMENT] and server.store.usable == 1


@pytest.mark.parametrize("name", NAMES)
def test_serve_takes_a_preset_that_keeps_all_tokens_or_says_why_not(
    name: str, tmp_path: Path
) -> None:
    """Before a model is loaded: the others' first error is that there is none."""
    if find(name).needs:
        told = "must be given retention.scoring_heads and retention.layer_weights"
    elif drops(SwapConfig.preset(name)):
        told = f"--preset: must be one that drops no tokens, since other .*, got {name}"
    else:
        told = "--model: must be"
    asked = ["serve", "--model", str(tmp_path / "none"), "--store", str(tmp_path), "--preset", name]
    with pytest.raises(ConfigError, match=told):
        CliRunner().invoke(app, asked, catch_exceptions=False)
