"""Chats whose second turn calls padding what was valid: rows of a batch ended at different tokens.

`generate()` puts pads behind a row that has ended, and a model may generate the pad token itself.
The next turn's mask hides them, whatever the first turn attended.
"""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from kvswap_torch import KVSwapCache, SwapConfig
from tests.python.tiny_models import COVERING, PAD, SMALL, prompt, tiny_model

BY_MASS = SMALL | {"score": "mass"}
EACH = SwapConfig(groups_max=400, pages_max=400, heads="each", **BY_MASS)
MASS = SwapConfig(groups_max=400, pages_max=400, **BY_MASS)
COVERINGS = {"sum": COVERING, "mass": MASS, "each head": EACH}
#: A choice among 30 groups and more, with pages for each of them.
SELECTING = SwapConfig(groups_max=8, pages_max=400, **SMALL)


def first_turn(model, cache, batch: int, *, ends_at: int):
    """Ids and mask of prompt and answer; the first row's ended at its token `ends_at`."""
    inputs = prompt(batch, 40, padding=(0, 11, 3)[:batch])
    mask = inputs["attention_mask"]
    plain = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    eos = int(plain[0, 40 + ends_at])
    whole = model.generate(
        **inputs,
        past_key_values=cache,
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=PAD,
    )
    answer = whole[:, 40:]
    ended = (answer == eos).cumsum(1) - (answer == eos).long() > 0
    return whole, torch.cat([mask, (~ended).long()], 1)


def next_turn(model, cache, ids, mask, question: int = 9, seed: int = 5):
    """Ids and mask with one more question and its answer."""
    asked = prompt(len(ids), question, seed=seed)["input_ids"]
    ids = torch.cat([ids, asked], 1)
    mask = torch.cat([mask, torch.ones_like(asked)], 1)
    both = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, **both)
    return out, torch.nn.functional.pad(mask, (0, out.shape[1] - mask.shape[1]), value=1)


def chat(model, cache, batch: int, question: int):
    ids, mask = first_turn(model, cache, batch, ends_at=4)
    assert (mask[:, 40:] == 0).any() or batch == 1
    if batch == 1:
        mask[0, 41:43] = 0  # as if the model had generated pads
    for turn in range(2):
        ids, mask = next_turn(model, cache, ids, mask, question, seed=turn)
        mask = mask.clone()
        mask[-1, -4:-2] = 0  # and again, in the answer to the next question
    return ids


@pytest.mark.parametrize("kind", COVERINGS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize(("batch", "question"), [(1, 9), (3, 9), (3, 2)])
@pytest.mark.pairs
def test_a_second_turn_has_the_tokens_of_a_dynamic_cache(family, batch, question, kind, open_cache):
    """A question of 2 tokens selects, one of 9 attends exactly."""
    model = tiny_model(family)
    expected = chat(model, DynamicCache(config=model.config), batch, question)
    assert torch.equal(chat(model, open_cache(model, COVERINGS[kind]), batch, question), expected)


def test_a_pad_that_the_model_generated_is_hidden_without_a_mask(llama, open_cache):
    """generate() makes the mask of the pads that it finds."""
    ids = prompt(1, 40)["input_ids"]
    ids[0, 30:33] = PAD
    caches = DynamicCache(config=llama.config), open_cache(llama)
    told = []
    for cache in caches:
        with torch.no_grad():
            llama(ids, past_key_values=cache)  # valid so far
        more = torch.cat([ids, prompt(1, 7, seed=3)["input_ids"]], 1)
        told.append(llama.generate(more, past_key_values=cache, max_new_tokens=8, do_sample=False))
    assert torch.equal(*told)


def test_after_a_crop_padding_stays_and_new_positions_are_new(llama, open_cache):
    told = []
    for cache in (DynamicCache(config=llama.config), open_cache(llama)):
        ids, mask = first_turn(llama, cache, 3, ends_at=4)
        ids, mask = next_turn(llama, cache, ids, mask)
        cache.crop(-(ids.shape[1] - 1 - 56))  # into the second turn's question
        asked = torch.cat([ids[:, :56], prompt(3, 6, seed=9)["input_ids"]], 1)
        mask = torch.nn.functional.pad(mask[:, :56], (0, 6), value=1)
        told.append(next_turn(llama, cache, asked, mask, question=3)[0])
    assert torch.equal(*told)


def test_selecting_and_repeating_sequences_takes_their_padding_along(llama, open_cache):
    told = []
    for cache in (DynamicCache(config=llama.config), open_cache(llama)):
        ids, mask = first_turn(llama, cache, 3, ends_at=4)
        ids, mask = next_turn(llama, cache, ids, mask)
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.batch_repeat_interleave(2)
        order = torch.tensor([2, 2, 0, 0])
        told.append(next_turn(llama, cache, ids[order], mask[order])[0])
    assert torch.equal(*told)


def test_with_a_selection_padding_is_chosen_no_more(llama, open_cache):
    """Pads in every group but sinks and the last: what is left is few enough to be attended."""
    ids = prompt(1, 60)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, 2:56] = 0
    told = []
    for cache in (DynamicCache(config=llama.config), open_cache(llama, SELECTING)):
        with torch.no_grad():
            llama(ids, past_key_values=cache)
        told.append(next_turn(llama, cache, ids, mask, question=1)[0])
    # Of what counts at most 6 groups are sealed by the last token, and 8 are chosen.
    assert torch.equal(*told)


