"""What holds between two settings of a `SwapConfig`.

No floor says that `keep_tokens` is at least `keep_window` and a group. The newest tokens stand in
the tail, beside those that are kept: PRKV keeps 64 tokens of a budget of 256 by what a window of 64
queries paid, and TOVA may keep one. Only where a group joins the kept tokens at once (arkv) would
fewer than that be dropped as soon as they come.
"""

from __future__ import annotations

from typing import Any

from kvswap_torch.config_rules import Even, Floor, Idle, Owned

__all__ = ["EVEN", "FLOORS", "IDLE", "OWNED", "check_between"]

FLOORS = (
    Floor("pages_max", "groups_max", "since what a step attends must be in memory"),
    Floor("pages_max", "select_queries_max", "a page for each query's choice"),
    Floor("cluster_tokens_max", "cluster_tokens", "which a cluster has on average"),
    Floor("keep_tokens", "group_tokens", "since a group joins what is kept at once", "arkv"),
    Floor("keep_tokens", "group_tokens", "since whole groups are kept", "outliers"),
    Floor("keep_tokens", "keep_layer_least", "since it is what layers have on average"),
    Floor("merge_bytes_max", "merge_gap_bytes", "since a merged read holds its gaps"),
)
# What other rows than these would ignore.
OWNED = (
    *(
        Owned(name, "rows", "low_rank")
        for name in ("rank", "projection_file", "projection_kind", "score_columns")
    ),
    Owned("bound_weight", "rows", "box"),
    Owned("grouping", "rows", "centroid"),
    Owned("rows", "grouping", "clusters", ("centroid",)),
    *(
        Owned(name, "grouping", "clusters")
        for name in (
            "cluster_tokens",
            "cluster_tokens_max",
            "split_factor",
            "pending_tokens",
            "cluster_score",
            "cluster_update",
        )
    ),
    Owned("replacement", "grouping", "clusters", ("clusters",)),
    Owned("layout", "grouping", "clusters", ("pools",)),
    Owned("pool_slack_pages", "layout", "pools"),
    Owned("score", "rows", "low_rank", ("mass", "max_mass")),
    Owned("summary_dtype", "rows", "low_rank", ("int4",)),
    Owned("keeper", "rows", "none", ("newest", "cake")),
    *(Owned(name, "keeper", "arkv") for name in ("keep_slack", "keep_ratio", "keep_count")),
    *(
        Owned(name, "keeper", "observed")
        for name in ("keep_scores", "keep_share", "keep_layer_shares", "keep_heads")
    ),
    *(
        Owned(name, *of)
        for name in ("keep_layer_shares", "keep_heads")
        for of in (("rows", "none"), ("keep_interval", "0"))
    ),
    Owned("keep_heads", "heads", "all"),
    Owned("keep_preference", "keeper", "cake"),
    Owned("keep_temperatures", "keep_ratio", "null"),
)
IDLE = (  # what would have no effect
    Idle("audit_every", "rows", "none", "since nothing is selected"),
    Idle("missed_mass_max", "rows", "none", "since nothing is selected"),
    Idle("score", "grouping", "clusters", "since cluster_score says it of clusters"),
    Idle("summary_dtype", "grouping", "clusters", "since centroids are float32"),
    Idle("pending_tokens", "cluster_update", "local", "since tokens wait for four clusters' worth"),
    *(
        Idle(name, "grouping", "clusters", "which has not been built for clusters")
        for name in ("records", "keeper")
    ),
    Idle("keep_share", "rows", "none", "since no groups are selected"),
    Idle("score", "rows", "given", "since scores come from outside"),
    Idle("summary_dtype", "rows", "given", "since there is no summary"),
    Idle("score_share", "score_columns", "null", "since all groups are scored by all columns"),
    Idle("score_columns", "summary_dtype", "int4", "which has not been built for two stages"),
    *(
        Idle("score_columns", "score", score, "since a head's softmax needs every token's product")
        for score in ("mass", "max_mass")
    ),
    *(
        Idle("score_columns", "projection_kind", kind, "since its first columns are one head's")
        for kind in ("pca_per_head", "skewed", "channels", "rope_pairs")
    ),
    *(
        Idle(name, "keeper", keeper, "since no token is kept for what it was paid")
        for name in ("keep_tokens", "keep_window", "keep_pool", "keep_interval")
        for keeper in ("none", "newest")
    ),
    *(
        Idle(name, "keeper", "given", "since what tokens are worth comes from outside")
        for name in ("keep_window", "keep_pool")
    ),
    *(
        Idle(name, "keeper", "outliers", "since no query decides who is kept")
        for name in ("keep_window", "keep_pool", "keep_interval")
    ),
    Idle("keeper", "rows", "none", "since there are no groups to be left out of", ("outliers",)),
    Idle("keep_scores", "keep_interval", "0", "since nothing is decided while decoding"),
    Idle("keep_count", "keep_ratio", "1", "since no token is rounded"),
    Idle("keep_interval", "keeper", "arkv", "since it is chosen anew where there is no room"),
    Idle("keep_interval", "keeper", "cake", "since a prompt alone says what layers have"),
    *(
        Idle("keep_layer_most", "keeper", keeper, "since all layers have as many")
        for keeper in ("none", "newest", "heavy", "arkv", "outliers", "given")
    ),
    *(
        Idle("keep_variance", "keeper", keeper, "since no token is worth its variance")
        for keeper in ("none", "newest", "observed", "heavy", "outliers", "given")
    ),
    Idle("keep_pool", "keeper", "heavy", "since what each step paid is summed token by token"),
)
EVEN = (Even("rank", "projection_kind", "rope_pairs", "since both channels of a pair are taken"),)


def check_between(settings: Any) -> None:
    """Raises `ConfigError` for the first rule that does not hold."""
    for rule in (*FLOORS, *OWNED, *IDLE, *EVEN):
        rule.check(settings)
