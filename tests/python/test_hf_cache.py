"""The cache's life: opening, sharing a model, closing, and all the ways to use it wrongly."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from kvswap_torch import (
    ClosedError,
    KVSwapCache,
    KVSwapError,
)
from kvswap_torch.hf import cache as cache_module
from tests.python.tiny_models import COVERING, ctrl_c, forward, greedy, prompt, tiny_model

NATIVE_AT_LEAST = [
    "native",
    *(pytest.param(kind, marks=pytest.mark.long) for kind in ("reference", "host device")),
]

# Lengths, as transformers asks for them.


def test_lengths(llama, open_cache):
    cache = open_cache(llama)
    assert not cache and not cache.is_initialized and len(cache) == 3
    assert cache.get_seq_length() == 0 and cache.batch_size == -1
    forward(llama, prompt(2, 20)["input_ids"], cache)
    assert cache and cache.is_initialized
    assert [cache.get_seq_length(i) for i in range(3)] == [20, 20, 20]
    assert cache.get_query_offset() == 20 and cache.get_mask_sizes(3, 0) == (23, 0)
    assert cache.batch_size == 2 and not cache.is_compileable and cache.is_croppable
    assert cache.is_sliding == [False] * 3 and cache.is_dummy == [False] * 3
    assert cache.get_max_length() == cache.get_max_cache_shape() == -1
    assert open_cache(llama, max_context=64, max_batch=1).get_max_length() == 64


def test_hybrid_lengths(gemma, open_cache):
    """Sliding layers are transformers' own and know their window."""
    cache, plain = open_cache(gemma), DynamicCache(config=gemma.config)
    ids = prompt(1, 20)["input_ids"]
    for part in ids.split(8, 1):
        forward(gemma, part, cache)
        forward(gemma, part, plain)
        for i in range(4):
            assert cache.get_mask_sizes(1, i) == plain.get_mask_sizes(1, i)
            assert cache.get_seq_length(i) == plain.get_seq_length(i)
    assert cache.is_sliding == plain.is_sliding == [True, False, True, False]


def test_phi3_does_not_drop_it(open_cache):
    """Phi-3 recomputes in memory when a true cache crosses its original length."""
    model = tiny_model("phi3", original_max_position_embeddings=24)
    inputs = prompt(1, 20)
    cache = open_cache(model)
    # Without long RoPE nothing changes at that length.
    assert torch.equal(greedy(model, inputs, cache), greedy(model, inputs))
    assert cache.get_seq_length() == 31 and cache


def test_phi3_long_rope_crossing(open_cache):
    model = tiny_model(
        "phi3",
        original_max_position_embeddings=24,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 24,
        },
    )
    short, long = prompt(1, 20), prompt(1, 30)
    cache = open_cache(model)
    assert torch.equal(greedy(model, short, cache, tokens=4), greedy(model, short, tokens=4))
    cache.reset()
    with pytest.raises(ValueError, match=r"rotary factors past 24 tokens.*got 24 \+ 1"):
        greedy(model, short, cache, tokens=8)
    cache.reset()
    assert torch.equal(greedy(model, long, cache), greedy(model, long))


# Several caches and models.


def test_two_caches_of_one_model(llama, open_cache):
    first, second = open_cache(llama), open_cache(llama)
    one, two = prompt(1, 20, seed=3), prompt(2, 24, seed=4)
    parts = zip(one["input_ids"].split(5, 1), two["input_ids"].split(6, 1), strict=True)
    for part, other in parts:
        ours = forward(llama, part, first)
        forward(llama, other, second)
    expected = forward(llama, one["input_ids"], None)
    torch.testing.assert_close(ours, expected[:, -5:])
    first.close()
    second.crop(-1)  # generate() wants a token to begin with
    assert torch.equal(greedy(llama, two, second), greedy(llama, two))
    second.close()
    assert llama.config._attn_implementation == "sdpa"


def test_foreign_caches_while_one_is_open(llama, open_cache):
    inputs = prompt(2, 20, padding=(0, 4))
    expected = greedy(llama, inputs)
    cache = open_cache(llama)
    forward(llama, inputs["input_ids"], cache, attention_mask=inputs["attention_mask"])
    assert torch.equal(greedy(llama, inputs), expected)
    static = greedy(llama, inputs, None, cache_implementation="static", disable_compile=True)
    assert torch.equal(static, expected)
    no_cache = llama.generate(**inputs, use_cache=False, do_sample=False, max_new_tokens=3)
    assert torch.equal(no_cache, expected[:, : no_cache.shape[1]])
    assert cache.get_seq_length() == 20


