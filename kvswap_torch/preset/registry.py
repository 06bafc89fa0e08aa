"""Presets: published systems as settings of this one engine.

A preset is one entry of `PRESETS`. It becomes a plain `SwapConfig`, which a file keeps: a preset
that changes later never alters a file. One of parts that are there is one more entry.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

from kvswap_torch.errors import ConfigError
from kvswap_torch.preset.definition import TOKENS, Preset, Shape, Value
from kvswap_torch.preset.evicting import KEEPING

__all__ = ["MISSING", "NO_PRESETS", "PRESETS", "Preset", "Shape", "find", "presets"]


def _groups(tokens: int) -> Callable[[Shape], int]:
    """Groups of one KV head that hold so many tokens."""
    return lambda shape: -(-tokens // shape.group_of_head)


_BOX = {
    "summary.kind": "min_max",
    "selection.heads": "per_head",
    "selection.score": "logit_max",
    "memory.replacement": "lru",
    "selection.dense_layers": lambda shape: tuple(range(min(2, shape.layers))),
}
_STAR = {
    "summary.projection": "skewed",
    "selection.score": "logit_sum",
    "selection.group_tokens": 1,
    "prefetch.mode": "trust",
    "selection.sink_tokens": 0,
    "summary.rank": lambda shape: max(1, round(0.3 * shape.width)),
    "selection.top_k_groups": 400,
}
_RESTORED = "the two exact layers are restored from disk where they outgrow their pages"
_NEWEST = "the newest 32 tokens stay in memory, since a token is chosen once its group is sealed"
_ALIGNED = "groups of one token only where the disk reads so little at once, else of the fewest"
_JOINED = "each KV head chooses by its query heads' sum; each query head for itself in the paper"
_FIXED = "a fixed number of tokens for every layer and head, where the paper varies it"


def _ranks(*ranks: int) -> tuple[Mapping[str, Value], ...]:
    """Columns of all KV heads together."""
    return tuple({"summary.rank": rank} for rank in ranks)


def _columns(*parts: int) -> tuple[Mapping[str, Value], ...]:
    """Columns of a KV head: of each, one part in so many."""
    return tuple(
        {"summary.rank": lambda shape, part=part: max(1, round(shape.head_dim / part))}
        for part in parts
    )


def _pages(*times: int) -> tuple[Mapping[str, Value], ...]:
    """Pages so many times as large as its own 16 tokens."""
    return tuple({"selection.group_tokens": 16 * each} for each in times)


def _chunks(*steps: tuple[int, int]) -> tuple[Mapping[str, Value], ...]:
    """(tokens of a chunk in its own ones, chunks that stay)."""

    def step(times: int, outliers: int) -> Mapping[str, Value]:
        def chunk(shape: Shape) -> int:
            return min(64, times * max(8, shape.group_of_head))

        return {
            "selection.group_tokens": chunk,
            "retention.tokens": lambda shape: outliers * chunk(shape),
        }

    return tuple(step(*each) for each in steps)


PRESETS = (
    Preset(
        "kvswap",
        "KVSwap",
        "What you get without a config: nothing is calibrated, and a budget is divided for you.",
        "Where a model is served for long: `kvswap tune` finds faster settings for it.",
        {"selection.score": "mass_sum", "summary.rank": lambda shape: min(32, shape.width)},
        "better with `kvswap tune`: half the columns",
        (
            "groups are scored by the attention that heads pay them, not by summed products",
            "the best bilinear form of queries and keys, not the SVD of the keys",
            "each layer chooses with its own query; a predicted one only prefetches",
        ),
        divides=True,
    ),
    Preset(
        "kvswap-fp8",
        "KVSwap",
        "As kvswap with half the bytes on disk, in pages and read: records in e4m3.",
        "Where answers must be the full cache's own: what leaves the tail is rounded.",
        {
            "selection.score": "mass_sum",
            "summary.rank": lambda shape: min(32, shape.width),
            "storage.kv_dtype": "fp8_e4m3",
            "selection.group_tokens": lambda shape: shape.group_of_bytes,
            "selection.top_k_groups": lambda shape: -(-400 // shape.group_of_bytes),
            "memory.pages_per_layer": lambda shape: max(16, -(-800 // shape.group_of_bytes)),
        },
        "as kvswap",
        ("those of kvswap", "K and V are rounded to three bits behind the leading one"),
        divides=True,
    ),
    Preset(
        "kvswap-int4",
        "KVSwap, KIVI",
        "As kvswap with the fewest bytes on disk and read: records of four bits.",
        "Where answers must be the full cache's own; in small budgets: pages are not smaller.",
        {
            "selection.score": "mass_sum",
            "summary.rank": lambda shape: min(32, shape.width),
            "storage.kv_dtype": "int4",
            "selection.group_tokens": lambda shape: shape.group_of_half_bytes,
            "selection.top_k_groups": lambda shape: -(-400 // shape.group_of_half_bytes),
            "memory.pages_per_layer": lambda shape: max(16, -(-800 // shape.group_of_half_bytes)),
        },
        "as kvswap",
        (
            "those of kvswap",
            "K and V are rounded to four bits: each row rotated, K as the mean of its group and "
            "the difference to it; KIVI has a scale for each channel of 32 tokens",
            "heads must be a multiple of 16 numbers wide",
        ),
        divides=True,
    ),
    Preset(
        "kvswap-paper",
        "KVSwap",
        "To compare with the published form.",
        "For answers that must be found: layers that cannot be predicted are predicted too.",
        {
            "summary.projection": "svd_keys",
            "selection.score": "logit_sum",
            "prefetch.mode": "trust",
            "selection.sink_tokens": 0,
            "summary.rank": lambda shape: min(32, shape.width),
        },
        "the paper calibrates the SVD of the keys beforehand; else it is made of the prompt",
        ("without a calibration the rank is doubled", "positions and padding are kept exact"),
        smaller=_ranks(24, 16, 12, 8, 4),
    ),
    Preset(
        "exact",
        "FlexGen",
        "Ground truth: every layer attends everything, restored from disk in every step.",
        "Where tokens per second matter: each one reads the whole cache.",
        {
            "summary.kind": "none",
            "selection.group_tokens": 16,
            "selection.top_k_groups": 96,
            "memory.pages_per_layer": 96,
        },
        "",
        ("the cache alone is on disk; weights and activations stay where the model has them",),
    ),
    Preset(
        "quest",
        "Quest",
        "Tables and code, where low rank is weak: a bound instead of a guess, no calibration.",
        "In small budgets: its boxes take one part in 16 of the KV cache.",
        {
            **_BOX,
            "selection.group_tokens": 16,
            "selection.top_k_groups": TOKENS // 16,
            "memory.pages_per_layer": TOKENS // 8,
        }
        | {"selection.sink_tokens": 0, "selection.recent_tokens": 16},
        "",
        (
            "KV heads choose, each by the largest bound of its query heads; query heads in the "
            "paper",
            "the newest page is always attended",
            _RESTORED,
        ),
        smaller=_pages(2, 4),
    ),
    Preset(
        "arkvale",
        "ArkVale",
        "As quest with half its memory: larger pages, and the first and newest ones stay.",
        "In small budgets: its boxes take one part in 32 of the KV cache.",
        {
            **_BOX,
            "selection.group_tokens": 32,
            "selection.top_k_groups": TOKENS // 32,
            "memory.pages_per_layer": TOKENS // 16,
        }
        | {"selection.sink_tokens": 64, "selection.recent_tokens": 64},
        "",
        (
            "pages leave by when they were last used, not by their score "
            "(replacement=least_attended)",
            "the cuboid is the digest; the paper has balls too",
            _RESTORED,
        ),
        smaller=_pages(4),
    ),
    Preset(
        "shadowkv",
        "ShadowKV",
        "Where neighbours' keys are alike: their mean stands for them, those it does not fit stay.",
        "In small budgets: its landmarks take one part in 16 of the KV cache.",
        {
            "summary.kind": "mean",
            "selection.heads": "per_head",
            "selection.score": "logit_max",
            "memory.replacement": "lru",
            "selection.group_tokens": lambda shape: max(8, shape.group_of_head),
            "selection.top_k_groups": lambda shape: 2 * TOKENS // max(8, shape.group_of_head),
            "memory.pages_per_layer": lambda shape: 4 * TOKENS // max(8, shape.group_of_head),
            "selection.sink_tokens": 0,
            "selection.recent_tokens": 32,
            "retention.policy": "key_outliers",
            "retention.tokens": lambda shape: 48 * max(8, shape.group_of_head),
        },
        "",
        (
            "K is read together with V; the paper keeps a low-rank form of the prompt's keys in "
            "memory, rebuilds K from it and reads V alone",
            "KV heads choose, each by the largest product of its query heads with a mean; the "
            "paper by their largest softmax weight",
            "what is decoded, and the prompt's last 32 tokens, are chosen from like the rest once "
            "they have left the tail, and have means; the paper keeps all of it",
            "groups of eight tokens, or more where the disk reads more at once",
        ),
        smaller=_chunks((1, 24), (1, 8), (2, 12), (2, 4), (4, 2)),
    ),
    Preset(
        "infinigen",
        "InfiniGen",
        "To reproduce a table.",
        "On any disk: single tokens of single heads are small reads, and nothing is reused.",
        {
            "summary.projection": "skewed",
            "selection.score": "logit_sum",
            "selection.heads": "per_head",
            "prefetch.mode": "trust",
            "selection.sink_tokens": 0,
            "selection.group_tokens": lambda shape: shape.group_of_head,
            "summary.rank": lambda shape: max(1, round(0.3 * shape.head_dim)),
            "selection.top_k_groups": _groups(400),
            "memory.pages_per_layer": _groups(400),
            "memory.replacement": "no_reuse",
        },
        "the paper finds the skew beforehand, as `kvswap calibrate` does; else it is the prompt's",
        (_FIXED, _JOINED, _ALIGNED, _NEWEST),
        smaller=_columns(8, 11, 16, 32),
    ),
    Preset(
        "infinigen-star",
        "KVSwap, 4.2",
        "To reproduce a table: InfiniGen with one choice for all heads.",
        "On any disk: single tokens are small reads, and nothing is reused.",
        {**_STAR, "memory.pages_per_layer": 400, "memory.replacement": "no_reuse"},
        "as infinigen",
        (_FIXED, _NEWEST),
        smaller=_ranks(48, 32, 24, 16, 12, 8, 4),
    ),
    Preset(
        "infinigen-star-ru",
        "KVSwap, 4.2",
        "To reproduce a table: infinigen-star with a reuse buffer.",
        "On any disk: single tokens are small reads.",
        {**_STAR, "memory.pages_per_layer": 800, "memory.replacement": "fifo"},
        "as infinigen",
        (_FIXED, _NEWEST),
        smaller=_ranks(48, 32, 24, 16, 12, 8, 4),
    ),
    Preset(
        "loki",
        "Loki",
        "To reproduce a table.",
        "In small budgets: a quarter of every key stays in memory, an eighth of the KV cache.",
        {
            "summary.projection": "pca_per_head",
            "selection.score": "logit_sum",
            "selection.heads": "per_head",
            "selection.sink_tokens": 0,
            "selection.group_tokens": lambda shape: shape.group_of_head,
            "summary.rank": lambda shape: max(1, shape.head_dim // 4),
            "selection.top_k_groups": _groups(TOKENS),
            "memory.pages_per_layer": _groups(2 * TOKENS),
            "memory.replacement": "lru",
        },
        "the paper finds the components beforehand, as `kvswap calibrate` does; else they are the "
        "prompt's",
        ("a fixed number of tokens, where the paper takes a share of the context", _JOINED)
        + (_ALIGNED, _NEWEST),
        smaller=_columns(8, 11, 16, 32),
    ),
    Preset(
        "think",
        "ThinK",
        "To compare with: the channels that ThinK would keep choose the tokens.",
        "In small budgets: 0.6 of every key stays in memory, 0.3 of the KV cache.",
        {
            "summary.projection": "channels",
            "selection.score": "logit_sum",
            "selection.heads": "per_head",
            "selection.sink_tokens": 0,
            "selection.group_tokens": lambda shape: shape.group_of_head,
            "summary.rank": lambda shape: max(1, round(0.6 * shape.head_dim)),
            "selection.top_k_groups": _groups(TOKENS),
            "memory.pages_per_layer": _groups(2 * TOKENS),
            "memory.replacement": "lru",
        },
        "",
        (
            "channels that are left out are missing where tokens are chosen, not where they are "
            "attended; the paper drops them from the keys for good",
            _ALIGNED,
            _NEWEST,
        ),
        smaller=_columns(3, 4, 8, 11, 16, 32),
    ),
    Preset(
        "dynakv",
        "DynaKV",
        "Where the disk is asked for few, large reads: clusters of similar keys are read whole.",
        "Where single tokens must be found in little memory: groups of neighbours find more.",
        {
            "clusters": {},
            "summary.kind": "centroid",
            "selection.group_tokens": lambda shape: max(8, shape.group_of_bytes),
            "selection.top_k_groups": lambda shape: -(-TOKENS // max(8, shape.group_of_bytes)),
            "memory.pages_per_layer": lambda shape: -(-2 * TOKENS // max(8, shape.group_of_bytes)),
            "memory.replacement": "lru",
        },
        "",
        (
            "KV heads choose together, clusters of 16 tokens; in the paper each head chooses by "
            "itself (heads=per_head), and they have 25",
            "a fixed number of tokens, where the paper takes a share of the context",
            "tokens stand on disk twice: in the order of the text, for what reads all of them, and "
            "in clusters, whose pages are written anew as they change",
            "centroids stay in memory, and pages of every layer; the paper has one layer's at a "
            "time (resident_layers)",
            "clusters stand where there is room; the paper's pools of two that grow towards each "
            "other are layout=paired_pools, without its choice of which two",
            "the least recently used page leaves; the paper's order is replacement=largest_cluster",
            "records are of the model's dtype; the paper's e4m3 is kv_dtype=fp8_e4m3",
        ),
        smaller=tuple(
            {"clusters.target_tokens": tokens, "clusters.max_tokens": 2 * tokens}
            for tokens in (32, 64, 128, 256)
        ),
    ),
    *KEEPING,
)

_MERGED = "tokens that are merged, not dropped: new keys and values, where records never change"
_EXAMPLE = "its own rule of who is kept (a plug-in that has it is {} of examples/plug_ins.py)"
_QUANTISED = "a summary of product-quantised keys (near is summary.dtype=int4)"
_LOCAL = "a preset of its own (dynakv with clusters.update=local updates its clusters as it does)"
#: Systems that are known and cannot be had yet: what is missing.
MISSING = {
    "lazyeviction": _EXAMPLE.format("LazyEviction"),
    "defensivekv": _EXAMPLE.format("DefensiveKV"),
    "layer-defensivekv": "one budget over layers and heads by a plug-in's scores (DefensiveKV of "
    "examples/plug_ins.py has its rule within a layer)",
    "dapq": _EXAMPLE.format("AskedFromAhead"),
    "d2o": _MERGED,
    "kvmerger": _MERGED,
    "mikv": "a second, lower precision for what arkv evicts (arkv-quant keeps tokens in e4m3)",
    "clusterkv": _LOCAL,
    "pqcache": _QUANTISED,
    "magicpig": "sampling of tokens by hashes (group scores of a user's own choose the best alone)",
    "retroinfer": "an estimate of what is not fetched, from mean keys and values",
    "fasa": "its own rule of which pairs of rotary channels are dominant (by another rule they are "
    "summary.projection=rope_pairs)",
    "epicache": "a cache for each episode of a conversation, chosen by the question",
}
#: Systems that are no preset, and why.
NO_PRESETS = {
    **dict.fromkeys(
        ("trim-kv", "locret", "lookaheadkv", "attention-gate"),
        "it scores tokens by trained weights, which do not come with this package; "
        "LearnedRetention of examples/plug_ins.py takes a user's own",
    ),
    "kvzap": "it scores hidden states, which a plug-in is not given, by weights that are published "
    "for models of 8B and 32B; none was at hand to try it",
    "beyond-accuracy": "it is a measure of what a run costs",
    "make-each-token-count": "it scores tokens by trained weights under one budget for all layers, "
    "and layers have budgets of their own here",
    "agent-memory": 'records of four bits are a setting of any: storage.kv_dtype="int4"',
    "ngc": "it trains the model to evict while it reasons",
    "stochastic-kv-routing": "layers share keys and values, and models must be trained so",
    "mpcache": "it selects under multi-party computation",
    "kv-direct": "it computes keys and values again for each token that has left memory",
    **dict.fromkeys(
        ("kvflow", "continuum"),
        "it schedules sessions; the server keeps saved caches by when they were last used",
    ),
}


def presets() -> tuple[Preset, ...]:
    """Every preset that can be had, the default first."""
    return PRESETS


def find(name: str) -> Preset:
    """The preset of that name.

    Raises
    ------
    ConfigError
        Naming the part that a known system still lacks, or the nearest names.
    """
    for preset in PRESETS:
        if preset.name == name:
            return preset
    if name in MISSING:
        raise ConfigError(
            f"preset: {name} needs {MISSING[name]}, which this version does not have; "
            "`kvswap presets` lists those it has"
        )
    if name in NO_PRESETS:
        raise ConfigError(
            f"preset: {name} is no preset, since {NO_PRESETS[name]}; `kvswap presets` lists those "
            "there are"
        )
    names = [preset.name for preset in PRESETS]
    near = difflib.get_close_matches(str(name), [*names, *MISSING, *NO_PRESETS], 3, 0.5)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    raise ConfigError(f"preset: must be one of {', '.join(names)}, got {name!r}{hint}")
