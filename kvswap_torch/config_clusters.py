"""Settings of a `SwapConfig` that only clusters of similar keys have (DynaKV)."""

from __future__ import annotations

from dataclasses import dataclass

from kvswap_torch.config_rules import number, one_of, real

__all__ = ["ClusterSettings"]


@dataclass(frozen=True)
class ClusterSettings:
    """How large clusters are, when they split, and what they are worth."""

    cluster_tokens: int = number(
        16, 4, 1024, "tokens of a cluster that a prompt is divided into, on average"
    )
    cluster_tokens_max: int = number(32, 4, 4096, "that no cluster exceeds")
    split_factor: float = real(
        1.25,
        1e-3,
        1e6,
        "a cluster is split when its variance exceeds so many times the mean of its layer's and "
        "sequence's first clusters",
    )
    pending_tokens: int = number(
        16,
        0,
        1024,
        "tokens of each layer and sequence that left the tail and wait in memory, attended all the "
        "same, until their clusters are read; with more of them one is read for them",
    )
    cluster_score: str = one_of(
        "sum",
        ("sum", "max", "mass", "max_mass"),
        "what a cluster is worth, by its centroid: as `score`, which is for groups",
    )
    cluster_update: str = one_of(
        "adaptive",
        ("adaptive", "static", "local"),
        "how tokens enter that come after a prompt: `adaptive` ones join the nearest cluster and "
        "split it, `static` ones join the nearest that has room and change nothing of it, `local` "
        "ones wait until they fill four clusters and are clustered among themselves",
    )
    pool_slack_pages: int = number(
        2,
        0,
        16,
        "with layout=pools: free pages between the two clusters of a new pool, which both grow "
        "into; each has one more at its other end",
    )