def test_two_models_in_one_process(llama, gemma, open_cache):
    caches = {model: open_cache(model) for model in (llama, gemma)}
    inputs = prompt(1, 20)
    for model, cache in caches.items():
        assert torch.equal(greedy(model, inputs, cache), greedy(model, inputs))


def test_two_models_with_one_config_object(llama, open_cache):
    other = type(llama)(llama.config).eval()
    cache = open_cache(llama)
    inputs = prompt(1, 12)
    assert torch.equal(greedy(llama, inputs, cache), greedy(llama, inputs))
    other_cache = open_cache(other)
    assert torch.equal(greedy(other, inputs, other_cache), greedy(other, inputs))
    cache.close()
    assert llama.config._attn_implementation == "kvswap"
    other_cache.close()
    assert llama.config._attn_implementation == "sdpa"


def test_used_with_another_model(llama, open_cache):
    cache, other = open_cache(llama), tiny_model("llama", seed=9)
    with pytest.raises(ValueError, match="model it was opened for"):
        forward(other, prompt(1, 8)["input_ids"], cache)
    open_cache(other)
    with pytest.raises(ValueError, match="model it was opened for"):
        forward(other, prompt(1, 8)["input_ids"], cache)


def test_a_failed_pass_opens_no_door_to_another_model(llama, open_cache):
    cache, other = open_cache(llama), tiny_model("llama", seed=9)
    ids = prompt(1, 8)["input_ids"]
    forward(llama, ids, cache)
    with pytest.raises(Exception):  # noqa: B017  the model's own, for no tokens
        forward(llama, ids[:, :0], cache)
    with pytest.raises(ValueError, match="model it was opened for"):
        forward(other, ids[:, :2], cache)
    assert cache.get_seq_length() == 8
    expected = forward(llama, torch.cat([ids, ids[:, :2]], 1), None)[:, 8:]
    torch.testing.assert_close(forward(llama, ids[:, :2], cache), expected)


# Its end.


def test_close_restores_the_model_and_refuses_use(llama, open_cache):
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in llama.modules()]
    cache = open_cache(llama)
    assert llama.config._attn_implementation == "kvswap"
    forward(llama, prompt(1, 8)["input_ids"], cache)
    cache.close()
    cache.close()
    assert cache.closed and llama.config._attn_implementation == "sdpa" and "closed" in repr(cache)
    assert hooks == [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in llama.modules()]
    for use in (cache.get_seq_length, cache.reset, cache.stats, lambda: cache.crop(-1)):
        with pytest.raises(ClosedError, match="was closed"):
            use()
    with pytest.raises(ClosedError):
        greedy(llama, prompt(1, 8), cache)
    assert not cache


def test_collected_without_close(llama, open_cache, sessions, tmp_path):
    cache = KVSwapCache(llama, tmp_path, COVERING)
    forward(llama, prompt(1, 8)["input_ids"], cache)
    del cache
    gc.collect()
    assert llama.config._attn_implementation == "sdpa"


def test_an_error_inside_with(llama, sessions, tmp_path):
    with pytest.raises(ZeroDivisionError), KVSwapCache(llama, tmp_path, COVERING):
        raise ZeroDivisionError
    assert llama.config._attn_implementation == "sdpa" and not list(tmp_path.iterdir())


