"""Every preset through stock ``generate()``, in each way that it is called.

Where the budget covers the context the tokens are the full cache's; with records of e4m3 or of four
bits those of a full cache that is rounded as its groups leave the tail. `make presets-matrix` runs
all, and test_presets_kept.py; `make test` each preset on two models, and what minds a model most on
all.
"""

from __future__ import annotations

import dataclasses
import functools
import os

import pytest
import torch
from transformers import DynamicCache

import kvswap_torch
from kvswap_torch import KVSwapCache, ModelIdentity, SwapConfig
from kvswap_torch.config.nested import mapping_of
from kvswap_torch.preset import find
from tests.python import every_model
from tests.python.test_rounded_records import RoundedCache
from tests.python.tiny_models import greedy, has_native, prompt, tiny_model

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]
ALL = os.environ.get("KVSWAP_TEST_ALL_PRESETS") == "1"
NAMES = [preset.name for preset in kvswap_torch.presets()]
GQA = {1: (4, 4), 2: (4, 2), 3: (6, 2), 8: (8, 1)}  # query heads of a KV head
# Groups as small as prompts of tiny models need; nothing else of a preset changes.
FEW = {"group_tokens": 4, "tail_tokens": 4, "sink_tokens": 2, "io_mode": "buffered"}
PADDED = prompt(3, 21, padding=(0, 7, 3))
# Presets whose records are rounded -> KV heads -> tokens of the smallest group whose record fills
# half of what a disk reads at once, where 4 do not.
ROUNDED = {"kvswap-fp8": {1: 8}, "kvswap-int4": {1: 16, 2: 8}}
BEAMS = {"num_beams": 3, "num_return_sequences": 2, "tokens": 6}


@functools.cache
def model_of(ratio: int):
    heads, kv_heads = GQA[ratio]
    return tiny_model("llama", num_attention_heads=heads, num_key_value_heads=kv_heads)


@functools.cache
def half_model():
    return tiny_model("llama", dtype=torch.bfloat16)


@functools.cache
def hybrid_model():
    return tiny_model("gemma3")


@functools.cache
def latent_model():
    return every_model.build("DeepseekV3")


@functools.cache
def assistant():
    """Another model: most of what it proposes is wrong and cropped away."""
    return tiny_model("llama", seed=3, num_hidden_layers=1)


def small(name: str, model, groups: int, **changes) -> SwapConfig:
    """A preset for a tiny model, in groups of a few tokens, of which a step attends `groups`."""
    config = model.config
    identity = ModelIdentity(
        layers=config.num_hidden_layers,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
    )
    if hasattr(config, "kv_lora_rank"):
        latent = config.kv_lora_rank + config.qk_rope_head_dim
        identity = dataclasses.replace(identity, kv_heads=1, head_dim=latent)
    budget = {"groups_max": groups, "pages_max": max(8, 2 * groups)}
    fewest = ROUNDED.get(name, {}).get(config.num_key_value_heads)
    if fewest is not None:
        changes = {"group_tokens": fewest} | changes
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * identity.layers
    on_disk = kinds.count("full_attention")
    changes = given_of(find(name), on_disk, config.num_attention_heads) | changes
    made = SwapConfig.preset(name, model=identity, **FEW | budget | changes)
    return SwapConfig(**mapping_of(made))


def given_of(preset, layers: int, heads: int) -> dict:
    """What a preset needs to know of a model: one head of each layer, and rising shares."""
    given = {
        "retention.scoring_heads": tuple(layer * heads + layer % heads for layer in range(layers)),
        "retention.layer_weights": tuple(float(1 + layer) for layer in range(layers)),
    }
    return {name: given[name] for name in preset.needs}


def short(name: str, number: int) -> bool:
    """Of a long list, what `make test` runs."""
    return ALL or name in ("quest", "loki") or NAMES.index(name) % 3 == number


def turns(model, cache) -> list[torch.Tensor]:
    """Three turns, each with all before it, and a crop after each."""
    ids, answers = prompt(2, 18)["input_ids"], []
    for turn, question in enumerate((1, 3, 12)):
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        answers.append(greedy(model, inputs, cache, tokens=5))
        cache.crop(-3)
        ids = torch.cat([answers[-1][:, :-2], prompt(2, question, seed=turn)["input_ids"]], 1)
    return answers


@functools.cache
def plain_answers(ratio: int) -> list[torch.Tensor]:
    return plain_answers_of(model_of(ratio))


@functools.cache
def plain_latent_answers() -> list[torch.Tensor]:
    return plain_answers_of(latent_model())


def plain_answers_of(model) -> list[torch.Tensor]:
    return [
        greedy(model, PADDED),
        greedy(model, prompt(2, 18, padding=(3, 0)), **BEAMS),
        greedy(model, prompt(1, 20)),
        *turns(model, DynamicCache(config=model.config)),
    ]


