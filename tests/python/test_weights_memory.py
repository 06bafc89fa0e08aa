"""``--weights-memory``: layers that do not fit are on disk, tokens those of the whole model."""

from __future__ import annotations

import functools
import io
import json
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from bench.side_by_side.memory_cap import NONE, MemoryCap
from kvswap_torch import ConfigError, KVSwapCache, StorageError
from kvswap_torch.cli import load, reading
from kvswap_torch.cli.app import app
from kvswap_torch.cli.load import load_model
from kvswap_torch.half_linear import HalfLinear
from kvswap_torch.hf import weights_memory
from kvswap_torch.hf.offloaded import StoredTensors
from kvswap_torch.hf.unloaded import unloaded_model
from kvswap_torch.hf.weights_memory import WeightsPlan, plan_weights, stored_as
from kvswap_torch.integrations import load_on_disk
from tests import known_skips
from tests.python import every_model, ready_python
from tests.python.serving_process import make_model
from tests.python.test_weights_reader import no_thread_stays
from tests.python.tiny_models import TIGHT, greedy, has_native, prompt, tiny_model

__all__ = ["no_thread_stays"]  # a fixture

pytest.importorskip("accelerate", reason="weights on disk are accelerate's")
pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]

CONFIG = TIGHT.with_settings({"prefetch.mode": "verify"})
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 5}


def bytes_of(model: Any) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def planned(folder: Path, config: Any, dtype: torch.dtype, limit: int) -> WeightsPlan | None:
    return plan_weights(unloaded_model(config, dtype), stored_as(folder, config), limit)


def least(folder: Path, config: Any, dtype: torch.dtype) -> int:
    """What the refusal names, bytes."""
    with pytest.raises(ConfigError, match="^--weights-memory: must be at least") as caught:
        planned(folder, config, dtype, 1)
    return int(re.search(r"(\d+) KiB", str(caught.value))[1]) << 10


