"""Retention policies: tokens that stay in memory, attended in every step; each has own fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvswap_torch.config.blocks import Block
from kvswap_torch.config.fields import (
    boolean,
    documented,
    floats_rule,
    layers_rule,
    number,
    one_of,
    real,
    reals,
)

__all__ = [
    "ARKV",
    "CAKE",
    "H2O",
    "POLICIES",
    "CompressKV",
    "KeyOutliers",
    "RecentOnly",
    "Retention",
    "SnapKV",
    "UserRetention",
]


class Retention(Block):
    """A retention policy. In a file its name is `retention.policy`."""

    BLOCK = "retention"
    POLICY: ClassVar[str]


def _tokens() -> Any:
    return number(
        256,
        1,
        1 << 20,
        "Tokens retained of each layer and sequence, on average if layers differ. With "
        "`selection.heads=per_head`: of each KV head.",
    )


def _window_size() -> Any:
    return number(32, 1, 4096, "Newest queries whose attention decides which tokens are retained.")


def _kernel_size() -> Any:
    return number(
        5,
        1,
        63,
        "Neighbouring tokens, itself in the middle, that a token's score is averaged over.",
    )


def _refresh_interval() -> Any:
    return number(
        0,
        0,
        1 << 20,
        "Decoded tokens between two refreshes of the retained set. 0: after each prompt alone.",
    )


def _variance_weight() -> Any:
    return real(
        0.0, 0.0, 1e6, "A token's score is its mean attention plus this times the variance (gamma)."
    )


def _max_layer_multiple() -> Any:
    return real(
        3.0,
        1.0,
        4096.0,
        "Upper bound on one layer's tokens, as a multiple of the average (`window_size` included). "
        "Per-step buffers are sized for it.",
    )


@documented
@dataclass(frozen=True)
class RecentOnly(Retention):
    """Sinks and recent tokens alone (StreamingLLM); with `summary.kind=none`."""

    POLICY = "recent_only"


@documented
@dataclass(frozen=True)
class SnapKV(Retention):
    """Tokens that the newest queries attended most (SnapKV; with a refresh PRKV, TOVA)."""

    POLICY = "snapkv"

    tokens: int = _tokens()
    window_size: int = _window_size()
    kernel_size: int = _kernel_size()
    refresh_interval: int = _refresh_interval()
    refresh_scores: str = one_of(
        "attended",
        ("attended", "all_tokens"),
        "Scores of a refresh during decoding. `attended`: attention over the tokens that were "
        "attended; reads nothing. `all_tokens` (PRKV Alg. 1): over every earlier token; reads the "
        "layer's records twice.",
    )
    budget: str = one_of(
        "fixed",
        ("fixed", "prompt_adaptive"),
        "`fixed`: retain `tokens`. `prompt_adaptive` (PRKV, app. G): retain the overlap of the "
        "top-k tokens of the window's first and last query, at most `tokens`; `top_k_groups` "
        "shrinks by as many groups.",
    )
    exclude_from_summary: bool = boolean(
        False,
        "Group bounds or means leave retained tokens out, and are recomputed when the retained "
        "set changes (PRKV Alg. 1, lines 9-14). Reads the groups that change. Records stay.",
    )


@documented
@dataclass(frozen=True)
class CompressKV(Retention):
    """As `SnapKV` by some heads alone, with more tokens in some layers; `summary.kind=none`."""

    POLICY = "compresskv"

    tokens: int = _tokens()
    window_size: int = _window_size()
    kernel_size: int = _kernel_size()
    layer_weights: tuple[float, ...] = floats_rule(
        0.0,
        1e6,
        "One number for each layer on disk, in any unit: a layer retains that part of all layers' "
        "tokens. Empty: all retain as many.",
    )
    min_layer_tokens: int = number(0, 0, 1 << 20, "Tokens that a layer retains at least.")
    max_layer_multiple: float = _max_layer_multiple()
    scoring_heads: tuple[int, ...] = layers_rule(
        "Query heads whose attention alone is used, numbered through all layers on disk: head h of "
        "layer l is l times the heads of a layer, plus h. Empty: all.",
        "numbers of heads",
    )


@documented
@dataclass(frozen=True)
class H2O(Retention):
    """Tokens with the largest attention since the prompt, summed over all steps (H2O)."""

    POLICY = "h2o"

    tokens: int = _tokens()
    window_size: int = _window_size()
    refresh_interval: int = _refresh_interval()


@documented
@dataclass(frozen=True)
class ARKV(Retention):
    """A prompt's tokens of high or varying attention; decoded ones while there is room (ARKV)."""

    POLICY = "arkv"

    tokens: int = _tokens()
    window_size: int = _window_size()
    kernel_size: int = _kernel_size()
    variance_weight: float = _variance_weight()
    low_watermark: float = real(
        0.75, 0.0, 1.0, "Fraction of retained tokens that stay when the budget is full (alpha)."
    )
    original_ratio: float | None = real(
        1.0,
        0.0,
        1.0,
        "Fraction of `tokens` kept in the model's dtype when the budget is full; the rest become "
        "fp8 e4m3. null: for each layer, from the prompt's attention (ARKV's OQ ratio).",
        optional=True,
    )
    budget_unit: str = one_of(
        "bytes",
        ("bytes", "tokens"),
        "What `tokens` counts if some are e4m3. `bytes`: the bytes of that many in the model's "
        "dtype, so that more e4m3 tokens fit. `tokens`: tokens of either kind.",
    )
    oq_temperatures: tuple[float, ...] = reals(
        (7.774380648611771, 5.407015096778621, 5.527702582901318),
        0.1,
        1e6,
        "If `original_ratio` is null: roots taken of a prompt's entropy, variance and kurtosis "
        "before they are multiplied (tau). The larger, the less it counts.",
    )


@documented
@dataclass(frozen=True)
class CAKE(Retention):
    """As `SnapKV`, with more tokens in layers whose attention is spread and changes (CAKE)."""

    POLICY = "cake"

    tokens: int = _tokens()
    window_size: int = _window_size()
    kernel_size: int = _kernel_size()
    variance_weight: float = _variance_weight()
    preference_temperatures: tuple[float, ...] = reals(
        (1.0, 1.0),
        0.1,
        1e6,
        "Roots taken of the spread of a layer's attention, and of its change, before they are "
        "multiplied (tau 1, tau 2).",
    )
    max_layer_multiple: float = _max_layer_multiple()


@documented
@dataclass(frozen=True)
class KeyOutliers(Retention):
    """A prompt's groups whose mean represents their keys worst (ShadowKV)."""

    POLICY = "key_outliers"

    tokens: int = _tokens()


@documented
@dataclass(frozen=True)
class UserRetention(Retention):
    """Tokens with the largest scores of your own `token_scores`."""

    POLICY = "user"

    tokens: int = _tokens()
    refresh_interval: int = _refresh_interval()


#: Every policy by its name in a file.
POLICIES = {
    policy.POLICY: policy
    for policy in (RecentOnly, SnapKV, CompressKV, H2O, ARKV, CAKE, KeyOutliers, UserRetention)
}
