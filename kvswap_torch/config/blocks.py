"""The blocks of settings of a `SwapConfig`: each a dataclass of fields with their own rules."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from kvswap_torch.config.fields import (
    boolean,
    documented,
    file_rule,
    layers_rule,
    may_be_list,
    number,
    one_of,
    rank_rule,
    real,
    share,
)

__all__ = ["Audit", "Block", "Clusters", "Memory", "Prefetch", "Selection", "Storage", "Summary"]

_SCORES = ("logit_sum", "logit_max", "mass_sum", "mass_max")


@dataclass(frozen=True)
class Block:
    """Settings that belong together. Checked on construction, then immutable."""

    BLOCK: ClassVar[str]

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, list) and may_be_list(item):
                object.__setattr__(self, item.name, value := tuple(value))
            item.metadata["check"](f"{self.BLOCK}.{item.name}", value)


@documented
@dataclass(frozen=True)
class Summary(Block):
    """What stays in memory of the keys, to rank groups by."""

    BLOCK = "summary"

    kind: str = one_of(
        "low_rank",
        ("low_rank", "min_max", "mean", "centroid", "user", "none"),
        "What memory holds to rank groups. `low_rank`: a vector for each token (KVSwap). `min_max` "
        "(Quest) and `mean` (ShadowKV): for each group; no projection. `centroid`: of clusters. "
        "`user`: your `group_scores`. `none`: nothing is ranked.",
    )
    rank: int | tuple[int, ...] = rank_rule(
        32,
        "Dimensions of a low-rank key: one number, or one for each layer on disk. Doubled if the "
        "projection is estimated from the first prompt. Memory and time of ranking grow with it.",
    )
    dtype: str = one_of(
        "auto",
        ("auto", "int8", "int4"),
        "Precision of the summary. `auto`: the model's dtype. `int8` and `int4`: with one scale "
        "for each vector.",
    )
    projection: str = one_of(
        "query_aware",
        ("query_aware", "svd_keys", "pca_per_head", "skewed", "channels", "rope_pairs"),
        "How keys are compressed. `query_aware`: the best bilinear form of the logits. `svd_keys`: "
        "KVSwap. One block for each KV head, never doubled: `pca_per_head` (Loki), `skewed` "
        "(InfiniGen), `channels` (ThinK), `rope_pairs` (even `rank`).",
    )
    projection_file: str | None = file_rule(
        "A safetensors file with the projections, relative to the config. null: estimated from "
        "the first prompt."
    )
    half_width_weight: float = real(
        1.0,
        0.0,
        1.0,
        "With `min_max`: how much of a group's half width counts in its score. 1: an upper bound "
        "for each key (Quest).",
    )
    coarse_rank: int | None = number(
        None,
        1,
        1 << 16,
        "Dimensions of a first, coarse ranking; the best `rerank_fraction` is ranked again by all. "
        "Reads less and may select other groups. null: one ranking by all.",
    )
    rerank_fraction: float = real(
        0.2,
        0.0,
        1.0,
        "With `coarse_rank`: fraction of the 16-token blocks in every 1,024 tokens that are ranked "
        "again by all dimensions. At least `top_k_groups` blocks in total.",
    )


@documented
@dataclass(frozen=True)
class Selection(Block):
    """Which tokens a step attends."""

    BLOCK = "selection"

    group_tokens: int = number(
        4, 1, 64, "Consecutive tokens of one layer and sequence, selected and read together (G)."
    )
    heads: str = one_of(
        "joint",
        ("joint", "per_head"),
        "`joint`: all KV heads of a sequence share one selection. `per_head`: each KV head selects "
        "for itself and has its own records and pages; `rank`, `top_k_groups` and "
        "`pages_per_layer` then count for each KV head.",
    )
    score: str | None = one_of(
        None,
        (None, *_SCORES),
        "A group's score. `mass_sum`: its attention mass, summed over heads. `mass_max`: the "
        "largest of a head. `logit_max`: the largest logit of a head. `logit_sum`: of all queries' "
        "sum (KVSwap). Default: `mass_sum` with `summary.kind=low_rank`, else `logit_sum`.",
    )
    top_k_groups: int = number(
        100,
        1,
        1 << 20,
        "Groups attended for each layer, sequence and step, in addition to sinks and recent tokens "
        "(M). More is more accurate and slower.",
    )
    new_group_ratio: float | None = share(
        "A group that the step before did not attend must be among the best `top_k_groups` times "
        "this. Reads less from disk, and attends fewer tokens. null: all `top_k_groups` are free."
    )
    sink_tokens: int = number(
        4, 0, 4096, "First valid tokens of each sequence, always in memory and attended."
    )
    recent_tokens: int = number(
        32,
        0,
        4096,
        "Newest tokens, always in memory and attended; written to disk group by group.",
    )
    dense_layers: tuple[int, ...] = layers_rule(
        "Layers on disk that attend every token. They have no summary; each step reads what is not "
        "in memory."
    )
    max_step_tokens: int = number(
        8,
        1,
        16,
        "Longest decoding step in tokens; it attends the union of its tokens' selections.",
    )


@documented
@dataclass(frozen=True)
class Prefetch(Block):
    """Reads for the next layer, by a prediction of its query."""

    BLOCK = "prefetch"

    mode: str = one_of(
        "verify",
        ("off", "trust", "verify"),
        "What the next layer's predicted query does. `verify`: its groups are read ahead, and the "
        "layer selects by its own query. `trust`: they are attended too; for models and "
        "projections that a calibration found fit for it. `off`: nothing is predicted.",
    )
    skip_layers: tuple[int, ...] = layers_rule(
        "Layers without prefetch, because the previous layer does not predict their query. They "
        "select by their own query; their reads are not overlapped."
    )


@documented
@dataclass(frozen=True)
class Memory(Block):
    """Pages of records in memory."""

    BLOCK = "memory"

    pages_per_layer: int = number(
        200,
        1,
        1 << 24,
        "Pages for each layer and sequence, at least `top_k_groups` (C). Pages beyond "
        "`top_k_groups` form the reuse buffer.",
    )
    replacement: str = one_of(
        "fifo",
        ("fifo", "lru", "last_step_only", "no_reuse", "least_attended", "largest_cluster"),
        "Which page the reuse buffer replaces. `fifo` (KVSwap), `lru`, `last_step_only`: all that "
        "the last step did not use (published code), `least_attended`: reads the keys once more "
        "each step, `largest_cluster`: with clusters, `no_reuse`: all, for measurements.",
    )
    resident_layers: int | None = number(
        None,
        2,
        1 << 16,
        "Layers that have pages at a time; each passes its pages on and reads what it attends in "
        "every step (DynaKV 6.1). null: all layers, with a reuse buffer each.",
    )


@documented
@dataclass(frozen=True)
class Storage(Block):
    """How records are stored, read and written."""

    BLOCK = "storage"

    kv_dtype: str = one_of(
        "auto",
        ("auto", "fp8_e4m3", "int4"),
        "Type of records. `auto`: the model's dtype. `fp8_e4m3`: half the bytes (a quarter of "
        "float32's) on disk and in pages, with one power of two for each KV head's K and V. "
        "Of clusters: on disk alone, with powers of two for each token. "
        "`int4`: 0.27 to 0.32 of bfloat16's bytes on disk, the model's dtype in pages. Sinks and "
        "recent tokens keep the model's dtype.",
    )
    layout: str = one_of(
        "append",
        ("append", "paired_pools"),
        "Record placement on disk. `append`: in the order of sealing. `paired_pools`: with "
        "clusters, in pools of two that grow towards each other (DynaKV 5.2); one read fetches a "
        "cluster.",
    )
    pool_slack_pages: int = number(
        2,
        0,
        16,
        "With `paired_pools`: free pages between the two clusters of a new pool. Each has one more "
        "at its other end.",
    )
    io_backend: str = one_of(
        "auto", ("auto", "io_uring", "threads", "sync"), "Reader. `auto`: the fastest that works."
    )
    io_mode: str = one_of(
        "auto",
        ("auto", "direct", "buffered"),
        "`direct`: O_DIRECT. `buffered`: the page cache. `auto`: direct if possible.",
    )
    queue_depth: int = number(64, 1, 1024, "Reads in flight at once.")
    coalesce_gap_bytes: int = number(
        16 << 10, 0, 1 << 24, "Neighbouring reads are coalesced over a gap up to this."
    )
    max_read_bytes: int = number(256 << 10, 4096, 1 << 28, "Longest coalesced read.")
    verify_checksums: bool = boolean(True, "Verify the checksum of every record that is read.")
    io_timeout_seconds: int = number(
        60, 0, 1 << 24, "A read or write without progress for longer is an error. 0: never."
    )
    wipe_on_close: bool = boolean(
        False,
        "Overwrite the file, pages and write buffers with zeros before they are freed. close() "
        "then takes as long as writing the file again.",
    )
    simulated_device: str | None = one_of(
        None,
        (None, "nvme", "ufs", "emmc"),
        "Delay reads like a simulated device, for experiments. null: the real disk alone.",
    )
    max_disk_bytes: int | None = number(
        None, 1, 2**63 - 1, "Most bytes on disk. null: the disk's free space."
    )


@documented
@dataclass(frozen=True)
class Clusters(Block):
    """Clusters of similar keys are selected, with `summary.kind=centroid` (DynaKV)."""

    BLOCK = "clusters"

    target_tokens: int = number(16, 4, 1024, "Tokens of a cluster after a prompt, on average.")
    max_tokens: int = number(32, 4, 4096, "Most tokens of a cluster.")
    split_variance_ratio: float = real(
        1.25,
        1e-3,
        1e6,
        "A cluster is split if its variance exceeds the mean of its layer's and sequence's first "
        "clusters by this factor.",
    )
    max_pending_tokens: int = number(
        16,
        0,
        1024,
        "Decoded tokens of a layer and sequence that may stay in memory until their cluster is "
        "loaded. They are attended. Beyond this number a cluster is read to store them.",
    )
    score: str = one_of(
        "logit_sum", _SCORES, "A cluster's score, by its centroid: as `selection.score`."
    )
    update: str = one_of(
        "adaptive",
        ("adaptive", "static", "local"),
        "What becomes of decoded tokens. `adaptive`: join the nearest cluster, which may split. "
        "`static`: join the nearest with free space. `local`: clustered among themselves, four "
        "clusters' worth at a time.",
    )


@documented
@dataclass(frozen=True)
class Audit(Block):
    """Samples of groups that were not selected, to estimate the attention they would have had."""

    BLOCK = "audit"

    interval: int = number(
        32,
        1,
        1 << 20,
        "Decoding steps between two samples of a layer (`missed_mass` in `stats()`).",
    )
    sample_groups: int = number(
        16, 2, 4096, "Groups that a sample reads for each selection, drawn at random."
    )
    max_missed_mass: float | None = share(
        "Attention that a layer may miss. Samples then adapt how many groups it attends: fewer "
        "than `top_k_groups`, or more, up to `pages_per_layer`. null: not adapted."
    )
