"""A long prompt in one pass of `generate()` is read in pieces, and nobody sees a difference."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from kvswap_torch import SwapConfig
from kvswap_torch.hf import pieces
from tests.python.tiny_models import SMALL, forward, greedy, prompt, tiny_model

PIECE = 16


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_TOKENS", PIECE)


@pytest.fixture
def passes(monkeypatch):
    """Tokens of each forward pass of a model's decoder."""

    def watch(model) -> list[int]:
        seen: list[int] = []
        model.model.register_forward_pre_hook(
            lambda module, args, kwargs: (
                seen.append(kwargs["input_ids"].shape[1])
                if kwargs.get("input_ids") is not None
                else None
            ),
            with_kwargs=True,
        )
        return seen

    return watch


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("padding", [(0, 0), (0, 21)])
def test_tokens_are_those_of_one_pass(family, padding, open_cache, passes):
    model = tiny_model(family)
    inputs = prompt(2, 70, padding=padding)
    expected = greedy(model, inputs, DynamicCache(config=model.config))
    cache = open_cache(model)
    seen = passes(model)
    assert torch.equal(greedy(model, inputs, cache), expected)
    assert seen[:5] == [14] * 5 and set(seen[5:]) == {1}
    assert torch.equal(cache.token_ids, expected[:, :-1])


def test_a_second_turn_is_read_in_pieces_too(llama, open_cache, passes):
    told = []
    seen = passes(llama)
    for cache in (DynamicCache(config=llama.config), open_cache(llama)):
        out = greedy(llama, prompt(1, 20), cache, tokens=3)
        ids = torch.cat([out, prompt(1, 40, seed=4)["input_ids"]], 1)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        seen.clear()
        told.append(greedy(llama, inputs, cache))
    assert torch.equal(*told)
    assert seen[0] == 41 // 3 and sum(seen[:3]) == 41


WHOLE = {
    "all logits are wanted": {},
    "more logits than the last piece has": {"logits_to_keep": 40},
    "logits by their numbers": {"logits_to_keep": torch.tensor([3, 69])},
    "hidden states are wanted": {"logits_to_keep": 1, "output_hidden_states": True},
}


@pytest.mark.parametrize("why", WHOLE)
def test_a_pass_stays_whole_where_more_of_it_is_seen(llama, open_cache, passes, why):
    seen, ids = passes(llama), prompt(1, 70)["input_ids"]
    expected = forward(llama, ids, None, **WHOLE[why])
    cache = open_cache(llama)
    seen.clear()
    actual = forward(llama, ids, cache, **WHOLE[why])
    assert seen == [70]
    torch.testing.assert_close(actual, expected)


def test_a_pass_that_records_gradients_stays_whole(llama, open_cache, passes):
    cache, ids = open_cache(llama), prompt(1, 70)["input_ids"]
    seen = passes(llama)
    with torch.enable_grad():
        llama(ids, past_key_values=cache, logits_to_keep=1)
    assert seen == [70]


KEPT = {"keeper": "observed", "keep_tokens": 8, "keep_window": 4}
CLUSTERS = {"rows": "centroid", "grouping": "clusters", "cluster_tokens": 4}


@pytest.mark.parametrize("more", [KEPT, CLUSTERS], ids=["kept tokens", "clusters"])
def test_what_is_made_of_whole_chunks_gets_them(llama, tmp_path, passes, more):
    from kvswap_torch import KVSwapCache

    settings = SMALL | {"look_ahead": False} | more
    if "rows" in more:
        del settings["rank"]
    config = SwapConfig(groups_max=3, pages_max=12, **settings)
    with KVSwapCache(llama, path=tmp_path, config=config) as cache:
        seen = passes(llama)
        greedy(llama, prompt(1, 70), cache, tokens=2)
    assert seen[0] == 70


def test_settings_are_chosen_for_the_whole_prompt(llama, tmp_path, monkeypatch):
    """Not for its first piece, which would leave the rest without memory."""
    from kvswap_torch import KVSwapCache

    told = []
    for piece in (16, 999):
        monkeypatch.setattr(pieces, "PIECE_TOKENS", piece)
        with KVSwapCache(llama, path=tmp_path, kv_memory_bytes="1MiB") as cache:
            greedy(llama, prompt(1, 300), cache, tokens=2)
            told.append(cache.driver.config)
            assert cache.driver.first_pass.tokens == 300
    assert told[0] == told[1]


def test_a_pass_that_fails_in_a_later_piece_is_taken_back(llama, open_cache, monkeypatch):
    cache, inputs = open_cache(llama), prompt(2, 70, padding=(0, 9))
    before = greedy(llama, prompt(2, 30, padding=(0, 9)), cache, tokens=1)
    held = cache.get_seq_length()
    ids = torch.cat([before, inputs["input_ids"]], 1)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    calls, last = [], llama.model.layers[-1].mlp
    forward_mlp = last.forward

    def fail(hidden):
        calls.append(hidden.shape[1])
        return forward_mlp(hidden) if len(calls) < 3 else 1 / 0

    monkeypatch.setattr(last, "forward", fail)
    with pytest.raises(ZeroDivisionError):
        greedy(llama, {"input_ids": ids, "attention_mask": mask}, cache)
    monkeypatch.undo()
    assert len(calls) == 3 and cache.get_seq_length() == held
    more = {"input_ids": ids, "attention_mask": mask}
    assert torch.equal(greedy(llama, more, cache), greedy(llama, more))