def saved(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model in a folder, as the commands load it without a limit."""
    tiny_model("llama", dtype=dtype, **SIZES | changes).save_pretrained(folder)
    return load_model(str(folder))


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("room", [0.0, 0.5, 1.0], ids=["least", "half", "almost all"])
@pytest.mark.pairs
def test_tokens_are_those_of_the_model_in_memory(dtype, tied, room, tmp_path) -> None:
    model, inputs = saved(tmp_path, dtype, tie_word_embeddings=tied), prompt(2, 40, padding=(0, 3))
    total, smallest = bytes_of(model), least(tmp_path, model.config, dtype)
    limit = int(smallest + room * (total - 1 - smallest))
    plan = planned(tmp_path, model.config, dtype, limit)
    assert 0 < plan.memory_bytes <= limit
    loaded = load_model(str(tmp_path), weights_memory=limit)
    reader, resident = loaded.weights_reader, [p for p in loaded.parameters() if not p.is_meta]
    assert 2 * reader.buffer_bytes <= plan.buffer_bytes
    assert sum(p.nbytes for p in resident) == plan.resident_bytes
    with KVSwapCache(model, tmp_path, config=CONFIG) as cache:
        expected = greedy(model, inputs, cache)
        assert cache.stats().weights_bytes_read is None
    with KVSwapCache(loaded, tmp_path, config=CONFIG) as cache:
        assert torch.equal(greedy(loaded, inputs, cache), expected)
        assert reader.bytes_read > 10 * plan.read_bytes  # once each token
        stats = cache.stats()
    assert stats.weights_bytes_read > 10 * plan.read_bytes and stats.weights_wait_seconds > 0
    assert "weights read" in str(stats)
    kinds = {type(m) for m in loaded.modules() if isinstance(m, torch.nn.Linear)}
    assert kinds == {HalfLinear if dtype == torch.bfloat16 else torch.nn.Linear}
    assert all(p.is_meta for p in loaded.parameters()) or resident


def test_layers_in_memory_grow_with_the_limit(dtype, tmp_path) -> None:
    model = saved(tmp_path, dtype)
    smallest, total = least(tmp_path, model.config, dtype), bytes_of(model)
    with pytest.raises(ConfigError, match="--weights-memory: must be at least"):
        planned(tmp_path, model.config, dtype, smallest - 1024)
    steps = range(smallest, total, (total - smallest) // 20)
    plans = [planned(tmp_path, model.config, dtype, limit) for limit in steps]
    assert [p.read_bytes for p in plans] == sorted((p.read_bytes for p in plans), reverse=True)
    assert len({p.read_bytes for p in plans}) > 4
    assert all(p.memory_bytes <= limit for p, limit in zip(plans, steps, strict=True))
    assert planned(tmp_path, model.config, dtype, total) is None


def test_all_that_fits_is_in_memory(tmp_path) -> None:
    model = saved(tmp_path)
    said: list[str] = []
    loaded = load_model(str(tmp_path), weights_memory=bytes_of(model), say=said.append)
    assert not StoredTensors(loaded) and said == ["weights: all of them fit in --weights-memory"]


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_weights_that_are_stored_in_another_type(stored, tmp_path) -> None:
    """Buffers have room for what is in the file, and no embedding is converted in each pass."""
    computed = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32}[stored]
    model = saved(tmp_path, stored)
    limit = least(tmp_path, model.config, computed)
    plan = planned(tmp_path, model.config, computed, limit)
    assert plan.places["model.embed_tokens"] == "cpu"
    loaded = load_on_disk(tmp_path, limit, computed)
    assert 2 * loaded.weights_reader.buffer_bytes <= plan.buffer_bytes
    expected = load_model(str(tmp_path), str(computed).removeprefix("torch."))
    assert torch.equal(greedy(loaded, prompt(1, 20)), greedy(expected, prompt(1, 20)))


def test_a_checkpoint_of_two_types_is_counted_tensor_by_tensor(tmp_path) -> None:
    model = saved(tmp_path, torch.bfloat16)
    plain = planned(tmp_path, model.config, torch.bfloat16, 1_100_000)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].float()}, file, {"format": "pt"})
    plan = planned(tmp_path, model.config, torch.bfloat16, 1_100_000)
    assert plan.buffer_bytes > plain.buffer_bytes
    loaded = load_on_disk(tmp_path, 1_100_000)
    assert 2 * loaded.weights_reader.buffer_bytes <= plan.buffer_bytes
    assert torch.equal(greedy(loaded, prompt(1, 20)), greedy(model, prompt(1, 20)))


@pytest.fixture
def experts(tmp_path: Path) -> Any:
    """A mixture of experts, whose checkpoint has each expert's tensors alone."""
    model = every_model.build("Qwen3Moe")
    model.save_pretrained(tmp_path / "model")
    return model


def test_a_checkpoint_that_must_be_written_again(experts: Any, tmp_path: Path) -> None:
    folder, disk = tmp_path / "model", tmp_path / "disk"
    disk.mkdir()
    expected = greedy(experts, prompt(1, 20))
    limit = bytes_of(experts) - 1
    assert planned(folder, experts.config, torch.float32, limit).is_rewritten
    loaded = load_on_disk(folder, limit, folder=disk)
    assert len(list(disk.iterdir())) == 1
    assert torch.equal(greedy(loaded, prompt(1, 20)), expected)
    del loaded
    assert list(disk.iterdir()) == []


def test_no_room_to_write_it_again(experts: Any, tmp_path: Path, monkeypatch: Any) -> None:
    usage = functools.partial(dict, free=10)
    monkeypatch.setattr(weights_memory.shutil, "disk_usage", lambda _: type("", (), usage())())
    with pytest.raises(StorageError, match=r"must have .* free, since this checkpoint's weights"):
        load_on_disk(tmp_path / "model", bytes_of(experts) - 1, folder=tmp_path)


# What is refused.


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"weights": "int8"}, "must be left out with --weights int8"),
        ({"distributed": object()}, "must be left out where several processes run a model"),
        ({"name": "x.gguf"}, "must be left out with a GGUF file"),
    ],
)
def test_what_cannot_be_together(arguments, told, tmp_path) -> None:
    with pytest.raises(ConfigError, match=f"^--weights-memory: {told}"):
        load_model(arguments.pop("name", str(tmp_path)), weights_memory=1 << 20, **arguments)


