"""With a budget smaller than the context: the C++ session chooses and answers as the plain one."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvswap_torch import KVSwapCache, SwapConfig
from kvswap_torch.hf import session as session_module
from tests.python.tiny_models import (
    COVERING,
    FAMILIES,
    SESSIONS,
    TIGHT,
    has_native,
    prompt,
    tiny_model,
)
from tests.selections import assert_same_choice

ROUNDED_MAX = 2  # passes of a layer whose choice differs by rounding, of some fifty
needs_native = pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")


def conversation(model, path, config, kind, monkeypatch, follow=None):
    """Prefill, decoding, a short chunk, a crop, a long chunk; logits and choices of each pass.

    `follow`: the choices of another implementation, which the reference compares with its own,
    within rounding, and then attends: else a group at the threshold changes all that comes.
    """
    monkeypatch.setattr(session_module, "open_session", SESSIONS[kind])
    torch.set_num_threads(1)
    first = prompt(2, 33, padding=(0, 7))
    later = prompt(2, 24, seed=6)["input_ids"]
    mask = torch.nn.functional.pad(first["attention_mask"], (0, 40), value=1)
    logits, chosen = [], []
    with torch.no_grad(), KVSwapCache(model, path, config) as cache:

        def feed(ids):
            end = cache.get_seq_length() + ids.shape[1]
            session = cache.driver.session
            selects = ids.shape[1] <= config.select_queries_max
            if follow is not None and session is not None:
                session.follow(follow[len(chosen)] if selects else None)
            outputs = model(ids, attention_mask=mask[:, :end], past_key_values=cache)
            logits.append(outputs.logits)
            if selects:
                chosen.append([session.last_selection(i) for i in range(len(cache.parts.disk))])

        feed(first["input_ids"])
        for i in range(6):
            feed(later[:, i : i + 1])
        feed(later[:, 6:9])
        cache.reorder_cache(torch.tensor([0, 1]))
        if not any(cache.is_sliding):
            cache.crop(-5)
        feed(later[:, 9:20])
        for i in range(20, 24):
            feed(later[:, i : i + 1])
        stats = cache.stats()
        if follow is not None:
            choices = cache.driver.session.choices
            assert choices["rounded"] <= ROUNDED_MAX < choices["same"], choices
    return logits, chosen, stats


@needs_native
@pytest.mark.parametrize("look_ahead", [True, False], ids=["ahead", "true-query"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_native_chooses_as_the_reference(family, look_ahead, tmp_path, monkeypatch):
    model = tiny_model(family)
    config = dataclasses.replace(TIGHT, look_ahead=look_ahead)
    logits, chosen, stats = conversation(model, tmp_path, config, "native", monkeypatch)
    expected, _, _ = conversation(model, tmp_path, config, "reference", monkeypatch, chosen)
    torch.testing.assert_close(logits, expected)
    # One query takes groups_max; three share pages_max.
    assert 3 < max(len(groups) for step in chosen for layer in step for groups in layer) <= 6
    assert stats.bytes_read > 0 and 0 < stats.hit_rate < 1


@needs_native
@pytest.mark.parametrize("look_ahead", [True, False], ids=["ahead", "true-query"])
def test_rows_without_a_projection_choose_as_the_reference(look_ahead, tmp_path, monkeypatch):
    model = tiny_model("qwen3")
    config = dataclasses.replace(TIGHT, rows="box", rank=32, look_ahead=look_ahead)
    logits, chosen, stats = conversation(model, tmp_path, config, "native", monkeypatch)
    expected, _, _ = conversation(model, tmp_path, config, "reference", monkeypatch, chosen)
    torch.testing.assert_close(logits, expected)
    assert stats.bytes_read > 0 and 0 < stats.hit_rate < 1


@needs_native
@pytest.mark.parametrize(
    "settings",
    [
        {"score": "mass"},
        {"score": "max_mass"},
        {"score": "mass", "look_ahead": False},
        {"projection_kind": "pca_per_head"},
        {"projection_kind": "skewed"},
        {"projection_kind": "channels"},
        {"projection_kind": "rope_pairs"},
    ],
    ids=str,
)
def test_scores_and_kinds_of_projections_choose_as_the_reference(settings, tmp_path, monkeypatch):
    model = tiny_model("llama")
    config = dataclasses.replace(TIGHT, **settings)
    logits, chosen, stats = conversation(model, tmp_path, config, "native", monkeypatch)
    expected, _, _ = conversation(model, tmp_path, config, "reference", monkeypatch, chosen)
    torch.testing.assert_close(logits, expected)
    assert stats.bytes_read > 0


@needs_native
@pytest.mark.parametrize(
    "settings",
    [
        {"reader": "sync"},
        {"reader": "threads"},
        {"io_mode": "buffered"},
        {"replacement": "lru", "checksum": False},
        {"replacement": "unused", "pages_max": 20},
        {"merge_gap_bytes": 0},
    ],
    ids=str,
)
def test_every_reader_gives_the_same_bits(settings, tmp_path, monkeypatch):
    model = tiny_model("qwen3")
    logits, chosen, _ = conversation(model, tmp_path, TIGHT, "native", monkeypatch)
    other = dataclasses.replace(TIGHT, **settings)
    again, again_chosen, _ = conversation(model, tmp_path, other, "native", monkeypatch)
    if "pages_max" not in settings:  # more pages let short chunks choose more
        assert chosen == again_chosen
        assert all(torch.equal(a, b) for a, b in zip(logits, again, strict=True))


def test_full_rank_chooses_what_attention_weighs_most(open_cache):
    """With every column of the keys and the true query, the best groups are found."""
    model = tiny_model("llama", num_key_value_heads=4, num_hidden_layers=1)
    config = SwapConfig(
        group_tokens=1, tail_tokens=0, sink_tokens=0, rank=64, groups_max=4, pages_max=4,
        select_queries_max=4, score="sum",
    )  # fmt: skip
    cache = open_cache(model, config)
    ids = prompt(1, 30)["input_ids"]
    seen = {}

    def keep(module, args, kwargs):
        hidden, (cos, sin) = kwargs["hidden_states"], kwargs["position_embeddings"]
        modeling = __import__(type(module).__module__, fromlist=["apply_rotary_pos_emb"])
        shape = (*hidden.shape[:-1], -1, module.head_dim)
        query = module.q_proj(hidden).view(shape).transpose(1, 2)
        key = module.k_proj(hidden).view(shape).transpose(1, 2)
        seen["query"], key = modeling.apply_rotary_pos_emb(query, key, cos, sin)
        seen.setdefault("keys", []).append(key)

    attention = model.model.layers[0].self_attn
    handle = attention.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
    handle.remove()
    keys = torch.cat(seen["keys"], 2)[:, :, :30]
    scores = (seen["query"] @ keys.transpose(2, 3)).sum(1)[0, 0]
    (chosen,) = cache.driver.session.last_selection(0)
    assert_same_choice(chosen, scores.topk(4).indices.tolist(), scores, 4)


def test_a_sequence_that_fits_is_exact_beside_one_that_does_not(open_cache):
    """Left padding leaves the second sequence few groups: it attends all of them."""
    model = tiny_model("llama")
    inputs = prompt(2, 40, padding=(0, 26))
    config = dataclasses.replace(COVERING, groups_max=8, pages_max=16)
    cache = open_cache(model, config)
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        ids = inputs["input_ids"]
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
        actual = model(ids[:, :1], attention_mask=mask, past_key_values=cache).logits
        positions = torch.arange(41)[None].expand(2, -1)
        expected = model(
            torch.cat([ids, ids[:, :1]], 1), attention_mask=mask, position_ids=positions
        ).logits[:, -1:]
    torch.testing.assert_close(actual[1], expected[1])
    assert not torch.allclose(actual[0], expected[0])