def answers_of(model, cache) -> list[torch.Tensor]:
    """Left padding, beams, assisted decoding, turns, one after the other in a cache."""
    answers = [greedy(model, PADDED, cache)]
    cache.reset()
    answers.append(greedy(model, prompt(2, 18, padding=(3, 0)), cache, **BEAMS))
    cache.reset()
    answers.append(greedy(model, prompt(1, 20), cache, assistant_model=assistant()))
    cache.reset()
    return answers + turns(model, cache)


@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        (name, ratio)
        for name in NAMES
        for number, ratio in ((0, 1), (None, 2), (1, 3), (2, 8))
        if (number is None or short(name, number)) and name not in ROUNDED
    ],
)
@pytest.mark.pairs(once=["name", "ratio"])
def test_what_the_budget_covers_is_the_full_caches(name, ratio, tmp_path):
    model = model_of(ratio)
    with KVSwapCache(model, tmp_path, small(name, model, 200)) as cache:
        for ours, theirs in zip(answers_of(model, cache), plain_answers(ratio), strict=True):
            assert torch.equal(ours, theirs)


# These round some tokens, which is not done where keys are the values too.
ROUND = {"kvswap-fp8", "arkv-recall", "arkv", "arkv-quant"}


@pytest.mark.parametrize("name", [name for name in NAMES if short(name, 1) or name in ROUND])
def test_latents_are_the_full_caches_or_refused(name, tmp_path):
    model = latent_model()
    config = small(name, model, 200)
    if name in ROUND:
        with pytest.raises(ValueError, match=r"sides=1.* which round some"):
            KVSwapCache(model, tmp_path, config)
        return
    with KVSwapCache(model, tmp_path, config) as cache:
        for ours, theirs in zip(answers_of(model, cache), plain_latent_answers(), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("ratio", [1, 2, 3, 8] if ALL else [2])
@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_records_are_the_rounded_full_caches(name, ratio, tmp_path):
    model = model_of(ratio)
    config = small(name, model, 200, sink_tokens=0)
    with KVSwapCache(model, tmp_path, config) as cache:
        ours = greedy(model, PADDED, cache, tokens=30)
        assert torch.equal(ours, greedy(model, PADDED, RoundedCache(model, config), tokens=30))
        assert not torch.equal(ours, greedy(model, PADDED, tokens=30)), "rounding must be seen"
        cache.reset()
        for ours, theirs in zip(
            turns(model, cache), turns(model, RoundedCache(model, config)), strict=True
        ):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        (name, ratio)
        for name in NAMES
        for number, ratio in ((1, 1), (None, 2), (2, 3), (0, 8))
        if number is None or short(name, number)
    ],
)
@pytest.mark.pairs(once=["name", "ratio"])
def test_what_a_small_budget_holds_decodes_in_every_way(name, ratio, tmp_path):
    """With 4 groups of 15: padding, a crop and another order of sequences run."""
    model = model_of(ratio)
    config = small(name, model, 4)
    tokens = 15 * config.group_tokens
    inputs = prompt(3, tokens, padding=(0, 7, 3))
    with KVSwapCache(model, tmp_path, config) as cache:
        greedy(model, inputs, cache, tokens=6)
        stats = cache.stats()
        drops_unread = cache.driver.config.keeper == "newest"
        assert (stats.bytes_read > 0 or drops_unread) and stats.decoded == 15
        cache.crop(-9)
        cache.reorder_cache(torch.tensor([0, 2, 1]))
        mask = inputs["attention_mask"][[0, 2, 1]][:, : tokens - 3]
        with torch.no_grad():
            ids = prompt(3, 1)["input_ids"]
            logits = model(ids, attention_mask=mask, past_key_values=cache).logits
        assert logits.isfinite().all() and cache.get_seq_length() == tokens - 3
        cache.reset()
        out = greedy(model, prompt(1, tokens), cache, tokens=6, assistant_model=assistant())
        assert out.shape == (1, tokens + 6)


@pytest.mark.parametrize("name", [name for name in NAMES if short(name, 2)])
def test_bf16_and_hybrids(name, tmp_path):
    half = half_model()
    inputs = prompt(2, 24, padding=(0, 9))
    logits = []
    config = small(name, half, 200)
    rounded = RoundedCache(half, config) if name in ROUNDED else None
    with torch.no_grad(), KVSwapCache(half, tmp_path, config) as cache:
        for each in (cache, rounded or DynamicCache(config=half.config)):
            half(**inputs, past_key_values=each)
            mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
            ids = inputs["input_ids"][:, :1]
            logits.append(half(ids, attention_mask=mask, past_key_values=each).logits)
    # A sink is not rounded.
    torch.testing.assert_close(logits[0], logits[1], rtol=0.02, atol=0.3 if rounded else 0.05)

    hybrid = hybrid_model()
    with KVSwapCache(hybrid, tmp_path, small(name, hybrid, 200)) as cache:
        inputs = prompt(2, 21, padding=(0, 7))
        ours = greedy(hybrid, inputs, cache)
        if not rounded:
            assert torch.equal(ours, greedy(hybrid, inputs))
        else:  # whose first token comes of the prompt in the model's own precision
            assert torch.equal(ours[:, :22], greedy(hybrid, inputs)[:, :22])
