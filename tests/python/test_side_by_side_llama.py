"""llama.cpp beside us computes with the same weights and the same keys and values."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from bench.contenders import chunks
from bench.side_by_side.llama import F16, gguf_file, open_model, q8_0, states_of
from bench.side_by_side.plan import NO_LLAMA, Cell, Room
from bench.side_by_side.weights import load_model, weights_file

CONTEXT = 96


@pytest.fixture(scope="module")
def llama():
    return pytest.importorskip("llama_cpp")


@pytest.fixture(scope="module")
def opened(llama, tmp_path_factory):
    shape = Cell("tiny", CONTEXT, 1).shape
    weights = weights_file(shape, tmp_path_factory.mktemp("weights"))
    return load_model(shape, CONTEXT, weights).float(), open_model(gguf_file(weights, shape))


def contender(key, model, batch):
    from bench.side_by_side.llama import LlamaContender

    return LlamaContender(key, model, Cell("tiny", CONTEXT, batch))


def halves(keys: torch.Tensor) -> torch.Tensor:
    """Channels as transformers turns them, where llama.cpp turns neighbours."""
    return torch.cat((keys[..., 0::2], keys[..., 1::2]), dim=-1)


@torch.inference_mode()
def full_cache(model, batch: int) -> DynamicCache:
    """The same keys and values as llama.cpp is given."""
    cache = DynamicCache(config=model.config)
    shape = Cell("tiny", CONTEXT, batch).shape
    for layer in range(shape.layers):
        for keys, values in chunks(shape, batch, CONTEXT, layer):
            cache.update(halves(keys.float()), values.float(), layer)
    return cache


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("key", "within"), [("llama_f16", 0.02), ("llama_q8", 0.05)])
def test_it_answers_as_a_full_cache_of_the_same_keys_and_values(opened, batch, key, within):
    model, file = opened
    theirs, cache = contender(key, file, batch), full_cache(model, batch)
    try:
        for step in range(3):
            ids = torch.tensor(theirs.next).view(batch, 1)
            positions = torch.full_like(ids, CONTEXT + step)
            with torch.inference_mode():
                output = model(input_ids=ids, past_key_values=cache, position_ids=positions)
            theirs.step()
            expected = output.logits[:, -1].float().numpy()
            assert np.abs(theirs.logits() - expected).max() < within * np.abs(expected).max()
        assert theirs.nbytes >= Cell("tiny", CONTEXT, batch).kv_bytes // 2
    finally:
        theirs.close()


def test_few_tokens_are_its_floor(opened):
    theirs = contender("llama_floor", opened[1], 1)
    try:
        theirs.step()
        assert theirs.tokens == 400
        assert len(theirs.seconds) == 1
    finally:
        theirs.close()


def test_a_state_is_a_row_a_token():
    shape = Cell("tiny", CONTEXT, 2).shape
    first, second = states_of(shape, 2, CONTEXT, F16, b"12345678")
    rows = 2 * shape.layers * CONTEXT * shape.kv_heads * shape.head_dim * 2
    heads = 8 + 8 + CONTEXT * 12 + 8 + 2 * shape.layers * 12 + 4
    assert len(first) == len(second) == rows + heads
    assert first != second


def test_q8_0_is_within_half_a_step():
    numbers = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float16)
    numbers[0, :32] = 0
    packed = np.frombuffer(q8_0(numbers), dtype=np.uint8).reshape(-1, 34)
    scales = packed[:, :2].copy().view(np.float16).astype(np.float32)
    back = (scales * packed[:, 2:].copy().view(np.int8)).reshape(numbers.shape)
    steps = np.repeat(scales.reshape(5, 2), 32, axis=1)
    assert (np.abs(back - numbers.astype(np.float32)) <= 0.51 * steps + 127 * 2**-11 * steps).all()


def test_it_is_left_out_by_name():
    room = Room(memory=1 << 50, disk=1 << 50, has_cap=True, modules=frozenset())
    assert room.problem(Cell("tiny", 1024, 1), "llama_q8") == NO_LLAMA
    assert "reads no disk" in room.problem(Cell("tiny", 1024, 1, "emmc"), "llama_f16")


def test_weights_that_are_there_are_not_written_again(opened, tmp_path):
    shape = Cell("tiny", CONTEXT, 1).shape
    weights = weights_file(shape, tmp_path)
    path = gguf_file(weights, shape)
    os.utime(path, (1, 1))
    assert gguf_file(weights, shape).stat().st_mtime == 1