def test_a_device_and_quantised_weights(tmp_path) -> None:
    with pytest.raises(ConfigError, match="must be left out with --device cuda:0: layers on disk"):
        load.check_on_disk("nowhere", "cuda:0", None)
    config = {"quantization_config": {"quant_method": "bitsandbytes"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="quantised by bitsandbytes: its layers are loaded whole"):
        load.check_on_disk(str(tmp_path), "cpu", None)
    saved(tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(told | config))
    with pytest.raises(ConfigError, match="^weights_memory: must be of a model whose weights are"):
        load_on_disk(tmp_path, 1 << 20)
    with pytest.raises(ConfigError, match="^weights_memory: must be of a model's folder, got the"):
        load_on_disk(tmp_path / "x.gguf", 1 << 20)


def test_accelerate_is_missing(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(weights_memory.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"accelerate.*pip install 'kvswap_torch\[distributed\]'"):
        load_model(str(tmp_path), weights_memory=1 << 20)


@pytest.mark.parametrize("size", ["much", "0", "-1MiB"])
def test_a_size_that_is_none(size, tmp_path) -> None:
    with pytest.raises(ConfigError, match="^weights_memory: must be"):
        load_on_disk(tmp_path, size)


def test_a_folder_and_a_type_that_are_none(tmp_path) -> None:
    with pytest.raises(ConfigError, match="of a model's folder, got '/nope', which is none$"):
        load_on_disk("/nope", "1GiB")
    with pytest.raises(ConfigError, match="^dtype: must be one of auto, .* got 'float99'$"):
        load_on_disk(tmp_path, "1GiB", "float99")


def test_nothing_is_loaded_for_a_limit_that_is_too_small(tmp_path, monkeypatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    saved(tmp_path)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", never)
    with pytest.raises(ConfigError, match="^weights_memory: must be at least .* got 1000 bytes$"):
        load_on_disk(tmp_path, 1000)


# The commands.


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[str]]]:
    """A model's folder, and the option that leaves some of its layers on disk."""
    folder = tmp_path_factory.mktemp("chatty")
    make_model(folder)  # for its tokenizer
    model = tiny_model("llama", **SIZES, max_position_embeddings=2048)
    model.save_pretrained(folder)
    limit = bytes_of(model) - 1
    assert planned(folder, model.config, torch.float32, limit).read_bytes > 0
    yield folder, ["--weights-memory", str(limit)]


def kvswap(*words: object, **named: Any) -> Any:
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False, **named)
    assert done.exit_code == 0
    return done


def test_generate(chatty, tmp_path) -> None:
    folder, limited = chatty
    document, answers = tmp_path / "text.txt", []
    document.write_text("abcdefgh" * 20)
    for more in ([], limited):
        out = tmp_path / "out.json"
        done = kvswap("generate", "--model", folder, "--document", document, "--question", "who?",
                      "--max-new-tokens", 6, "--path", tmp_path, "--json", out, *more)  # fmt: skip
        answers.append(
            [turn["answer_ids"] for turn in json.loads(out.read_text())["disk"]["turns"]]
        )
    assert answers[0] == answers[1]
    assert "of weights from disk" in " ".join(done.output.split())


def test_ingest_ask_and_chat(chatty, tmp_path) -> None:
    folder, limited = chatty
    document, book = tmp_path / "text.txt", tmp_path / "book.kvswap"
    document.write_text("abcdefgh" * 20)
    kvswap("ingest", document, "--model", folder, "-o", book, "--path", tmp_path, *limited)
    told = ["ask", book, "--question", "who?", "--max-new-tokens", 6, "--path", tmp_path, "--json"]
    asked = [json.loads(kvswap(*told, *more).stdout)[0]["answer"] for more in ([], limited)]
    talked = kvswap("chat", book, "--max-new-tokens", 6, "--path", tmp_path, *limited,
                    input="who?\n/quit\n")  # fmt: skip
    assert asked[0] == asked[1] and asked[0] in talked.output


