"""Cropping, selecting, repeating and reordering sequences."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from tests.python.tiny_models import forward, prompt, tiny_model


def test_crop_takes_what_transformers_takes(llama, open_cache):
    cache = open_cache(llama)
    ids = prompt(1, 20)["input_ids"]
    forward(llama, ids, cache)
    with pytest.raises(ValueError, match="negative integer"):
        cache.crop(5)
    cache.crop(0)
    assert cache.get_seq_length() == 20
    for removed, left in ((2, 18), (9, 9), (3, 6)):
        cache.crop(-removed)
        assert cache.get_seq_length() == left
        expected = forward(llama, ids[:, : left + 2], None)[:, -2:]
        actual = forward(llama, ids[:, left : left + 2], cache)
        torch.testing.assert_close(actual, expected)
        cache.crop(torch.tensor(-2))  # as assisted decoding of transformers 5.17 does
    cache.crop(-100)
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(forward(llama, ids, cache), forward(llama, ids, None))


def test_crop_forgets_padding(llama, open_cache):
    """Positions that were cropped away may come back with another validity."""
    cache = open_cache(llama)
    ids = prompt(2, 12)["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, 8:10] = 0
    forward(llama, ids, cache, attention_mask=mask)
    cache.crop(-4)
    torch.testing.assert_close(forward(llama, ids[:, 8:], cache), forward(llama, ids, None)[:, 8:])


def test_sliding_layers_crop_only_while_they_record(gemma, open_cache):
    cache = open_cache(gemma)
    forward(gemma, prompt(1, 20)["input_ids"], cache)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-2)
    assert [cache.get_seq_length(i) for i in range(4)] == [20] * 4


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_select_repeat_and_reorder(family, open_cache):
    model = tiny_model(family)
    inputs = prompt(3, 15, padding=(0, 4, 2))
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    plain, cache = DynamicCache(config=model.config), open_cache(model)
    for each in (plain, cache):
        forward(model, ids, each, attention_mask=mask)
        each.batch_select_indices(torch.tensor([2, 0]))
        each.batch_repeat_interleave(2)
        each.reorder_cache(torch.tensor([3, 1, 0, 0]))
    order = torch.tensor([0, 2, 2, 2])
    mask = torch.nn.functional.pad(mask[order], (0, 1), value=1)
    step = {"attention_mask": mask, "position_ids": torch.full((4, 1), 15)}
    expected = forward(model, ids[order, :1], plain, **step)
    torch.testing.assert_close(forward(model, ids[order, :1], cache, **step), expected)
    assert cache.batch_size == 4


NOT_THERE = {
    "must stay; reset": lambda cache: cache.batch_select_indices(torch.tensor([False, False])),
    "one sequence at least": lambda cache: cache.batch_select_indices([]),
    r"must be -2..1, got 5": lambda cache: cache.batch_select_indices(torch.tensor([0, 5])),
    r"must be -2..1, got -5": lambda cache: cache.reorder_cache(torch.tensor([-5, 0])),
    "a mask must be over 2 sequences, got 1": lambda cache: cache.batch_select_indices([True]),
    "got a mask": lambda cache: cache.reorder_cache(torch.tensor([True, False])),
    r"got \[\] of": lambda cache: cache.batch_select_indices(torch.tensor(1)),
    r"got \[2\] of torch.float32": lambda cache: cache.reorder_cache(torch.ones(2)),
    "must be given numbers": lambda cache: cache.reorder_cache("first"),
    "repeats must be an integer": lambda cache: cache.batch_repeat_interleave(0),
    "of at least 1, got -1": lambda cache: cache.batch_repeat_interleave(-1),
    "negative integer, .* got nan": lambda cache: cache.crop(float("nan")),
    "got -1.5": lambda cache: cache.crop(-1.5),
    "got None": lambda cache: cache.crop(None),
    r"got tensor\(-1\.5": lambda cache: cache.crop(torch.tensor(-1.5)),
    r"got tensor\(\[-1, -2": lambda cache: cache.crop(torch.tensor([-1, -2])),
    "got tensor\\(False": lambda cache: cache.crop(torch.tensor(False)),
}


@pytest.mark.parametrize("said", NOT_THERE)
def test_what_is_not_there_is_refused_and_nothing_changes(said, llama, open_cache):
    ids = prompt(2, 15)["input_ids"]
    cache = open_cache(llama)
    forward(llama, ids, cache)
    with pytest.raises(ValueError, match=said):
        NOT_THERE[said](cache)
    assert (cache.batch_size, cache.get_seq_length()) == (2, 15)
    cache.batch_select_indices(torch.tensor([-1]))
    cache.crop(-1)
    expected = forward(llama, ids[1:], None)[:, -1:]
    torch.testing.assert_close(forward(llama, ids[1:, -1:], cache), expected)
