"""Presets whose tokens stay in memory for what they were paid: `kvswap_torch.preset`."""

from __future__ import annotations

from kvswap_torch.preset.definition import TOKENS, Preset

__all__ = ["KEEPING"]

# What is not kept is on disk only; one group is enough to see that not everything fits.
_DROPS = {
    "summary.kind": "none",
    "selection.sink_tokens": 0,
    "selection.top_k_groups": 1,
    "memory.pages_per_layer": 8,
}
_WHOLE_GROUPS = "sinks and newest tokens are attended by whole groups of 16, so up to 15 more each"
# B tokens in all, of which the newest W = 32 always stay.
_ARKV = {
    "selection.recent_tokens": 32,
    "retention.policy": "arkv",
    "retention.tokens": TOKENS - 32,
    "retention.variance_weight": 263.8108280337562,
}
_OF_ARKV = (
    "one choice for all KV heads of a layer, as in the text; the published code has one for each",
    "while decoding a token's neighbours are those positions beside it that are kept",
    "variance is over queries and query heads together, as in the text; in the published code over "
    "the queries of each head, one less of them",
)
_LAYERS_OF_ARKV = (
    "layers are compared by how their tokens were paid, as in (3)-(5); the published code sums up "
    "how each token was paid by query after query",
    "the published code takes the window off what stays as it is twice, and never divides the "
    "first layer's tokens",
)
_MIXED_ARKV = (
    "room is counted in bytes, as in (2): an e4m3 token takes a half; the code counts tokens, as "
    "budget_unit=tokens does",
    "e4m3 tokens are attended; the published code drops them by mistake",
    "one power of two for each KV head of a page, and one for its V, where the paper has a scale "
    "for each token",
)
_RECALLED = "the paper drops tokens; here those of low rank that a query asks for are read again"
_ON_DISK = "with a path what it drops stays on disk: a crop, or a longer prompt, finds it again"
# B tokens in all, of which the window always stays; as many more are kept as fit beside it.
_DIVIDED = {**_DROPS, "selection.recent_tokens": 32, "retention.tokens": TOKENS - 32}
_NEWEST_DECODED = "of what is decoded the newest {} tokens stay; the paper keeps all of it"
_REREAD = "it needs a path: what it drops is read again"
_PRKV = {
    "summary.kind": "min_max",
    "selection.heads": "per_head",
    "memory.replacement": "lru",
    "selection.sink_tokens": 0,
    "selection.recent_tokens": 64,
    "selection.group_tokens": 32,
    "selection.top_k_groups": (TOKENS - 256) // 32,
    "memory.pages_per_layer": (TOKENS - 256) // 16,
    "retention.policy": "snapkv",
    "retention.tokens": 256,
    "retention.window_size": 64,
    "retention.kernel_size": 1,
    "retention.refresh_interval": 128,
    "retention.exclude_from_summary": True,
}

_SMALLER_PRKV = (
    {"retention.tokens": 64},
    *(
        {
            "selection.group_tokens": page,
            "retention.tokens": 64,
            "retention.window_size": window,
            "selection.recent_tokens": window,
        }
        for page, window in ((48, 32), (64, 16))
    ),
)
_OF_PRKV = (
    "records are not rewritten: boxes leave kept tokens out, and a page that is chosen has holes "
    "where they are",
    "while decoding tokens are kept for what those were paid that were attended; the paper reads "
    "all keys again, as refresh_scores=all_tokens does",
)

