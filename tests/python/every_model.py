"""A tiny config for every causal language model that the installed transformers has.

``python -m tests.python.every_model`` writes docs/models.md: run it with the newest transformers.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from packaging.version import Version

from kvswap_torch import KVSwapCache, UnsupportedModelError
from tests.python.tiny_models import COVERING, greedy, prompt

FULL, SLIDING, LINEAR, HYBRID = "full_attention", "sliding_attention", "linear_attention", "hybrid"

# By the names that families have for them; a config takes those it knows.
TINY: dict[str, Any] = (
    dict.fromkeys(
        [
            "hidden_size",
            "intermediate_size",
            "ffn_hidden_size",
            "n_embd",
            "d_model",
            "ffn_dim",
            "decoder_ffn_dim",
            "encoder_ffn_dim",
        ],
        64,
    )
    | dict.fromkeys(
        [
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "moe_ffn_hidden_size",
            "expert_ffn_hidden_size",
        ],
        32,
    )
    | dict.fromkeys(
        [
            "num_hidden_layers",
            "n_layer",
            "n_layers",
            "num_layers",
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "decoder_attention_heads",
            "encoder_attention_heads",
            "num_experts",
            "num_local_experts",
            "n_routed_experts",
            "linear_num_value_heads",
            "conv_kernel",
            "time_step_rank",
        ],
        4,
    )
    | dict.fromkeys(
        [
            "num_key_value_heads",
            "num_experts_per_tok",
            "linear_num_key_heads",
            "mamba_expand",
            "decoder_layers",
            "encoder_layers",
        ],
        2,
    )
    | dict.fromkeys(["n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"], 1)
    | dict.fromkeys(
        [
            "head_dim",
            "v_head_dim",
            "qk_head_dim",
            "q_lora_rank",
            "kv_lora_rank",
            "mamba_d_head",
            "mamba_head_dim",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "kv_channels",
        ],
        16,
    )
    | dict.fromkeys(
        [
            "qk_rope_head_dim",
            "qk_nope_head_dim",
            "mamba_d_state",
            "mamba_n_heads",
            "mamba_num_heads",
            "state_size",
            "chunk_size",
            "mamba_chunk_size",
            "rotary_dim",
        ],
        8,
    )
    | dict.fromkeys(["max_position_embeddings", "n_positions"], 128)
    | {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
    | {"mamba_n_groups": 1, "tie_word_embeddings": False, "is_decoder": True}
)
# Latent attention (MLA) has as many as query heads; what it caches of two tokens fills a block.
_LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 56}
# So few tokens that tests choose some of many.
_INDEX = _LATENT | {"index_topk": 8, "index_n_heads": 2, "index_head_dim": 16}
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
_TINY_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
                "num_attention_heads": 2, "image_size": 16, "patch_size": 8}  # fmt: skip
# What a family wants beside or instead of that.
OWN: dict[str, dict[str, Any]] = dict.fromkeys(
    ("AXK1", "DeepseekV2", "DeepseekV3", "Glm4MoeLite", "MiniCPM3", "Mistral4", "Youtu"),
    _LATENT,
) | dict.fromkeys(
    ("AXK2", "DeepseekV32", "HYV4"), _INDEX
) | {
    "BailingHybrid": _LATENT | {"layer_group_size": 2},
    "KimiLinear": _LATENT | {"layer_types": [LINEAR, FULL, LINEAR, FULL]},
    "Bamba": {"attn_layer_indices": [1, 3]},
    "CodeGen": {"rotary_dim": 8},
    "CohereCompass": {"rope_parameters": {FULL: _ROTARY, SLIDING: _ROTARY}},
    "Dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
             "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 64}},
    "FalconH1": {"mamba_d_ssm": 128},
    "Gemma3n": {"layer_types": [SLIDING, FULL] * 2, "num_kv_shared_layers": 0,
                "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97,
                "activation_sparsity_pattern": [0.0] * 4},
    "Gemma4": {"layer_types": [SLIDING, FULL] * 2, "num_kv_shared_layers": 0,
               "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 97,
               "global_head_dim": 32},
    "Gemma4Unified": {"layer_types": [SLIDING, FULL] * 2, "global_head_dim": 32},
    "Git": {"vision_config": _TINY_VISION},
    "GlmMoeDsa": _INDEX | {"indexer_types": ["full", "shared"] * 2},
    "GPTNeo": {"attention_types": [[["global", "local"], 2]]},
    "GraniteMoeHybrid": {"layer_types": [LINEAR, FULL] * 2},
    "Inkling": {"layer_types": ["hybrid_sliding", HYBRID] * 2},
    "Inkling2": {"layer_types": ["hybrid_sliding", HYBRID] * 2},
    "Jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2Moe": {"layer_types": ["conv", FULL] * 2, "num_dense_layers": 1},
    "LongcatFlash": _LATENT | {"head_dim": 8, "num_layers": 2, "zero_expert_num": 1,
                               "moe_topk": 2},
    "MiMoV2Flash": {"head_dim": 24, "v_head_dim": 16},
    "Mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2, "n_groups": 1},
    "Qwen4Exp": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
                 "indexer_budget": 8, "indexer_compress_ratio": 4},
    "RoCBert": {"pronunciation_vocab_size": 97, "shape_vocab_size": 97,
                "pronunciation_embed_dim": 16, "shape_embed_dim": 16},
    "Xmod": {"default_language": "en_XX"},
    "Zamba": {"layers_block_type": [LINEAR, HYBRID] * 2, "attention_hidden_size": 128},
    "Zamba2": {"layers_block_type": [LINEAR, HYBRID] * 2},
    "Zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
# No tiny config or no text alone: what they are instead.
LEFT_OUT = {
    "AutoModel": "no model of its own",
    "Blt": "bytes and patches, a config of five parts; opening it is refused",
    "CsmDepthDecoder": "codes of speech below another model's hidden state",
    "Dots3Note": "image and sound towers of 78 million parameters",
    "Fuyu": "Persimmon below an image projection",
    "Gemma4Assistant": "a drafter on another model's keys",
    "Gemma4UnifiedAssistant": "a drafter on another model's keys",
    "Phi4Multimodal": "image and sound towers of 870 million parameters; its text part is Phi-3",
}
# Families that are refused with an older transformers, and the first with which they are not.
SINCE = dict.fromkeys(("CodeGen", "GPTJ"), "5.24")

PAGE = """# Models

