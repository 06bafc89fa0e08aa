"""`SwapConfig`: every decision the cache obeys, and the file it is kept in.

The tuner writes such a file and the cache reads it; nothing else connects the two. A file holds the
settings, the name of a projection file beside it, the model it is for, and one solution per (batch,
context) pair (KVSwap, appendix A.4).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvswap_torch import config_file
from kvswap_torch.config_between import check_between
from kvswap_torch.config_clusters import ClusterSettings
from kvswap_torch.config_disk import DiskSettings
from kvswap_torch.config_facts import ConfigFacts
from kvswap_torch.config_file import CONFIG_VERSION
from kvswap_torch.config_model import check_model
from kvswap_torch.config_parts import (
    ModelIdentity,
    Solution,
    adopt_plain_values,
    check_table,
)
from kvswap_torch.config_rules import (
    boolean,
    check_beside,
    documented,
    floats_rule,
    layers_rule,
    number,
    one_of,
    plain,
    rank_rule,
    real,
    reals,
    share,
)
from kvswap_torch.errors import ConfigError
from kvswap_torch.preset import find
from kvswap_torch.preset_parts import Shape

__all__ = ["CONFIG_VERSION", "ModelIdentity", "Solution", "SwapConfig"]

# Fields of a config that are no settings.
APART = ("model", "provenance", "table", "version", "source")


@documented
@dataclass(frozen=True)
class SwapConfig(ClusterSettings, DiskSettings, ConfigFacts):
    """What the tuner decides and the cache obeys. Checked on construction, then immutable."""

    group_tokens: int = number(
        4, 1, 64, "tokens of one layer and sequence that are selected and read together (G)"
    )
    grouping: str = one_of(
        "runs",
        ("runs", "clusters"),
        "which tokens are selected and read together: runs of `group_tokens`; or clusters of "
        "similar keys, whose pages hold `group_tokens` each, and which split while decoding "
        "(DynaKV; with rows=centroid)",
    )
    heads: str = one_of(
        "all",
        ("all", "each"),
        "who chooses groups: all KV heads of a sequence together, or each for itself, with records "
        "and pages of its own; `rank`, `groups_max` and `pages_max` then count for each KV head",
    )
    rows: str = one_of(
        "low_rank",
        ("low_rank", "box", "mean", "centroid", "given", "none"),
        "what stays in memory of the keys, to score groups by: low-rank rows of each token "
        "(KVSwap); the box around the keys of a group (Quest) or their mean (ShadowKV), which need "
        "no projection; the centroids of clusters (DynaKV); `given`: what your own `group_scores` "
        "keeps, and says; or nothing, and every layer attends everything, restored from disk",
    )
    records: str = one_of(
        "model",
        ("model", "fp8"),
        "what a record on disk, and its page in memory, holds: the model's dtype, or e4m3 with one "
        "power of two for the K of a KV head and one for its V, in half the bytes (a quarter of "
        "float32's); sinks and tail keep the model's dtype",
    )
    rank: int | tuple[int, ...] = rank_rule(
        32,
        "columns of the low-rank summary: one number, or one for each layer on disk; doubled when "
        "the projection is computed from the first prefill",
    )
    summary_dtype: str = one_of(
        "model",
        ("model", "int8", "int4"),
        "precision of the summary's rows: the model's dtype, int8, or int4, two columns to a byte; "
        "the last two with one scale a row",
    )
    score: str = one_of(
        "sum",
        ("sum", "max", "mass", "max_mass"),
        "what a group is worth: its largest product with the sum of all heads' queries (the "
        "paper), with the query of any head, the attention paid to it summed over heads, or that "
        "of the head that pays most",
    )
    score_columns: int | None = number(
        None,
        1,
        1 << 16,
        "columns of a row that all groups are scored by first, where it has more; then the best "
        "`score_share` by all columns, which reads less but does not choose quite the same. None: "
        "all groups by all columns",
    )
    score_share: float = real(
        0.2,
        0.0,
        1.0,
        "of each 1,024 tokens' blocks of 16, those whose groups are scored by all columns; at "
        "least as many in all as `groups_max`, so that of a short context all are",
    )
    bound_weight: float = real(
        1.0, 0.0, 1.0, "of a box's half width in a group's score; 1 bounds each key's (Quest)"
    )
    groups_max: int = number(
        100, 1, 1 << 20, "groups attended per layer, sequence and step, sinks and tail apart (M)"
    )
    pages_max: int = number(
        200,
        1,
        1 << 24,
        "groups kept in memory per layer and sequence (C); at least `groups_max`; what is above it "
        "is the reuse buffer",
    )
    resident_layers: int | None = number(
        None,
        2,
        1 << 16,
        "layers that have groups in memory at a time; each gives its pages to the layer so many "
        "behind it, and reads what it attends from disk in every step (DynaKV 6.1). None: all, and "
        "a reuse buffer for each",
    )
    sink_tokens: int = number(
        4, 0, 4096, "first valid tokens of each sequence, always in memory and attended"
    )
    tail_tokens: int = number(
        32, 0, 4096, "newest tokens, always in memory and attended, sealed group by group"
    )
    replacement: str = one_of(
        "fifo",
        ("fifo", "lru", "unused", "none", "score", "clusters"),
        "who leaves the reuse buffer: the oldest load (the paper), the least recently used, "
        "whatever this step did not use (the published research code), or with none everybody "
        "before the next step, to measure what reuse saves; with score who was paid least "
        "attention when it was last attended, which costs a look at the keys in each step; with "
        "clusters a page of the largest cluster, and last of all one that was written anew",
    )
    select_queries_max: int = number(
        8, 1, 16, "longest step of decoding, which attends the union of its tokens' selections"
    )
    look_ahead: bool = boolean(
        False,
        "predict the next layer's query and read ahead; off: choose with the true query. For "
        "projections that were calibrated for it: the tuner's",
    )
    true_query_layers: tuple[int, ...] = layers_rule(
        "layers on disk that choose with their true query all the same, since the layer before "
        "tells too little of it; what they read is not hidden"
    )
    exact_layers: tuple[int, ...] = layers_rule(
        "layers on disk that attend everything: they have no summary, and what is not in memory is "
        "restored from disk in every step"
    )
    keeper: str = one_of(
        "none",
        ("none", "newest", "observed", "heavy", "arkv", "cake", "outliers", "given"),
        "which tokens stay in memory, and are attended in every step, whatever is asked: none but "
        "sinks and tail; with rows=none `newest`, the same with nothing else attended "
        "(StreamingLLM); `observed`, those that the newest queries of a prompt paid most attention "
        "(SnapKV, PRKV); `heavy`, the same summed up over all steps since (H2O); `arkv`, those of "
        "a prompt whose attention is high or varies much, and all that is decoded, until there is "
        "no room (ARKV); `cake`, as `observed` by attention that is high or varies much, more of "
        "them in layers whose attention is spread over many tokens and changes (CAKE); `outliers`, "
        "the groups of a prompt whose mean stands for their keys worst (ShadowKV); or `given`, "
        "those that your own `token_scores` says are worth most. With rows=none they alone are "
        "attended: the others stay on disk",
    )
    keep_tokens: int = number(
        256,
        1,
        1 << 20,
        "tokens that stay, of each layer and sequence, on average where layers differ; with "
        "heads=each of each KV head",
    )
    keep_share: str = one_of(
        "fixed",
        ("fixed", "auto"),
        "how many tokens stay: `keep_tokens`; or, decided by each prompt, as many as the first and "
        "the last of its newest `keep_window` queries agree on, of as many as `groups_max` groups "
        "hold, but at most `keep_tokens`. So many groups fewer are selected",
    )
    keep_window: int = number(
        32, 1, 4096, "newest queries whose attention decides which tokens stay"
    )
    keep_pool: int = number(
        5, 1, 63, "neighbours, itself in the middle, that a token's attention is averaged over"
    )
    keep_interval: int = number(
        0,
        0,
        1 << 20,
        "decoded tokens after which it is decided anew which tokens stay, by what the newest "
        "`keep_window` queries paid those that they attended; 0: after each prompt alone",
    )
    keep_scores: str = one_of(
        "attended",
        ("attended", "disk"),
        "what such a decision goes by: what queries paid the tokens that they attended, or what "
        "they would have paid all tokens, for which every `keep_interval` tokens a layer's records "
        "are read twice",
    )
    keep_variance: float = real(
        0.0, 0.0, 1e6, "a token is worth its mean attention plus so many times the variance (gamma)"
    )
    keep_slack: float = real(
        0.75, 0.0, 1.0, "share of kept tokens that stay when there is no room for more (alpha)"
    )
    keep_ratio: float | None = real(
        1.0,
        0.0,
        1.0,
        "share of `keep_tokens` that stays in the model's dtype when there is no room for more; "
        "others become e4m3 and take as much less; None: what a prompt's attention says of a layer",
        optional=True,
    )
    keep_count: str = one_of(
        "bytes",
        ("bytes", "tokens"),
        "what `keep_tokens` counts where some are e4m3: the bytes of so many in the model's dtype, "
        "so that more of e4m3 fit, or tokens of either kind",
    )
    keep_temperatures: tuple[float, ...] = reals(
        (7.774380648611771, 5.407015096778621, 5.527702582901318),
        0.1,
        1e6,
        "with `keep_ratio` None: roots that are taken of a prompt's entropy, variance and kurtosis "
        "before they are multiplied (tau); the larger, the less it counts",
    )
    keep_preference: tuple[float, ...] = reals(
        (1.0, 1.0),
        0.1,
        1e6,
        "with keeper=cake: roots that are taken of how far a layer's attention is spread, and of "
        "how much it changes, before they are multiplied (tau 1, tau 2)",
    )
    keep_layer_shares: tuple[float, ...] = floats_rule(
        0.0,
        1e6,
        "what each layer on disk is worth, in any unit: of `keep_tokens` for each layer on average "
        "a layer has that part (CompressKV). Empty: all have as many",
    )
    keep_layer_least: int = number(0, 0, 1 << 20, "tokens that a layer has at least, by its share")
    keep_layer_most: float = real(
        3.0,
        1.0,
        4096.0,
        "where layers differ: times what they have on average, the newest `keep_window` included, "
        "that one may have; memory for a step is counted by it",
    )
    keep_heads: tuple[int, ...] = layers_rule(
        "query heads whose attention alone decides which tokens stay, numbered through all layers "
        "on disk: head h of layer l is l times the heads of a layer, plus h (CompressKV's semantic "
        "retrieval heads). Empty: all",
        "numbers of heads",
    )
    audit_every: int = number(
        0,
        0,
        1 << 20,
        "decoding steps between two looks of a layer at groups that were not selected, to estimate "
        "how much attention they would have had (`missed_mass` in `stats()`); 0: never",
    )
    audit_groups: int = number(
        16, 2, 4096, "groups of each chooser that such a look reads, drawn at random"
    )
    missed_mass_max: float | None = share(
        "attention that a layer may miss: by what its looks find, it attends fewer groups than "
        "`groups_max`, or more, up to `pages_max`; without `audit_every` it looks once in 32 steps",
    )
    layout: str = one_of(
        "sequence",
        ("sequence", "pools"),
        "where records stand on disk: in the order in which they are sealed; or, with clusters, "
        "their pages in pools of two clusters that grow towards each other (DynaKV 5.2), so that "
        "one read fetches a cluster, however it has grown",
    )
    projection_file: str | None = plain(
        None, "safetensors file, relative to the config; None: computed from the first prefill"
    )
    projection_kind: str = one_of(
        "query_aware",
        ("query_aware", "svd_keys", "pca_per_head", "skewed", "channels", "rope_pairs"),
        "the best bilinear form of queries and keys, the paper's SVD of the keys, or one block for "
        "each KV head: principal components of its keys (Loki), the columns that weigh most of "
        "keys and queries rotated by the queries' SVD (InfiniGen), the channels of its keys that "
        "the newest queries meet most (ThinK), or such pairs of channels that RoPE turns together, "
        "for which `rank` is even; blocks are never doubled",
    )
    model: ModelIdentity | None = plain(None, "the model it is for; None: any")
    provenance: Mapping[str, Any] = plain(dict, "how it was found: free-form, never interpreted")
    table: tuple[Solution, ...] = plain((), "one solution per (batch, context) pair")
    version: int = plain(CONFIG_VERSION, "of the file format")

    source: Path | None = field(default=None, compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        adopt_plain_values(self)
        for item in dataclasses.fields(self):
            if "check" in item.metadata:
                item.metadata["check"](item.name, getattr(self, item.name))
        if self.version != CONFIG_VERSION or type(self.version) is not int:
            raise ConfigError(
                f"version: this kvswap_torch reads version {CONFIG_VERSION}, got "
                f"{self.version!r}; write the config again with its tuner or update kvswap_torch"
            )
        check_between(self)
        check_beside("projection_file", self.projection_file)
        check_table(self.table, SOLVABLE, self._with)

    @property
    def solutions(self) -> tuple[SwapConfig, ...]:
        """Each row of the table as a config without one."""
        return tuple(map(self._with, self.table))

    def check_model(self, identity: ModelIdentity) -> None:
        """Refuses another model's config.

        Raises
        ------
        ConfigError
            Naming each thing that differs; also for a rank that the model's keys are too narrow
            for, one rank a layer for another number of layers, or a layer that it does not have.
        """
        check_model(self, identity)

    @classmethod
    def preset(cls, name: str, shape: Shape | None = None, **overrides: Any) -> SwapConfig:
        """A published system's settings, plain ones; `kvswap_torch.presets()` lists them.

        Parameters
        ----------
        shape
            What settings follow from; None: that of ``model``, or of a Llama of 8B parameters.
            ``KVSwapCache(preset=)`` knows its model, and its disk.
        overrides
            Settings in the place of the preset's; and ``model``, a `ModelIdentity`.

        Raises
        ------
        ConfigError
            Unknown, or without a part or a setting that it needs; for an override that is no
            setting, that would make another method of it, or that its method does not have.
        """
        chosen = find(name)
        if shape is None:
            shape = Shape.of(overrides.get("model"))
        settings = chosen.settings_for(shape, SETTINGS, overrides)
        try:
            return cls(**settings)
        except ConfigError as error:
            raise ConfigError(f"preset {name}: {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> SwapConfig:
        """Reads a config file.

        Raises
        ------
        ConfigError
            Missing file, corrupt JSON, unknown field or version, or a value out of range; names the
            file, the field and what came.
        """
        return config_file.load(cls, Path(path))

    def save(self, path: str | Path) -> SwapConfig:
        """Writes the config whole or not at all; equal configs give equal bytes.

        Returns
        -------
        SwapConfig
            The same config, knowing its file.
        """
        config_file.save(self, Path(path))
        return dataclasses.replace(self, source=Path(path))


SETTINGS = tuple(item.name for item in dataclasses.fields(SwapConfig) if item.name not in APART)
NOT_SOLVABLE = ("heads", "projection_file", "disk_quota_bytes", "checksum", "io_timeout_seconds",
                "wipe_on_close")  # fmt: skip
SOLVABLE = tuple(name for name in SETTINGS if name not in NOT_SOLVABLE)  # by a table's row
