"""Models in GGUF files: their own tokens, one tensor in fp32 at a time, one sentence each."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from typer.testing import CliRunner

from kvswap_torch import KVSwapCache
from kvswap_torch.cli import app as cli
from kvswap_torch.cli.load import load_config, load_model, load_tokenizer
from kvswap_torch.errors import ConfigError
from kvswap_torch.few_bits import format_of
from kvswap_torch.hf import gguf_file, unloaded
from kvswap_torch.integrations import load_gguf
from tests.python.gguf_models import model_of, written
from tests.python.tiny_models import COVERING, greedy, has_native
from tests.python.tiny_models import prompt as inputs_of

pytestmark = pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_file_is_the_model_that_was_written(kind: str, tied: bool, tmp_path: Path) -> None:
    model = model_of(tie_word_embeddings=tied)
    loaded = load_model(str(written(model, tmp_path / "tiny.gguf", kind)), "float32")
    assert {n: v.shape for n, v in loaded.state_dict().items()} == {
        n: v.shape for n, v in model.state_dict().items()
    }
    error = {"F32": 1e-7, "Q8_0": 0.01, "Q4_0": 0.15}[kind]
    for name, values in model.state_dict().items():
        apart = (loaded.state_dict()[name] - values).norm() / values.norm()
        assert apart <= error, name
    if kind == "F32":
        assert torch.equal(greedy(loaded, inputs_of(1, 30)), greedy(model, inputs_of(1, 30)))


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
def test_it_goes_on_over_a_cache_in_any_format(
    weights: str | None, tmp_path: Path, one_thread: None
) -> None:
    path = written(model_of(), tmp_path / "tiny.gguf")
    model = load_model(str(path), "float32", weights=weights)
    assert format_of(model) == weights
    empty = unloaded.unloaded_model(load_config(str(path)), torch.float32, weights)
    assert unloaded.weight_bytes(empty) == unloaded.weight_bytes(model)
    inputs = inputs_of(2, 40, padding=(3, 0))
    with KVSwapCache(model, tmp_path, COVERING) as cache:
        assert torch.equal(greedy(model, inputs, cache), greedy(model, inputs))


def test_few_tensors_are_in_fp32_at_once(tmp_path: Path, monkeypatch) -> None:
    live, most, taken = [0], [0], gguf.dequantize

    def gone(size: int) -> None:
        live[0] -= size

    def counted(data: Any, kind: Any) -> Any:
        values = taken(data, kind)
        live[0] += values.nbytes
        most[0] = max(most)
        most.append(live[0])
        weakref.finalize(values, gone, values.nbytes)
        return values

    monkeypatch.setattr(gguf, "dequantize", counted)
    model = model_of(num_hidden_layers=6)
    load_model(str(written(model, tmp_path / "tiny.gguf")), "bfloat16", weights="int8")
    gc.collect()
    largest = max(p.numel() for p in model.parameters()) * 4
    assert 0 < max(most) <= 2 * largest
    assert live == [0]


def test_the_type_is_the_files_own(tmp_path: Path) -> None:
    quantised = str(written(model_of(), tmp_path / "q.gguf"))
    plain = str(written(model_of(), tmp_path / "f.gguf", "F32"))
    half = str(written(model_of(), tmp_path / "h.gguf", "F16"))
    assert load_model(quantised).dtype == torch.bfloat16
    assert load_model(plain).dtype == torch.float32
    assert format_of(load_gguf(half, "int4")) == "int4"
    assert load_gguf(half).dtype == torch.float16
    assert load_model(half).dtype == torch.float16


def test_commands_take_a_file(tmp_path: Path) -> None:
    path = written(model_of(), tmp_path / "tiny.gguf")
    book = tmp_path / "book.txt"
    book.write_text("A text. " * 20)
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.decode(tokenizer("A text.").input_ids, skip_special_tokens=True) == "A text."
    words = ["generate", "--model", path, "--document", book, "--question", "Why?", "--json", "-",
             "--max-new-tokens", 3, "--path", tmp_path, "--weights", "int4"]  # fmt: skip
    done = CliRunner().invoke(cli.app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    fits = ["fit", "--model", path, "--context", "400", "--path", tmp_path, "--json"]
    told = CliRunner().invoke(cli.app, [str(word) for word in fits])
    assert told.exit_code == 0, told.output
    assert json.loads(told.output)["weights"] == "bfloat16"


# What cannot be loaded.


def refused(path: Path) -> str:
    told = set()
    for load in (load_config, load_tokenizer, load_model):
        with pytest.raises(ConfigError) as error:
            load(str(path))
        told.add(str(error.value))
    assert len(told) == 1, told
    return told.pop()


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    path = written(model_of(), tmp_path / "tiny.gguf", architecture="wizard")
    told = refused(path)
    assert "must be of an architecture that transformers reads from GGUF" in told
    assert "'wizard'" in told and "\n" not in told


@pytest.mark.parametrize("kept", [0, 3, 30, 400, 4000, -1])
def test_a_file_that_is_cut_short_is_refused(kept: int, tmp_path: Path) -> None:
    path = written(model_of(), tmp_path / "tiny.gguf")
    data = path.read_bytes()
    path.write_bytes(data[:kept])
    told = refused(path)
    assert "must be a whole GGUF file" in told and "copy it again" in told and "\n" not in told


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_text("{}" * 100)
    assert "must be a whole GGUF file" in refused(path)
    assert "which is not there" in refused(tmp_path / "none.gguf")
    (tmp_path / "folder.gguf").mkdir()
    assert "which is not there" in refused(tmp_path / "folder.gguf")


def test_a_file_without_a_tensor_is_refused(tmp_path: Path) -> None:
    path = written(model_of(), tmp_path / "tiny.gguf")
    longer = load_config(str(path))
    longer.num_hidden_layers += 1
    with pytest.raises(ConfigError, match=r"without model.layers.3.\S+ and 8 others"):
        gguf_file.load_gguf(path, longer)


def test_without_the_package_its_extra_is_named(tmp_path: Path, monkeypatch) -> None:
    path = written(model_of(), tmp_path / "tiny.gguf")
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install 'kvswap_torch\[gguf\]'"):
        load_config(str(path))