Every `*ForCausalLM` of transformers {version}, tried with random weights. *equal*: `generate()` on
a batch with padding gives `DynamicCache`'s tokens in fp32 while all groups fit the budget.
*refused*: `KVSwapCache` raises `UnsupportedModelError` when it is opened, with this reason. Of
{tried} families {equal} are equal and {refused} refused. A
vision-language model is as its text model. Models with multi-head latent attention (MLA) keep the
latent and the rotated key of a token, as `DynamicCache` does, in records without values; groups are
chosen, and attended while decoding, by queries that have taken the expansion of keys in. They run
on the CPU, with records in the model's dtype; where heads are split over processes, each keeps all
latents and chooses by its own heads. Where an index of the model itself says which tokens each
query attends (DeepSeek V3.2 and its kin), a step reads just those, and the tokens are equal under
any budget that holds them. Where values are narrower than keys (MiMoV2Flash: 128 and 192 numbers a
head), so are those of a record: of its full-attention layers 640 bytes a token and KV head in bf16,
as the model caches, where 768 were with zeros behind. Of 8,192 tokens in groups of 8 a sixth less
is written (41.9 MB in two layers, 50.2 before), read (45.1 MB in 20 steps, 54.1) and held in pages
(4.3 MB, 5.2). Groups of 4, 10,240 bytes, gain nothing where a disk is read in blocks of 4,096. On
a GPU, whose kernels take one width, values still have zeros behind.
`python -m tests.python.every_model > docs/models.md` writes this page, and
`tests/python/test_hf_every_model.py` holds it true.