class SlowReader:
    """As many bytes as a test says, and seconds."""

    bytes_read, wait_seconds = 1 << 20, 1.0


def test_lines_say_what_weights_were_read() -> None:
    model, out = SimpleNamespace(weights_reader=SlowReader()), io.StringIO()
    console = Console(file=out, width=200)
    told, ticks = reading.weights_told(model), iter([0.0, 20.0])
    lines = reading.ReadingLines(100, console, clock=lambda: next(ticks), told=told)
    model.weights_reader.bytes_read += 3 << 20
    model.weights_reader.wait_seconds += 7.0
    lines.advance(50)
    expected = "about 20 s left; 3.00 MiB of weights read, 7 s waited for them"
    assert out.getvalue().strip().endswith(expected)
    assert reading.weights_told(SimpleNamespace())() == ""


def test_a_line_says_what_an_answer_waits_for_until_it_comes() -> None:
    model, out, wrote = SimpleNamespace(weights_reader=SlowReader()), io.StringIO(), []
    console, said = Console(file=out, width=200), threading.Event()
    told = reading.weights_told

    def says(model: Any) -> Any:
        one = told(model)
        return lambda: (said.set(), one())[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "weights_told", says)
        patch.setattr(reading.waiting.__wrapped__, "__defaults__", (0.01,))
        with reading.until_it_writes(model, console, wrote.append) as write:
            assert said.wait(30)
            write("a")
            before = out.getvalue()
            write("b")
    assert wrote == ["a", "b"] and out.getvalue() == before
    assert "0 B of weights read, 0 s waited for them: 0 s so far" in before


# A limit that the kernel holds.

LIMIT = 64 << 20


@pytest.fixture
def cap() -> Iterator[MemoryCap]:
    cap = MemoryCap.open()
    if cap is None:
        pytest.skip(NONE)
    cap.limit(LIMIT)
    yield cap
    cap.close()


def test_a_model_of_twice_the_memory_there_is(cap: MemoryCap, tmp_path: Path) -> None:
    """The cgroup counts page cache and all that is allocated after the imports."""
    if known_skips.lacks_disk():
        pytest.skip("the folder of the tests lies in memory, which a limit on memory counts")
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 22}
    model = tiny_model("llama", dtype=torch.bfloat16, **sizes)
    assert bytes_of(model) > 2 * LIMIT
    model.save_pretrained(tmp_path)
    del model

    def told(cgroup: object, memory: object) -> dict:
        words = ("-m", "tests.python.weights_in_little_memory", tmp_path, cgroup, memory)
        # Not a fork: what that writes to pages that it has from its parent would be counted.
        done = subprocess.run([sys.executable, *map(str, words)], cwd=ready_python.ROOT,
                              capture_output=True, text=True, check=False)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    free = told("none", "none")
    limited = told(cap.folder, 40 << 20)
    assert limited["ids"] == free["ids"]
    assert limited["read"] > 10 * (LIMIT + (16 << 20)) and free["read"] is None
    assert cap.folder.name in limited["cgroups"]


@pytest.mark.long
def test_serve(chatty, tmp_path) -> None:
    folder, limited = chatty
    words = ["serve", "--model", folder, "--store", tmp_path, "--port", 0, "--json", *limited]
    with subprocess.Popen(
        [sys.executable, "-m", "kvswap_torch", *map(str, words)], cwd=ready_python.ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            told = json.loads(process.stdout.readline())
            body = {"model": told["model"], "prompt": "abcdefgh" * 8, "max_tokens": 6, "n": 2,
                    "temperature": 1.0, "seed": 3}  # fmt: skip
            request = urllib.request.Request(
                f"{told['address']}/v1/completions", json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )  # fmt: skip
            with urllib.request.urlopen(request) as reply:
                answers = json.loads(reply.read())["choices"]
            process.terminate()
            assert "of weights from disk" in process.stderr.read()
            assert process.wait() == 0
        finally:
            process.kill()
    assert len(answers) == 2 and all(each["text"] for each in answers)