def test_what_came_as_padding_cannot_become_valid(llama, open_cache):
    inputs = prompt(2, 20, padding=(0, 6))
    cache = open_cache(llama)
    with torch.no_grad():
        llama(**inputs, past_key_values=cache)
        more = torch.ones(2, 23, dtype=torch.long)
        with pytest.raises(ValueError, match="what was padding when it came must stay padding"):
            llama(inputs["input_ids"][:, :3], attention_mask=more, past_key_values=cache)
        # Nothing has changed by it.
        more[:, :20] = inputs["attention_mask"]
        actual = llama(inputs["input_ids"][:, :3], attention_mask=more, past_key_values=cache)
        plain = llama(
            torch.cat([inputs["input_ids"], inputs["input_ids"][:, :3]], 1), attention_mask=more
        )
    torch.testing.assert_close(actual.logits, plain.logits[:, -3:])


def test_a_pass_that_fails_leaves_what_was_valid(llama, open_cache, monkeypatch):
    """Whatever its mask said; also where it fails behind layers that have taken it."""
    ids, cache = prompt(2, 30)["input_ids"], open_cache(llama)
    mask = torch.ones(2, 32, dtype=torch.long)
    mask[1, 10:14] = 0
    with torch.no_grad():
        llama(ids, past_key_values=cache)
        last = llama.model.layers[-1].mlp
        monkeypatch.setattr(last, "forward", lambda hidden: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llama(ids[:, :2], attention_mask=mask, past_key_values=cache)
        monkeypatch.undo()
        plain = llama(torch.cat([ids, ids[:, :2]], 1)).logits[:, -2:]
        torch.testing.assert_close(llama(ids[:, :2], past_key_values=cache).logits, plain)


def test_saved_and_forked_caches_go_on_with_it(llama, tmp_path):
    plain = DynamicCache(config=llama.config)
    folder = tmp_path / "chat.kvswap"

    def turns(cache):
        ids, mask = first_turn(llama, cache, 3, ends_at=4)
        mask[0, :2] = 0  # of the first row the first tokens, which are its sinks
        return next_turn(llama, cache, ids, mask)

    ids, mask = turns(plain)
    expected = next_turn(llama, plain, ids, mask)[0]
    with KVSwapCache(llama, path=tmp_path, config=COVERING) as cache:
        turns(cache)
        cache.save(folder)
        with cache.fork() as forked:
            assert torch.equal(next_turn(llama, forked, ids, mask)[0], expected)
        assert torch.equal(next_turn(llama, cache, ids, mask)[0], expected)
    for name in ("again", "once_more"):  # as it was saved, and as it was saved again
        with KVSwapCache.open(llama, folder, path=tmp_path) as opened:
            again = tmp_path / f"{name}.kvswap"
            opened.save(again)
            assert torch.equal(next_turn(llama, opened, ids, mask)[0], expected)
        folder = again