def test_a_failed_construction_leaves_nothing(llama, sessions, tmp_path, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("no hooks today")

    monkeypatch.setattr(cache_module, "Hooks", broken)
    with pytest.raises(RuntimeError, match="no hooks today"):
        KVSwapCache(llama, tmp_path, COVERING)
    assert llama.config._attn_implementation == "sdpa" and not list(tmp_path.iterdir())
    assert not any(m._forward_pre_hooks for m in llama.modules())


def test_copies_are_refused_with_a_reason(llama, open_cache):
    cache = open_cache(llama)
    for copying, why in ((copy.copy, "fork"), (copy.deepcopy, "fork")):
        with pytest.raises(TypeError, match=why):
            copying(cache)
    with pytest.raises(TypeError, match="unnamed file"):
        pickle.dumps(cache)


@pytest.mark.parametrize("sessions", NATIVE_AT_LEAST, indirect=True)
def test_interpreter_exit_closes(sessions, tmp_path):
    program = textwrap.dedent(
        f"""
        from tests.python.tiny_models import SESSIONS, forward, greedy, prompt, tiny_model
        from kvswap_torch.hf import session
        session.open_session = SESSIONS[{sessions!r}]
        from kvswap_torch import KVSwapCache
        model = tiny_model("llama")
        cache = KVSwapCache(model, {str(tmp_path)!r})
        greedy(model, prompt(1, 8), cache, tokens=2)
        """
    )
    root = Path(__file__).parents[2]
    environment = {"PYTHONPATH": str(root), "PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr
    assert not list(tmp_path.iterdir())


# Wrong use of an open cache.


def test_batch_must_stay(llama, open_cache):
    cache = open_cache(llama)
    forward(llama, prompt(2, 8)["input_ids"], cache)
    with pytest.raises(ValueError, match="batch must stay 2 until reset"):
        forward(llama, prompt(3, 8)["input_ids"], cache)
    assert cache.get_seq_length() == 8


def test_masks_must_not_change_their_mind(llama, open_cache):
    cache = open_cache(llama)
    inputs = prompt(2, 12, padding=(0, 3))
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    forward(llama, ids, cache, attention_mask=mask)
    longer = torch.nn.functional.pad(mask, (0, 2), value=1)
    changed = longer.clone()
    changed[1, 0] = 1
    for wrong in (changed, torch.ones_like(longer)):
        with pytest.raises(ValueError, match="must stay padding"):
            forward(llama, ids[:, :2], cache, attention_mask=wrong)
    with pytest.raises(ValueError, match="must be passed again"):
        forward(llama, ids[:, :2], cache)
    with pytest.raises(ValueError, match=r"must cover the 12 positions.*\[2, 14\], got \[2, 12\]"):
        forward(llama, ids[:, :2], cache, attention_mask=mask)
    ours = forward(llama, ids[:, :2], cache, attention_mask=longer)
    positions = torch.arange(14)[None].expand(2, -1)
    expected = llama(
        torch.cat([ids, ids[:, :2]], 1), attention_mask=longer, position_ids=positions
    ).logits[:, -2:]
    torch.testing.assert_close(ours, expected.detach())


def test_masks_that_say_more_than_padding(llama, open_cache):
    cache = open_cache(llama)
    ids = prompt(1, 8)["input_ids"]
    square = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match=r"padding at most, got a mask of shape \(1, 1, 8, 8\)"):
        forward(llama, ids, cache, attention_mask=square)


def test_an_interrupted_pass(llama, open_cache):
    """Layers of different length are noticed and made equal; the same pass may be run again."""
    cache = open_cache(llama)
    inputs = prompt(1, 12)
    with ctrl_c(llama.model.layers[1].mlp, after=True):
        forward(llama, inputs["input_ids"], cache)
    assert torch.equal(greedy(llama, inputs), greedy(llama, inputs))
    assert cache.get_seq_length() == 0
    assert torch.equal(greedy(llama, inputs, cache), greedy(llama, inputs))


def test_an_interrupted_pass_of_a_hybrid_model(gemma, open_cache):
    """A sliding layer may have moved on although no layer on disk has: it is taken back."""
    cache = open_cache(gemma)
    inputs = prompt(1, 12)
    wrong = torch.ones(1, 12, dtype=torch.long)
    forward(gemma, inputs["input_ids"], cache)
    with pytest.raises(ValueError, match="must cover"):
        forward(gemma, inputs["input_ids"], cache, attention_mask=wrong)
    assert cache.get_seq_length() == 12
    cache.reset()
    assert torch.equal(greedy(gemma, inputs, cache), greedy(gemma, inputs))


def test_an_interrupted_pass_that_declared_padding(llama, open_cache):
    cache = open_cache(llama)
    padded, plain = prompt(2, 12, padding=(0, 3)), prompt(2, 12)
    with ctrl_c(llama.model.layers[0].self_attn.q_proj, after=True):
        forward(llama, padded["input_ids"], cache, attention_mask=padded["attention_mask"])
    assert torch.equal(greedy(llama, plain, cache), greedy(llama, plain))


def test_gradients_are_refused_not_lost(llama, open_cache):
    logits = llama(prompt(1, 8)["input_ids"], past_key_values=open_cache(llama)).logits
    with pytest.raises(KVSwapError, match="for inference"):
        logits.sum().backward()


def test_a_layer_alone_cannot_be_changed(llama, open_cache):
    cache = open_cache(llama)
    with pytest.raises(ValueError, match="on the cache, not on a layer"):
        cache.layers[0].crop(-1)
    with pytest.raises(ValueError, match="update from elsewhere"):
        cache.update(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16), 0)
