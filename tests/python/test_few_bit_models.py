"""Models loaded in few bits: the same tokens over every cache, little memory, one sentence each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from kvswap_torch import KVSwapCache, few_bits
from kvswap_torch.cli import app as cli
from kvswap_torch.cli.load import load_model
from kvswap_torch.errors import ConfigError
from kvswap_torch.few_bits import INT4_LEVELS, FewBitLinear, format_of
from kvswap_torch.half_linear import HalfLinear
from kvswap_torch.hf import unloaded
from kvswap_torch.hf.families import model_parts
from kvswap_torch.hf.lookahead import LookAhead
from kvswap_torch.integrations import few_bits as few_bit_config
from kvswap_torch.tuning.calibration import CalibrationOptions, calibrate
from kvswap_torch.tuning.recall import Choice
from kvswap_torch.tuning.samples import Sample
from tests.python.tiny_models import (
    COVERING,
    FAMILIES,
    TIGHT,
    VOCABULARY,
    greedy,
    has_native,
    tiny_model,
)
from tests.python.tiny_models import prompt as inputs_of

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.skipif(
        torch.backends.cpu.get_cpu_capability() not in INT4_LEVELS,
        reason="the processor has neither AVX2 nor AVX-512",
    ),
]

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "examples/reference_model"
MIB = 1 << 20


def saved(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_a_cache_in_memory(
    family: str, weights: str, tmp_path: Path, one_thread: None
) -> None:
    folder = saved(tiny_model(family), tmp_path / "model")
    model = load_model(folder, weights=weights)
    assert any(isinstance(layer, FewBitLinear) for layer in model.modules())
    inputs = inputs_of(2, 40, padding=(3, 0))
    expected = greedy(model, inputs)
    for look_ahead in (True, False):
        config = COVERING.with_settings({"prefetch.mode": "trust" if look_ahead else "off"})
        with KVSwapCache(model, tmp_path, config) as cache:
            assert torch.equal(greedy(model, inputs, cache), expected), look_ahead


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_the_reference_model_answers_as_with_a_cache_in_memory(
    weights: str, tmp_path: Path, one_thread: None
) -> None:
    model = load_model(str(REFERENCE), "float32", weights=weights)
    assert format_of(model) == weights
    assert type(load_model(str(REFERENCE), weights=weights).lm_head) is HalfLinear
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 3000, (1, 1500), generator=generator)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = greedy(model, inputs, tokens=8)
    with KVSwapCache(model, tmp_path, None, "64MiB", 1600, 1) as cache:
        assert torch.equal(greedy(model, inputs, cache, tokens=8), expected)


def test_queries_are_predicted_by_the_layers_themselves(tmp_path: Path, one_thread: None) -> None:
    """Their weights are no matrix that a predictor could take."""
    folder = saved(tiny_model("llama"), tmp_path / "model")
    model = load_model(folder, weights="int8")
    assert LookAhead(model_parts(model)).description == "generic"
    with KVSwapCache(model, tmp_path, TIGHT) as cache:
        greedy(model, inputs_of(1, 60), cache)
        assert cache.stats().decoded > 0


def test_the_tuner_calibrates_them(tmp_path: Path, one_thread: None) -> None:
    """Its samples go through the layers themselves, so that errors are those of few bits alone."""
    whole = tiny_model("llama")
    folder = saved(whole, tmp_path / "model")
    options = CalibrationOptions(
        choice=Choice(group_tokens=2, groups_max=4, sink_tokens=2, tail_tokens=4), steps_max=16
    )
    ids = [torch.randint(3, VOCABULARY, (120,), generator=torch.Generator().manual_seed(seed))
           for seed in range(2)]  # fmt: skip
    samples = [Sample(each, 80) for each in ids]
    first, few = (
        calibrate(model, samples[:1], samples[1:], options)
        for model in (whole, load_model(folder, "float32", weights="int8"))
    )
    assert few.tables and few.tables.keys() == first.tables.keys()


@pytest.mark.parametrize("command", ["serve", "tune"])
def test_a_server_and_the_tuner_load_them(
    command: str, tiny_model_dir: Path, tmp_path: Path, monkeypatch
) -> None:
    class Loaded(Exception):
        pass

    def load(name: str, *given: Any, weights: str | None = None, **named: Any) -> None:
        raise Loaded(f"{name} {weights}")

    module = {"serve": "kvswap_torch.cli.serve", "tune": "kvswap_torch.tuning.cli"}[command]
    monkeypatch.setattr(f"{module}.load_model", load)
    words = {
        "serve": ["--store", tmp_path / "store"],
        "tune": ["--path", tmp_path, "--kv-memory", "64MiB", "--no-report"],
    }[command]
    done = kvswap(command, "--model", tiny_model_dir, *words, "--weights", "int8")
    assert str(done.exception) == f"{tiny_model_dir} int8", done.output


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_loaded_takes_what_was_planned(weights: str, dtype: str, tmp_path: Path) -> None:
    folder = saved(tiny_model("llama", hidden_size=64), tmp_path / "model")
    model = load_model(folder, dtype, weights=weights)
    empty = unloaded.unloaded_model(model.config, getattr(torch, dtype), weights)
    assert unloaded.weight_bytes(model) == unloaded.weight_bytes(empty)
    assert model.dtype == getattr(torch, dtype)


def test_stock_from_pretrained_takes_them(tmp_path: Path) -> None:
    folder = saved(tiny_model("qwen2"), tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=few_bit_config("int8"))
    layer = model.model.layers[0].self_attn.q_proj
    assert isinstance(layer, FewBitLinear) and layer.bias is not None
    assert not layer.bias.is_meta and model.config.quantization_config.weights == "int8"
    with pytest.raises(ConfigError, match="must be one of int8, int4"):
        few_bit_config("bf16")
    with pytest.raises(ConfigError, match="must be one of bf16, int8, int4"):
        few_bit_config("int2")


LOADED = """
import json, sys
from kvswap_torch.cli.load import load_model
from kvswap_torch.process_memory import process_memory
load_model(sys.argv[2], weights="int8")  # what libraries take once
before = process_memory()
model = load_model(sys.argv[1], weights=sys.argv[3])
after = process_memory()
print(json.dumps([after.anonymous - before.anonymous, after.peak - before.rss]))
"""


def test_loading_never_has_the_model_in_its_own_type(tmp_path: Path) -> None:
    config = LlamaConfig(vocab_size=256, hidden_size=1024, intermediate_size=4096,
                         num_hidden_layers=12, num_attention_heads=8)  # fmt: skip
    with torch.device("meta"):
        large = LlamaForCausalLM(config).bfloat16()
    large = large.to_empty(device="cpu")
    for parameter in large.parameters():
        parameter.data.fill_(0.01)
    folder = saved(large, tmp_path / "large")
    whole = unloaded.weight_bytes(large)
    assert whole > 350 * MIB
    few = unloaded.weight_bytes(unloaded.unloaded_model(config, torch.bfloat16, "int4"))
    small = saved(tiny_model("llama"), tmp_path / "small")
    done = subprocess.run(
        [sys.executable, "-c", LOADED, folder, small, "int4"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=600,
    )  # fmt: skip
    anonymous, _ = json.loads(done.stdout.splitlines()[-1])
    # Of the tensors under way a few are held, by how many threads there are: not half the model.
    assert few <= anonymous <= few + (whole - few) / 2, (anonymous, few, whole)


# The commands.


def kvswap(*words: object) -> Any:
    return CliRunner().invoke(cli.app, [str(word) for word in words])


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("A long text of few words. " * 20)
    return path


def test_commands_answer_in_few_bits(book: Path, tiny_model_dir: Path, tmp_path: Path) -> None:
    asked = ["--question", "Why?", "--max-new-tokens", 4, "--path", tmp_path]
    few = ["--weights", "int4"]
    words = ["--model", tiny_model_dir, "--document", book]
    done = kvswap("generate", *words, *asked, *few, "--json", tmp_path / "out.json")
    assert done.exit_code == 0, done.output
    out = tmp_path / "b.kvswap"
    ingested = kvswap("ingest", book, "--model", tiny_model_dir, "-o", out, *few, "--json")
    assert ingested.exit_code == 0, ingested.output
    assert json.loads(kvswap("show", out, "--json").output)["facts"]["weights_format"] == "int4"
    again = kvswap("ask", out, *asked, "--json")  # in the format that it was made with
    assert again.exit_code == 0, again.output
    first = json.loads((tmp_path / "out.json").read_text())["disk"]["turns"][0]["answer"]
    assert first in again.output or json.dumps(first)[1:-1] in again.output
    other = kvswap("ask", out, *asked, "--weights", "int8")
    assert isinstance(other.exception, ConfigError), other.output


@pytest.mark.parametrize("command", ["generate", "serve", "tune"])
def test_int4_without_its_instructions_is_refused_first(
    command: str, book: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    words = {
        "generate": ["--document", book, "--question", "Why?"],
        "serve": ["--store", tmp_path / "store"],
        "tune": ["--path", tmp_path, "--kv-memory", "64MiB", "--no-report"],
    }[command]
    done = kvswap(command, "--model", tmp_path / "nowhere", *words, "--weights", "int4")
    told = str(done.exception) + done.output
    assert done.exit_code == 1 and "AVX2 or AVX-512" in told, told


def quantised_config(folder: Path, method: str) -> str:
    saved(tiny_model("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("method", ["torchao", "bitsandbytes"])
def test_a_missing_library_is_named_with_its_extra(
    method: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=rf"pip install 'kvswap_torch\[{method}\]'"):
        load_model(quantised_config(tmp_path / "model", method))


def test_what_cannot_go_together_is_refused(tmp_path: Path) -> None:
    folder = quantised_config(tmp_path / "model", "gptq")
    with pytest.raises(ConfigError, match="--weights: must be left out with a model whose"):
        load_model(folder, weights="int8")
    with pytest.raises(ConfigError, match="--weights bf16: must be left out with --dtype float16"):
        load_model(saved(tiny_model("llama"), tmp_path / "two"), "float16", weights="bf16")
    with pytest.raises(ConfigError, match="where several processes run a model"):
        load_model(str(tmp_path / "two"), weights="int4", distributed=object())
    assert load_model(str(tmp_path / "two"), weights="bf16").dtype == torch.bfloat16
    assert few_bits.format_of(load_model(str(tmp_path / "two"))) is None
