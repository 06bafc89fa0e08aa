"""Weights on disk that are read ahead: the right bytes, in two buffers, whatever happens."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvswap_torch import KVSwapCache, StorageError
from kvswap_torch.hf import weights_reader
from kvswap_torch.hf.families import model_parts
from kvswap_torch.hf.offloaded import StoredTensors
from kvswap_torch.hf.weights_digest import weights_of
from kvswap_torch.hf.weights_reader import StoredTensor, WeightsReader, read_ahead
from tests.python import every_model
from tests.python.test_hf_offloaded import away, on_disk
from tests.python.tiny_models import TIGHT, greedy, has_native, prompt, tiny_model

pytest.importorskip("accelerate", reason="weights on disk are accelerate's")
pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == weights_reader.THREAD]


@pytest.fixture(autouse=True)
def no_thread_stays() -> Any:
    yield
    gc.collect()
    assert threads() == []


@pytest.mark.parametrize("mode", ["off", "verify", "trust"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_tokens_are_those_of_the_model_in_memory(family, mode, tmp_path) -> None:
    model, inputs = tiny_model(family), prompt(2, 40, padding=(0, 3))
    config = TIGHT.with_settings({"prefetch.mode": mode})
    with KVSwapCache(model, tmp_path, config=config) as cache:
        expected = greedy(model, inputs, cache)
    offloaded = on_disk(model, tmp_path / "model")
    reader = read_ahead(offloaded)
    assert reader is not None
    pass_bytes = sum(tensor.nbytes for tensor in StoredTensors(offloaded).values())
    assert 0 < reader.buffer_bytes < pass_bytes
    with KVSwapCache(offloaded, tmp_path, config=config) as cache:
        assert torch.equal(greedy(offloaded, inputs, cache), expected)
        assert reader.bytes_read > pass_bytes  # every pass reads all of it
        assert torch.equal(greedy(offloaded, inputs), greedy(model, inputs))
    assert away(offloaded)
    assert weights_of(model_parts(offloaded)) == weights_of(model_parts(model))


def test_stacks_of_experts_stay_accelerates(tmp_path) -> None:
    model, inputs = every_model.build("GptOss"), prompt(1, 30)
    expected = greedy(model, inputs)
    offloaded = on_disk(model, tmp_path / "model")
    reader = read_ahead(offloaded)
    assert torch.equal(greedy(offloaded, inputs), expected)
    assert reader.holds("model.layers.0.self_attn.q_proj.weight")
    assert not reader.holds("model.layers.0.mlp.experts.gate_up_proj")


def test_weights_of_another_type_are_converted(tmp_path) -> None:
    model, inputs = tiny_model("llama"), prompt(1, 20)
    expected = greedy(tiny_model("llama").to(torch.bfloat16), inputs)
    offloaded = on_disk(model, tmp_path / "model", dtype=torch.bfloat16)
    assert read_ahead(offloaded) is not None
    assert torch.equal(greedy(offloaded, inputs), expected)


def test_a_model_without_such_weights_has_no_reader() -> None:
    assert read_ahead(tiny_model("llama")) is None


# The reader by itself.

SIZES = {"a": 3000, "b": 70_000, "c": 9_000_000}


def blocks(folder: Path, count: int = 3) -> tuple[list[dict[str, StoredTensor]], list[dict]]:
    """Tensors at odd places of files, and what they hold."""
    made, held = [], []
    for number in range(count):
        path = folder / f"{number}.bin"
        whole = torch.randint(0, 256, (sum(SIZES.values()) + 999,), dtype=torch.uint8)
        path.write_bytes(whole.numpy().tobytes())
        begin, told, values = 8 * (number + 1), {}, {}
        for name, size in SIZES.items():
            shape = (size // 4,)
            told[f"{number}.{name}"] = StoredTensor(
                str(path), begin, begin + size, torch.int32, torch.int32, shape
            )
            values[f"{number}.{name}"] = whole[begin : begin + size].view(torch.int32)
            begin += size
        made.append(told)
        held.append(values)
    return made, held


def test_blocks_come_in_any_order(tmp_path: Path) -> None:
    made, held = blocks(tmp_path)
    reader = WeightsReader(made)
    for block in (0, 1, 2, 0, 2, 2, 1, 0):
        reader.begin(block)
        for name, value in held[block].items():
            assert torch.equal(reader.tensor(name), value)
        reader.end(block)
    assert torch.equal(reader.tensor("1.c"), held[1]["1.c"])  # of one that has not begun
    reader.close()
    reader.close()
    with pytest.raises(StorageError, match="the reader is closed"):
        reader.tensor("0.a")


def test_the_next_block_is_read_while_one_runs(tmp_path: Path) -> None:
    made, held = blocks(tmp_path)
    reader = WeightsReader(made)
    reader.begin(0)
    first = reader.tensor("0.c")
    until(lambda: reader.bytes_read >= 2 * sum(SIZES.values()))
    assert torch.equal(first, held[0]["0.c"])  # and does not take this one's place
    before = reader.bytes_read
    assert torch.equal(reader.tensor("1.c"), held[1]["1.c"])
    assert reader.bytes_read == before
    reader.close()


def until(is_so: Any) -> None:
    while not is_so():
        time.sleep(0.001)


@pytest.mark.parametrize("wrong", ["error", "short"])
def test_a_failed_read_is_raised_where_the_block_is_used_and_tried_again(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, held = blocks(tmp_path)
    reader = WeightsReader(made)
    assert torch.equal(reader.tensor("0.a"), held[0]["0.a"])
    until(lambda: reader.bytes_read >= 2 * sum(SIZES.values()))
    usual = os.preadv

    def fail(descriptor: int, targets: list, place: int) -> int:
        if wrong == "error":
            raise OSError(5, "Input/output error")
        return 0

    monkeypatch.setattr(weights_reader.os, "preadv", fail)
    reader.end(0)
    assert torch.equal(reader.tensor("1.b"), held[1]["1.b"])  # it was there already
    with pytest.raises(StorageError, match=r"2\.bin"):
        reader.tensor("2.a")
    monkeypatch.setattr(weights_reader.os, "preadv", usual)
    assert torch.equal(reader.tensor("2.a"), held[2]["2.a"])
    reader.close()


def test_a_forked_child_is_told_instead_of_waiting(tmp_path: Path) -> None:
    made, held = blocks(tmp_path)
    reader = WeightsReader(made)
    child = os.fork()
    if child == 0:
        for use in (lambda: reader.begin(1), lambda: reader.tensor("1.a")):
            try:
                use()
            except StorageError as error:
                if "this is a fork of it" in str(error):
                    continue
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(reader.tensor("1.a"), held[1]["1.a"])
    reader.close()


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    made, _ = blocks(tmp_path)
    (tmp_path / "1.bin").unlink()
    reader = WeightsReader(made)
    with pytest.raises(StorageError, match=r"No such file.*1\.bin"):
        reader.tensor("1.a")
    reader.close()


def test_files_without_reads_past_the_page_cache(tmp_path: Path, monkeypatch: Any) -> None:
    made, held = blocks(tmp_path)
    usual = os.open

    def refuse(path: str, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return usual(path, flags, *rest)

    monkeypatch.setattr(weights_reader.os, "open", refuse)
    reader = WeightsReader(made)
    assert all(torch.equal(reader.tensor(n), v) for each in held for n, v in each.items())
    reader.close()


def test_tensors_that_are_not_aligned_to_their_elements(tmp_path: Path) -> None:
    path = tmp_path / "odd.safetensors"
    values = {"x": torch.arange(7, dtype=torch.uint8), "y": torch.randn(50)}
    save_file(values, path)
    data = path.read_bytes()
    begin = len(data) - 50 * 4 - 7
    at = begin + 7 if torch.equal(_floats(data, begin + 7), values["y"]) else begin
    told = {"y": StoredTensor(str(path), at, at + 200, torch.float32, torch.float32, (50,))}
    (tmp_path / "shifted").write_bytes(b"!" + data)
    moved = StoredTensor(
        str(tmp_path / "shifted"), at + 1, at + 201, torch.float32, torch.float32, (50,)
    )
    for each in (told, {"y": moved}):
        reader = WeightsReader([each])
        assert torch.equal(reader.tensor("y"), values["y"])
        reader.close()


def _floats(data: bytes, begin: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(data[begin : begin + 200]), dtype=torch.float32)
