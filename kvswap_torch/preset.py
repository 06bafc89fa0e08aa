"""Presets: published systems as settings of this one engine.

A preset is one entry of `PRESETS`. It becomes a plain `SwapConfig`, which a file keeps: a preset
that changes later never alters a file. One of parts that are there is one more entry.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

from kvswap_torch.errors import ConfigError
from kvswap_torch.preset_parts import Preset, Shape

__all__ = ["MISSING", "PRESETS", "find", "presets"]

TOKENS = 1024  # attended by methods whose papers give a budget of tokens


def _groups(tokens: int) -> Callable[[Shape], int]:
    """Groups of one KV head that hold so many tokens."""
    return lambda shape: -(-tokens // shape.group_of_head)


_BOX = {
    "rows": "box",
    "heads": "each",
    "score": "max",
    "replacement": "lru",
    "exact_layers": lambda shape: tuple(range(min(2, shape.layers))),
}
_STAR = {
    "projection_kind": "skewed",
    "group_tokens": 1,
    "look_ahead": True,
    "sink_tokens": 0,
    "rank": lambda shape: max(1, round(0.3 * shape.width)),
    "groups_max": 400,
}
# What is not kept is on disk only; one group is enough to see that not everything fits.
_DROPS = {"rows": "none", "sink_tokens": 0, "groups_max": 1, "pages_max": 8}
# B tokens in all, of which the newest W = 32 always stay.
_ARKV = {
    "tail_tokens": 32,
    "keeper": "arkv",
    "keep_tokens": TOKENS - 32,
    "keep_variance": 263.8108280337562,
}
_OF_ARKV = (
    "one choice for all KV heads of a layer, as in the text; the published code has one for each",
    "while decoding a token's neighbours are those columns beside it that are kept",
)
_MIXED_ARKV = (
    "room is counted in bytes, as in (2): an e4m3 token takes a half; the code counts tokens, as "
    "keep_count=tokens does",
    "e4m3 tokens are attended; the published code drops them by mistake",
    "one power of two for each KV head of a page, and one for its V, where the paper has a scale "
    "for each token",
)
_RECALLED = "the paper drops tokens; here those of low rank that a query asks for are read again"
_ON_DISK = "what it drops stays on disk: a crop, or a longer prompt, finds it again"
_RESTORED = "the two exact layers are restored from disk where they outgrow their pages"
_NEWEST = "the newest 32 tokens stay in memory, since a token is chosen once its group is sealed"
_ALIGNED = "groups of one token only where the disk reads so little at once, else of the fewest"
_FIXED = "a fixed number of tokens for every layer and head, where the paper varies it"

PRESETS = (
    Preset(
        "kvswap",
        "KVSwap",
        "What you get without a config: nothing is calibrated, and a budget is divided for you.",
        "Where a disk hides no reads: `kvswap tune` finds settings that read ahead.",
        {"score": "mass", "rank": lambda shape: min(32, shape.width)},
        "better with `kvswap tune`: half the columns, and reads that are hidden",
        (
            "groups are scored by the attention that heads pay them, not by summed products",
            "the best bilinear form of queries and keys, not the SVD of the keys",
            "each layer chooses with its own query until a calibration says which are predictable",
        ),
        divides=True,
    ),
    Preset(
        "kvswap-fp8",
        "KVSwap",
        "As kvswap with half the bytes on disk, in pages and read: records in e4m3.",
        "Where answers must be the full cache's own: what leaves the tail is rounded.",
        {
            "score": "mass",
            "rank": lambda shape: min(32, shape.width),
            "records": "fp8",
            "group_tokens": lambda shape: shape.group_of_bytes,
            "groups_max": lambda shape: -(-400 // shape.group_of_bytes),
            "pages_max": lambda shape: max(16, -(-800 // shape.group_of_bytes)),
        },
        "as kvswap",
        ("those of kvswap", "K and V are rounded to three bits behind the leading one"),
        divides=True,
    ),
    Preset(
        "kvswap-paper",
        "KVSwap",
        "To compare with the published form.",
        "For answers that must be found: layers that cannot be predicted are predicted too.",
        {
            "projection_kind": "svd_keys",
            "look_ahead": True,
            "sink_tokens": 0,
            "rank": lambda shape: min(32, shape.width),
        },
        "the paper calibrates the SVD of the keys beforehand; else it is made of the prompt",
        ("without a calibration the rank is doubled", "positions and padding are kept exact"),
    ),
    Preset(
        "exact",
        "FlexGen",
        "Ground truth: every layer attends everything, restored from disk in every step.",
        "Where tokens per second matter: each one reads the whole cache.",
        {"rows": "none", "group_tokens": 16, "groups_max": 96, "pages_max": 96},
        "",
        ("the cache alone is on disk; weights and activations stay where the model has them",),
    ),
    Preset(
        "quest",
        "Quest",
        "Tables and code, where low rank is weak: a bound instead of a guess, no calibration.",
        "In small budgets: its boxes take one part in 16 of the KV cache.",
        {**_BOX, "group_tokens": 16, "groups_max": TOKENS // 16, "pages_max": TOKENS // 8}
        | {"sink_tokens": 0, "tail_tokens": 16},
        "",
        (
            "KV heads choose, each by the largest bound of its query heads; query heads in the "
            "paper",
            "the newest page is always attended",
            _RESTORED,
        ),
    ),
    Preset(
        "arkvale",
        "ArkVale",
        "As quest with half its memory: larger pages, and the first and newest ones stay.",
        "In small budgets: its boxes take one part in 32 of the KV cache.",
        {**_BOX, "group_tokens": 32, "groups_max": TOKENS // 32, "pages_max": TOKENS // 16}
        | {"sink_tokens": 64, "tail_tokens": 64},
        "",
        (
            "pages leave by when they were last used, not by their score",
            "the cuboid is the digest; the paper has balls too",
            _RESTORED,
        ),
    ),
    Preset(
        "infinigen",
        "InfiniGen",
        "To reproduce a table.",
        "On any disk: single tokens of single heads are small reads, and nothing is reused.",
        {
            "projection_kind": "skewed",
            "heads": "each",
            "look_ahead": True,
            "sink_tokens": 0,
            "group_tokens": lambda shape: shape.group_of_head,
            "rank": lambda shape: max(1, round(0.3 * shape.head_dim)),
            "groups_max": _groups(400),
            "pages_max": _groups(400),
            "replacement": "none",
        },
        "the paper finds the skew beforehand; else it is made of the prompt",
        (_FIXED, _ALIGNED, _NEWEST),
    ),
    Preset(
        "infinigen-star",
        "KVSwap, 4.2",
        "To reproduce a table: InfiniGen with one choice for all heads.",
        "On any disk: single tokens are small reads, and nothing is reused.",
        {**_STAR, "pages_max": 400, "replacement": "none"},
        "as infinigen",
        (_FIXED, _NEWEST),
    ),
    Preset(
        "infinigen-star-ru",
        "KVSwap, 4.2",
        "To reproduce a table: infinigen-star with a reuse buffer.",
        "On any disk: single tokens are small reads.",
        {**_STAR, "pages_max": 800, "replacement": "fifo"},
        "as infinigen",
        (_FIXED, _NEWEST),
    ),
    Preset(
        "loki",
        "Loki",
        "To reproduce a table.",
        "In small budgets: a quarter of every key stays in memory, an eighth of the KV cache.",
        {
            "projection_kind": "pca_per_head",
            "heads": "each",
            "sink_tokens": 0,
            "group_tokens": lambda shape: shape.group_of_head,
            "rank": lambda shape: max(1, shape.head_dim // 4),
            "groups_max": _groups(TOKENS),
            "pages_max": _groups(2 * TOKENS),
            "replacement": "lru",
        },
        "the paper finds the components beforehand; else they are made of the prompt",
        ("a fixed number of tokens, where the paper takes a share of the context", _ALIGNED)
        + (_NEWEST,),
    ),
    Preset(
        "think",
        "ThinK",
        "To compare with: the channels that ThinK would keep choose the tokens.",
        "In small budgets: 0.6 of every key stays in memory, 0.3 of the KV cache.",
        {
            "projection_kind": "channels",
            "heads": "each",
            "sink_tokens": 0,
            "group_tokens": lambda shape: shape.group_of_head,
            "rank": lambda shape: max(1, round(0.6 * shape.head_dim)),
            "groups_max": _groups(TOKENS),
            "pages_max": _groups(2 * TOKENS),
            "replacement": "lru",
        },
        "",
        (
            "channels that are left out are missing where tokens are chosen, not where they are "
            "attended; the paper drops them from the keys for good",
            _ALIGNED,
            _NEWEST,
        ),
    ),
    Preset(
        "prkv",
        "PRKV",
        "Long answers: tokens that matter to all of it stay, the others are chosen step by step.",
        "In small budgets: its boxes take one part in 32 of the KV cache.",
        {
            "rows": "box",
            "heads": "each",
            "replacement": "lru",
            "sink_tokens": 0,
            "tail_tokens": 64,
            "group_tokens": 32,
            "groups_max": (TOKENS - 256) // 32,
            "pages_max": (TOKENS - 256) // 16,
            "keeper": "observed",
            "keep_tokens": 256,
            "keep_window": 64,
            "keep_pool": 1,
            "keep_interval": 128,
        },
        "",
        (
            "records are not rewritten: a page that is chosen has holes where its tokens are kept",
            "while decoding tokens are kept for what those were paid that were attended; the paper "
            "reads all keys again",
            "a fixed share of 0.25 is kept",
        ),
    ),
    Preset(
        "arkv-recall",
        "ARKV, KVSwap",
        "As kvswap where much is decoded: half the tokens stay, the others are read on demand.",
        "Where a budget is small: kvswap divides it better.",
        {**_ARKV, "keep_tokens": TOKENS // 2, "keep_ratio": None, "score": "mass"}
        | {"rank": lambda shape: min(32, shape.width), "groups_max": TOKENS // 8}
        | {"pages_max": TOKENS // 4},
        "as kvswap",
        (_RECALLED, *_OF_ARKV, *_MIXED_ARKV),
    ),
    Preset(
        "snapkv",
        "SnapKV",
        "One question, at the end of the prompt: nothing is read while decoding.",
        "Where questions come later: what the prompt's end did not attend is gone from answers.",
        {**_DROPS, "heads": "each", "group_tokens": lambda shape: shape.group_of_head}
        | {"tail_tokens": 32, "keeper": "observed", "keep_tokens": TOKENS},
        "",
        (_ON_DISK, "of what is decoded the newest 32 tokens stay; the paper keeps all of it"),
    ),
    Preset(
        "arkv-origin",
        "ARKV",
        "As snapkv, where much is decoded: that stays too, until there is no room.",
        "Where questions come later: what the prompt's end did not attend is gone from answers.",
        {**_DROPS, **_ARKV},
        "",
        (_ON_DISK, *_OF_ARKV),
    ),
    Preset(
        "arkv",
        "ARKV",
        "As arkv-origin with more tokens in the same memory: most become e4m3 in layers whose "
        "attention is even.",
        "Where questions come later: what the prompt's end did not attend is gone from answers.",
        {**_DROPS, **_ARKV, "keep_ratio": None},
        "",
        (_ON_DISK, *_OF_ARKV, *_MIXED_ARKV),
    ),
    Preset(
        "arkv-quant",
        "ARKV",
        "To compare with: every kept token becomes e4m3 as soon as there is no room.",
        "Where answers must be the full cache's own: what is kept is rounded.",
        {**_DROPS, **_ARKV, "keep_ratio": 0.0},
        "",
        (_ON_DISK, *_OF_ARKV, *_MIXED_ARKV),
    ),
    Preset(
        "h2o",
        "H2O",
        "To compare with: half the budget for tokens that were attended most, half for the newest.",
        "For answers that must be found, and for speed: every step's attention is summed up.",
        {**_DROPS, "heads": "each", "group_tokens": lambda shape: shape.group_of_head}
        | {"tail_tokens": TOKENS // 2, "keeper": "heavy", "keep_tokens": TOKENS // 2}
        | {"keep_interval": 1},
        "",
        (_ON_DISK, "of a prompt the last 32 queries count; all of them in the paper")
        + ("a fixed number of tokens, where the paper takes a share of the prompt",),
    ),
    Preset(
        "tova",
        "TOVA",
        "To compare with: the tokens stay that the last query paid most.",
        "For answers that must be found, and for speed: tokens are chosen anew in every step.",
        {**_DROPS, "tail_tokens": 1, "keeper": "observed", "keep_tokens": TOKENS}
        | {"keep_window": 1, "keep_pool": 1, "keep_interval": 1},
        "",
        (_ON_DISK, "a group of tokens that was just decoded is chosen once it is sealed"),
    ),
    Preset(
        "streaming",
        "StreamingLLM",
        "Endless text of which only the newest part matters: no reads, no choice.",
        "Where an answer stands further back than its window.",
        {**_DROPS, "group_tokens": 16, "keeper": "newest"}
        | {"sink_tokens": 4, "tail_tokens": TOKENS - 4},
        "",
        (_ON_DISK, "positions stay the text's; the paper counts them in the cache"),
    ),
    Preset(
        "window",
        "StreamingLLM",
        "To compare with: streaming without the first tokens.",
        "Always: models break down without them.",
        {**_DROPS, "group_tokens": 16, "keeper": "newest", "tail_tokens": TOKENS},
        "",
        (_ON_DISK,),
    ),
)

_BUDGETS = "a number of tokens for each layer that follows from the prompt's attention"
_MERGED = "tokens that are merged or quantised, not dropped"
_REREAD = "a static set for which all keys are read again every few steps"
_RULE = "its own rule of who is kept (a plug-in may have it: kvswap_torch.plug_ins.TokenScores)"
_CLUSTERS = "rows of clusters"
#: Systems that are known and cannot be had yet: what is missing.
MISSING = {
    **dict.fromkeys(("cake", "compresskv"), _BUDGETS),
    **dict.fromkeys(("lazyeviction", "defensivekv", "dapq"), _RULE),
    **dict.fromkeys(("d2o", "kvmerger", "mikv"), _MERGED),
    "snapkv+": _REREAD,
    "prkv-auto": "a share of kept tokens that follows from the prompt's attention",
    **dict.fromkeys(("clusterkv", "dynakv", "pqcache"), _CLUSTERS),
    "fasa": "projections of pairs of rotary channels",
    "shadowkv": "a keeper of outliers (its landmarks are rows=mean)",
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
    names = [preset.name for preset in PRESETS]
    near = difflib.get_close_matches(str(name), [*names, *MISSING], 3, 0.5)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    raise ConfigError(f"preset: must be one of {', '.join(names)}, got {name!r}{hint}")
