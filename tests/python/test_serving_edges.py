"""What a server must not do: answer from another's cache, hang, lose what is not its own."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvswap_torch import _C, KVSwapCache
from kvswap_torch.cli.saved import verify
from kvswap_torch.cli.targets import check_folder
from kvswap_torch.config import SwapConfig
from kvswap_torch.errors import ConfigError, StorageError, UnsupportedModelError
from kvswap_torch.hf.families import model_parts
from kvswap_torch.hf.serving import server as server_module
from kvswap_torch.hf.serving.counts import Counts
from kvswap_torch.hf.serving.store import CacheStore
from tests.python.serving_process import Served, served_model
from tests.python.test_serving import send
from tests.python.test_serving_reuse import Desk, asked, in_memory, text
from tests.python.tiny_models import COVERING, greedy, prompt, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 64,
    "factor": 8.0,
}


def saved(model: Any, folder: Path, seed: int, overwrite: bool = False) -> None:
    with KVSwapCache(model, path=folder, config=COVERING) as cache:
        greedy(model, {"input_ids": text(60, seed)}, cache, tokens=1)
        cache.save(folder / "book.kvswap", overwrite=overwrite)


@pytest.mark.parametrize("is_looked_at", [False, True])
def test_a_cache_in_anothers_place_is_not_taken_for_it(tmp_path, is_looked_at, monkeypatch):
    model = tiny_model("llama")
    with Desk(model, tmp_path, save_from=10_000) as desk:
        for seed in range(3):
            saved(model, tmp_path, seed, overwrite=seed > 0)
            desk.store.refresh()
            before = desk.store.entries()
            saved(model, tmp_path, seed + 10, overwrite=True)
            saved(model, tmp_path, seed + 20, overwrite=True)  # often in the first one's inode
            if is_looked_at:  # it was put there between a look and the opening
                monkeypatch.setattr(desk.store, "refresh", lambda: None)
                assert desk.store.entries() == before
            ids = asked(text(60, seed), 1)
            assert desk.ask(ids) == in_memory(model, ids)
            assert desk.cached == 0
            monkeypatch.undo()
            desk.reuse.close()


@pytest.mark.parametrize("rope", [DYNAMIC, LONG], ids=["dynamic", "longrope"])
def test_keys_that_depend_on_the_texts_length_are_not_reused(tmp_path, rope):
    most = 64 if rope is DYNAMIC else 512
    model = tiny_model("llama", max_position_embeddings=most, rope_parameters=rope)
    with Desk(model, tmp_path, prefill_chunk=40) as desk:
        for tokens in (200, 50, 200):
            ids = asked(text(200, 1)[:, :tokens], tokens)
            assert desk.ask(ids) == in_memory(model, ids)
            assert desk.cached == 0
    assert list(tmp_path.iterdir()) == []


def test_long_rope_does_not_go_on_below_its_length(tmp_path):
    model = tiny_model("llama", max_position_embeddings=512, rope_parameters=LONG)
    with KVSwapCache(model, path=tmp_path, config=COVERING) as cache:
        model(input_ids=text(80, 1), past_key_values=cache)
        cache.crop(-40)
        told = "must not go on below it after a text of 80, got 40 \\+ 1"
        with pytest.raises(UnsupportedModelError, match=told):
            model(input_ids=text(1, 2), past_key_values=cache)
        cache.reset()
        with pytest.raises(UnsupportedModelError, match="must not grow across that length"):
            for _ in range(2):
                model(input_ids=text(40, 1), past_key_values=cache)
        cache.crop(0 - cache.get_seq_length())
        ours = greedy(model, prompt(1, 30), cache, tokens=4)
        assert torch.equal(ours, greedy(model, prompt(1, 30), tokens=4)), "an empty one may"


def test_a_models_own_generation_settings_are_a_servers(caplog):
    model = tiny_model("llama")
    model.generation_config.use_cache, model.generation_config.num_beams = False, 2
    given = model.generation_config
    server_module._generate_alone(model)
    config = model.generation_config
    assert (config.use_cache, config.num_beams) == (True, 1)
    assert (given.use_cache, given.num_beams) == (False, 2), "a copy"
    assert "these are set: {'num_beams': 1, 'use_cache': True}" in caplog.text
    caplog.clear()
    server_module._generate_alone(model)
    assert caplog.text == ""


def test_what_is_not_a_saves_stays(tmp_path):
    theirs = tmp_path / ".notes.abcdefghijklmnop"
    (theirs / "more").mkdir(parents=True)
    for name in ("thesis.txt", "manifest.json"):
        (theirs / name).write_text("mine")
    left = tmp_path / ".book.0123456789abcdef"
    left.mkdir()
    (left / "records.bin").write_text("killed")
    CacheStore(tmp_path, 1 << 30, model_parts(tiny_model("llama")), Counts())
    assert sorted(path.name for path in theirs.iterdir()) == ["manifest.json", "more", "thesis.txt"]
    assert not left.exists()


@pytest.mark.parametrize("where", ["open", "crop"])
def test_a_failure_that_passes_is_no_reason_to_leave_a_cache_out(tmp_path, where, monkeypatch):
    model = tiny_model("llama")
    book, fails = text(60, 1), [True]
    with Desk(model, tmp_path) as desk:
        desk.ask(asked(book, 1))
        desk.reuse.close()
        real = getattr(KVSwapCache, where)

        def failing(*arguments: Any, **named: Any) -> Any:
            if fails.pop() if fails else False:
                raise StorageError(errno.EMFILE, "no descriptor is left", "x")
            return real(*arguments, **named)

        monkeypatch.setattr(KVSwapCache, where, failing)
        for cached in (0, 60):
            ids = asked(book, 2 + cached)
            assert desk.ask(ids) == in_memory(model, ids)
            assert desk.cached == cached
            desk.reuse.close()
        assert desk.counts["store_unusable"] == 0


def test_a_cache_that_is_locked_for_a_moment_is_looked_at_again(tmp_path):
    import fcntl

    model = tiny_model("llama")
    saved(model, tmp_path, 1)
    with (tmp_path / "book.kvswap" / "records.bin").open("rb") as records:
        fcntl.flock(records, fcntl.LOCK_EX)
        store = CacheStore(tmp_path, 1 << 30, model_parts(model), Counts())
        assert store.entries() == []
        with pytest.raises(ConfigError, match="must be open nowhere to be replaced"):
            check_folder("--output", tmp_path / "book.kvswap", overwrite=True)
    store.refresh()
    assert [entry.path.name for entry in store.entries()] == ["book.kvswap"]
    check_folder("--output", tmp_path / "book.kvswap", overwrite=True)


def test_records_without_checksums_are_not_called_whole(tmp_path):
    from rich.console import Console

    model = tiny_model("llama")
    with (
        pytest.warns(RuntimeWarning, match="Checksums are off"),
        KVSwapCache(model, tmp_path, SwapConfig(checksum=False)) as cache,
    ):
        model(input_ids=text(60, 1), past_key_values=cache)
        cache.save(tmp_path / "book")
    with pytest.raises(ConfigError, match="must have checksums of its records"):
        verify(tmp_path / "book", Console(quiet=True))
    _C.SavedCache.remove(str(tmp_path / "book"))


# A server in a process.


parent = pytest.fixture(served_model, scope="module", name="parent")


@pytest.fixture
def tiny(parent: Served) -> Iterator[Served]:
    yield parent
    parent.kill()


def post(served: Served, path: str, **body: Any) -> tuple[int, str]:
    return send(served, "POST", path, {"temperature": 0} | body)


def test_streams_end_and_fail_as_openais_do(tiny: Served, tmp_path: Path) -> None:
    tiny.start(store=str(tmp_path / "store"))
    for path, given in (
        ("/v1/completions", {"prompt": "x" * 20}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    ):
        status, told = post(tiny, path, max_tokens=2, stream=True, **given)
        assert status == 200 and told.endswith("}\n\ndata: [DONE]\n\n")
    status, told = post(tiny, "/v1/responses", input="hello", max_output_tokens=2, stream=True)
    assert status == 200 and "[DONE]" not in told
    shutil.rmtree(tmp_path / "store")  # where records are, too: none can be made
    for path, given in (
        ("/v1/completions", {"prompt": "y" * 20}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "why"}]}),
    ):
        status, told = post(tiny, path, max_tokens=2, stream=True, **given)
        events = [line for line in told.splitlines() if line.startswith('data: {"error"')]
        (error,) = (json.loads(line.removeprefix("data: "))["error"] for line in events)
        assert "directory must exist" in error["message"] and error["type"] == "error"
    assert tiny.end() == 0


def test_a_client_that_takes_nothing_lets_others_go_on(tiny: Served, tmp_path: Path) -> None:
    tiny.start(store=str(tmp_path), limits={"PATIENCE_SECONDS": 2.0})
    host, port = tiny.address.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "x" * 20, "temperature": 0, "max_tokens": 1500, "stream": True})
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"X-Request-ID: {'r' * 4000}\r\nContent-Length: {len(body)}\r\n\r\n"
    )  # in every event, so that a short answer is long
    stalled = socket.socket()
    stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stalled.connect((host, int(port)))
    stalled.sendall((head + body).encode())
    half = socket.create_connection((host, int(port)))
    half.sendall(head.encode())  # and its body never comes
    status, _ = post(tiny, "/v1/completions", prompt="ab", max_tokens=2)
    assert status == 200
    assert tiny.end() == 0
    stalled.close()
    half.close()


@pytest.mark.parametrize("streams", [True, False])
def test_a_ctrl_c_ends_it_with_the_step_that_runs(
    tiny: Served, tmp_path: Path, streams: bool
) -> None:
    pid = tiny.start(store=str(tmp_path))["pid"]
    host, port = tiny.address.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port))
    body = {"prompt": "x" * 40, "max_tokens": 1900, "temperature": 0, "stream": streams}
    kind = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), kind)
    while tiny.metrics()["kvswap_first_token_seconds_count"] == 0:
        time.sleep(0.05)
    os.kill(pid, signal.SIGINT)
    told = connection.getresponse().read().decode()
    assert '"finish_reason": "length"' in told.replace('":"', '": "'), "what there is of it"
    assert tiny.wait() == 0  # for ever, where it hangs
    connection.close()


def test_a_second_ctrl_c_waits_for_no_client(tiny: Served, tmp_path: Path) -> None:
    """Which takes nothing, and would be waited for."""
    pid = tiny.start(store=str(tmp_path))["pid"]
    host, port = tiny.address.removeprefix("http://").split(":")
    half = socket.create_connection((host, int(port)))
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    half.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 99\r\n\r\n".encode())
    while tiny.metrics()["kvswap_connections"] < 2:
        time.sleep(0.05)
    for _ in range(2):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
        time.sleep(0.5)
    tiny.wait()
    half.close()