KEEPING = (
    Preset(
        "prkv",
        "PRKV",
        "Long answers: tokens that matter to all of it stay, the others are chosen step by step.",
        "Facts asked for later; small budgets: its boxes take one part in 32 of the KV cache.",
        _PRKV,
        "",
        (*_OF_PRKV, "a fixed share of 0.25 is kept"),
        smaller=_SMALLER_PRKV,
    ),
    Preset(
        "prkv-auto",
        "PRKV, G",
        "As prkv, where prompts differ: how many tokens stay follows from how alike queries look.",
        "Facts asked for later; small budgets: its boxes take one part in 32 of the KV cache.",
        _PRKV
        | {"retention.budget": "prompt_adaptive", "retention.tokens": TOKENS * 3 // 4}
        | {"selection.top_k_groups": TOKENS // 32, "memory.pages_per_layer": TOKENS // 16},
        "",
        (
            *_OF_PRKV,
            "at most three quarters are kept, which memory is for; one page is always read",
        ),
        smaller=_SMALLER_PRKV,
    ),
    Preset(
        "arkv-recall",
        "ARKV, KVSwap",
        "As kvswap where much is decoded: half the tokens stay, the others are read on demand.",
        "Where a budget is small: kvswap divides it better.",
        {
            **_ARKV,
            "retention.tokens": TOKENS // 2,
            "retention.original_ratio": None,
            "selection.score": "mass_sum",
        }
        | {
            "summary.rank": lambda shape: min(32, shape.width),
            "selection.top_k_groups": TOKENS // 8,
        }
        | {"memory.pages_per_layer": TOKENS // 4},
        "as kvswap",
        (_RECALLED, *_OF_ARKV, *_LAYERS_OF_ARKV, *_MIXED_ARKV),
        smaller=tuple({"summary.rank": rank} for rank in (24, 16, 12, 8, 4)),
        # With fewer columns more groups fit, and few of them are the right ones.
        enough=0.25,
    ),
    Preset(
        "snapkv",
        "SnapKV",
        "One question, at the end of the prompt: nothing is read while decoding.",
        "Where questions come later: what the prompt's end did not attend is gone from answers.",
        {
            **_DROPS,
            "selection.heads": "per_head",
            "selection.group_tokens": lambda shape: shape.group_of_head,
        }
        | {"selection.recent_tokens": 32, "retention.policy": "snapkv", "retention.tokens": TOKENS},
        "",
        (_ON_DISK, "of what is decoded the newest 32 tokens stay; the paper keeps all of it"),
    ),
    Preset(
        "snapkv+",
        "PRKV, SnapKV",
        "As snapkv, where much is decoded: the tokens that stay are chosen anew, of all on disk.",
        "Where questions come later, and on slow disks: the cache is read twice in 128 steps.",
        {
            **_DROPS,
            "selection.heads": "per_head",
            "selection.group_tokens": lambda shape: shape.group_of_head,
        }
        | {
            "selection.recent_tokens": 64,
            "retention.policy": "snapkv",
            "retention.tokens": TOKENS,
            "retention.window_size": 64,
        }
        | {
            "retention.kernel_size": 1,
            "retention.refresh_interval": 128,
            "retention.refresh_scores": "all_tokens",
        },
        "",
        (
            _REREAD,
            "PRKV with a budget that is all static; of what is decoded the newest 64 tokens stay "
            "until the next choice",
        ),
    ),
    Preset(
        "cake",
        "CAKE",
        "As snapkv, where layers differ: those whose attention is spread and changes keep more.",
        "Where questions come later: what the prompt's end did not attend is gone from answers.",
        {
            **_DIVIDED,
            "selection.heads": "per_head",
            "selection.group_tokens": lambda shape: shape.group_of_head,
        }
        | {"retention.policy": "cake", "retention.variance_weight": 200.0},
        "",
        (
            _ON_DISK,
            _NEWEST_DECODED.format(32),
            "both roots are 1 for any model (preference_temperatures); the paper sets them model "
            "by model",
            "a layer keeps at most three times what layers keep on average (max_layer_multiple), "
            "which memory is for; in the paper whatever the others leave",
            "spread and change are summed over tokens whose groups are sealed",
        ),
    ),
    Preset(
        "compresskv",
        "CompressKV",
        "As snapkv, with a heads file of the model: its retrieval heads alone choose, and layers "
        "that need more have more.",
        "Without such a file; where questions come later.",
        {
            **_DROPS,
            "selection.recent_tokens": 8,
            "retention.policy": "compresskv",
            "retention.tokens": TOKENS - 8,
        }
        | {"retention.window_size": 8, "retention.min_layer_tokens": 24},
        "heads and shares of layers must be found beforehand: kvswap calibrate does, and a heads "
        "file (kvswap_torch.heads_file) may be given",
        (
            _ON_DISK,
            _NEWEST_DECODED.format(8),
            "kvswap calibrate gives the model the answers, and counts the tokens that it would "
            "have written itself; in the paper it writes them",
            "a head is worth what its queries pay the whole sentence that tells a fact, in the "
            "paper's code the words of the answer in it; a question counts with more than half of "
            "its answer's tokens, there with half of its words",
            "what a layer loses is measured before its heads' outputs are projected, and over "
            "answers that count",
        ),
        needs={
            "retention.scoring_heads": (),
            "retention.layer_weights": lambda shape: (1.0,) * shape.layers,
        },
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
        {**_DROPS, **_ARKV, "retention.original_ratio": None},
        "",
        (_ON_DISK, *_OF_ARKV, *_LAYERS_OF_ARKV, *_MIXED_ARKV),
    ),
    Preset(
        "arkv-quant",
        "ARKV",
        "To compare with: every kept token becomes e4m3 as soon as there is no room.",
        "Where answers must be the full cache's own: what is kept is rounded.",
        {**_DROPS, **_ARKV, "retention.original_ratio": 0.0},
        "",
        (_ON_DISK, *_OF_ARKV, *_MIXED_ARKV),
    ),
    Preset(
        "h2o",
        "H2O",
        "To compare with: half the budget for tokens that were attended most, half for the newest.",
        "For answers that must be found, and for speed: every step's attention is summed up.",
        {
            **_DROPS,
            "selection.heads": "per_head",
            "selection.group_tokens": lambda shape: shape.group_of_head,
        }
        | {
            "selection.recent_tokens": TOKENS // 2,
            "retention.policy": "h2o",
            "retention.tokens": TOKENS // 2,
        }
        | {"retention.refresh_interval": 1},
        "",
        (_ON_DISK, "of a prompt the last 32 queries count; all of them in the paper")
        + ("a fixed number of tokens, where the paper takes a share of the prompt",),
    ),
    Preset(
        "tova",
        "TOVA",
        "To compare with: the tokens stay that the last query paid most.",
        "For answers that must be found, and for speed: tokens are chosen anew in every step.",
        {
            **_DROPS,
            "selection.recent_tokens": 1,
            "retention.policy": "snapkv",
            "retention.tokens": TOKENS,
        }
        | {"retention.window_size": 1, "retention.kernel_size": 1, "retention.refresh_interval": 1},
        "",
        (_ON_DISK, "a group of tokens that was just decoded is chosen once it is sealed"),
    ),
    Preset(
        "streaming",
        "StreamingLLM",
        "Endless text of which only the newest part matters: no reads, no choice.",
        "Where an answer stands further back than its window.",
        {**_DROPS, "selection.group_tokens": 16, "retention.policy": "recent_only"}
        | {"selection.sink_tokens": 4, "selection.recent_tokens": TOKENS - 4},
        "",
        (_ON_DISK, "positions stay the text's; the paper counts them in the cache", _WHOLE_GROUPS),
    ),
    Preset(
        "window",
        "StreamingLLM",
        "To compare with: streaming without the first tokens.",
        "Always: models break down without them.",
        {
            **_DROPS,
            "selection.group_tokens": 16,
            "retention.policy": "recent_only",
            "selection.recent_tokens": TOKENS,
        },
        "",
        (_ON_DISK, _WHOLE_GROUPS),
    ),
)