| family | |
|---|---|
{rows}

## Other libraries

Every mode of `generate()` gives `DynamicCache`'s tokens (`tests/python/test_generate_modes.py`),
and so do accelerate's offloaded layers, `torch.compile(model)` and torch's dynamic quantisation.
Tests are skipped where their library is missing, and passed with torchao 0.18.0 (int8 weights),
bitsandbytes 0.50.2 (4-bit and 8-bit weights), each with look-ahead on and off, and with kvpress
0.5.5 (its own question-answering pipeline, three questions over one document).
"""


@dataclass(frozen=True)
class Outcome:
    """`is_equal`: DynamicCache's tokens; otherwise `refusal` says why there is no cache."""

    is_equal: bool
    refusal: str = ""
    disk_layers: int = 0
    layers: int = 0


def families() -> Iterator[str]:
    """Names before "ForCausalLM" that are tried, in order."""
    end = "ForCausalLM"
    for name in dir(transformers):
        if name.endswith(end) and name.removesuffix(end) not in LEFT_OUT:
            yield name.removesuffix(end)


def build(family: str, **changes: Any) -> Any:
    """A random model of four layers or fewer, in eval mode; `changes` go to its config."""
    model_class = getattr(transformers, f"{family}ForCausalLM")
    config_class = model_class.config_class
    known = set(inspect.signature(config_class.__init__).parameters)
    settings = {name: value for name, value in TINY.items() if name in known}
    settings |= OWN.get(family, {}) | changes
    config = config_class(**settings)
    if {FULL, SLIDING} <= set(getattr(config, "layer_types", None) or ()):
        config = config_class(**settings, sliding_window=8)
    if getattr(config, "attn_logit_softcapping", None):
        config._attn_implementation = "eager"  # torch's own attention would leave the cap out
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 1.0 / parameter.shape[1] ** 0.5)
    return model


def outcome(family: str, folder: str) -> Outcome:
    """Opens a cache for a model and generates with it, or says why it was refused.

    Anything but equal tokens or a refusal at open raises.
    """
    model = build(family)
    inputs = prompt(2, 21, padding=(0, 5))
    try:
        cache = KVSwapCache(model, folder, COVERING)
    except UnsupportedModelError as error:
        return Outcome(False, str(error).split("ForCausalLM ", 1)[-1])
    with cache:
        actual = greedy(model, inputs, cache, tokens=8)
        assert torch.equal(actual, greedy(model, inputs, tokens=8)), f"{family}: other tokens"
        return Outcome(True, "", len(cache.parts.disk), len(cache.layers))


def row(family: str, found: Outcome) -> str:
    """A family's line in docs/models.md, which is the same for every transformers that has it."""
    if family in SINCE:
        is_new = Version(transformers.__version__) >= Version(SINCE[family])
        assert found.is_equal == is_new, f"{family}: {found}"
        return f"| {family} | equal; refused before transformers {SINCE[family]} |"
    if not found.is_equal:
        return f"| {family} | refused: {found.refusal} |"
    part = "" if found.disk_layers == found.layers else ", its full-attention layers on disk"
    return f"| {family} | equal{part} |"


def page() -> str:
    """docs/models.md."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [row(family, outcome(family, folder)) for family in families()]
    counts = {"tried": len(rows), "refused": sum("| refused: " in each for each in rows)}
    counts["equal"] = counts["tried"] - counts["refused"]
    rows += [f"| {family} | not tried: {why} |" for family, why in sorted(LEFT_OUT.items())]
    return PAGE.format(version=transformers.__version__, **counts, rows="\n".join(rows))


if __name__ == "__main__":
    print(page(), end="")
