"""Methods by name: ``kvswap``, ``kvswap:group=8,rank=16``, ``recent:memory=1/13``.

A name is a family and its settings. What is not said is as the model's kvswap.json has it, so that
a table varies one thing at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.quality.budget import Bytes
from bench.quality.choosing import Frame
from bench.quality.cluster_bytes import cluster_need, cluster_pages, pages_that_fit
from bench.quality.cluster_updates import UPDATES
from bench.quality.clusters import ClusterMethod, ClusterSettings
from bench.quality.emulate import Method
from bench.quality.others import Chance, Full, Oracle, Recent, Snap
from bench.quality.product import CHANGED, OWN, Product
from bench.quality.projections import BLOCKS, ESTIMATED, Projections
from bench.quality.swap import SCORES, Swap
from bench.quality.values import number, one_of, whole
from kvswap_torch.config import SwapConfig
from kvswap_torch.methods import cluster_choice
from kvswap_torch.methods.clusters import ClusterOptions
from kvswap_torch.preset import presets
from kvswap_torch.projection import Pair

SETTINGS = {
    "group": "tokens of a group; as many tokens are selected as before",
    "groups": "groups chosen (M)",
    "rank": "columns in every layer; x2 or x0.5: of what the config has; fit: as many as fit",
    "projection": "file, estimated (from the prompt), svd (the paper's), query-aware, corrected; "
    f"or estimated in blocks of one head: {', '.join(BLOCKS)}",
    "dtype": "of the summary: model, int8 or int4",
    "score": f"one of {', '.join(SCORES)}",
    "first": "columns that all groups are scored by before the best fifth is by all of them",
    "heads": "who chooses: all KV heads together, or each for itself",
    "query": "config, true (no look-ahead) or predicted (in every layer)",
    "sinks": "first tokens attended anyway",
    "tail": "newest tokens attended anyway",
    "exact": "layers that attend everything, such as 0+3",
    "question": "decoded (token by token, like the answer) or exact (as a long chunk)",
    "memory": "share of the full cache, such as 1/13: settings are lowered until they fit",
}
OF_CLUSTERS = {
    "tokens": "of a cluster, as k-means aims at; none is more than twice as large",
    "heads": "who chooses: all KV heads together, or each for itself",
    "update": "adaptive (DynaKV), static (the prompt's for good) or local (later ones apart)",
    "score": f"one of {', '.join(cluster_choice.SCORES)}",
    "order": "of a document's clusters on disk: as made, or co_read: by its last queries' choices",
    "attend": "tokens chosen at most, of each row; as many as the config's groups have",
    "groups": "pages chosen at most, instead of tokens",
    "sinks": "first tokens attended anyway",
    "tail": "newest tokens attended anyway",
    "memory": "share of the full cache, such as 1/13: pages are fewer until they fit",
}
FAMILIES = {
    "full": (),
    "oracle-tokens": ("groups",),
    "oracle-groups": ("group", "groups", "sinks", "tail"),
    "random": ("group", "groups", "sinks", "tail"),
    "recent": ("memory", "sinks"),
    "snapkv": ("memory",),
    "kvswap": tuple(SETTINGS),
    "clusters": tuple(OF_CLUSTERS),
    "product": (*OWN, *CHANGED),
}
# Each runs as the product itself, whose engine carries what a method remembers from row to row,
# sums of what tokens were paid included. Of two that are emulated here too the product is
# ``product:preset=NAME``.
AS_PRODUCT = [preset.name for preset in presets() if preset.name not in FAMILIES]
FAMILIES |= dict.fromkeys(AS_PRODUCT, FAMILIES["product"])
# The paper as published: SVD of the keys, one rank for all, no sinks, every layer looks ahead.
ALIASES = {"paper": "kvswap:projection=svd,rank=fit,dtype=model,query=predicted,sinks=0"}


@dataclass(frozen=True)
class Resolved:
    """A method for one model and document length.

    Parameters
    ----------
    frame
        How it chooses groups; None where it chooses none.
    memory_bytes
        What it keeps in memory; None where it could not be built (oracles).
    record_bytes
        Read for a group that is not in memory; 0: nothing is read.
    pages
        Groups of a layer that stay in memory.
    exact_question
        A question attends to everything, as a chunk longer than ``select_queries_max`` does.
    """

    name: str
    method: Method | Product
    frame: Frame | None = None
    memory_bytes: int | None = None
    summary_bytes: int = 0
    record_bytes: int = 0
    pages: int = 0
    exact_question: bool = False
    config: SwapConfig | None = None


def parse(name: str) -> tuple[str, dict[str, str]]:
    """Family and settings of a name.

    Raises
    ------
    ValueError
        For an unknown family or setting, naming those there are.
    """
    family, _, rest = name.partition(":")
    settings: dict[str, str] = {}
    if family in ALIASES:
        alias, settings = parse(ALIASES[family])
        return alias, settings | _settings(alias, rest, name)
    if family not in FAMILIES:
        known = ", ".join((*FAMILIES, *ALIASES))
        raise ValueError(f"methods: must be of a family {known}, got {name!r}")
    return family, _settings(family, rest, name)


def _settings(family: str, rest: str, name: str) -> dict[str, str]:
    settings = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if key not in FAMILIES[family] or not value:
            raise ValueError(
                f"methods: settings of {family} must be SETTING=VALUE with one of "
                f"{', '.join(FAMILIES[family]) or 'none'}, got {part!r} in {name!r}"
            )
        settings[key] = value
    return settings


class Resolver:
    """Builds methods for one model and document length.

    Parameters
    ----------
    config
        What settings are counted from.
    size
        Bytes for this length.
    """

    def __init__(self, config: SwapConfig, size: Bytes, projections: Projections):
        self.size, self.projections = size, projections
        self.config = dataclasses.replace(config, table=())
        self.budget = size.need(self.config)["total"]

    def resolve(self, name: str) -> Resolved:
        """The method of this name.

        Raises
        ------
        ValueError
            For a name or value that is not known.
        BudgetError
            When a share of memory is too small for any settings.
        """
        family, settings = parse(name)
        build: Mapping[str, Callable[[str, dict[str, str]], Resolved]] = {
            "full": self._full,
            "oracle-tokens": self._oracle_tokens,
            "oracle-groups": self._groups(Oracle),
            "random": self._groups(Chance),
            "recent": self._recent,
            "snapkv": self._snap,
            "kvswap": self._swap,
            "clusters": self._clusters,
            "product": self._product,
        }
        if family in build:
            return build[family](name, settings)
        return self._product(name, {"preset": family} | settings)

    def _full(self, name: str, settings: dict[str, str]) -> Resolved:
        return Resolved(name, Full(), memory_bytes=self.size.full)

    def _product(self, name: str, settings: dict[str, str]) -> Resolved:
        return Resolved(name, Product.named(name, settings, self.size))

    def _oracle_tokens(self, name: str, settings: dict[str, str]) -> Resolved:
        """As many tokens as the config's groups have, each read by itself."""
        tokens = self.config.groups_max * self.config.group_tokens
        groups = whole(settings, "groups", tokens)
        config = _sized(self.config, {"group": "1", "groups": str(groups)})
        return self._reading(name, Oracle(_frame(config)), config)

    def _groups(self, make: Callable[[Frame], Method]) -> Callable[..., Resolved]:
        def build(name: str, settings: dict[str, str]) -> Resolved:
            config = _sized(self.config, settings)
            return self._reading(name, make(_frame(config)), config)

        return build

    def _reading(self, name: str, method: Method, config: SwapConfig) -> Resolved:
        """A method that reads as KVSwap does, but whose choice needs what is not in memory."""
        record_bytes = self.size.group_bytes(config)
        return Resolved(
            name,
            method,
            _frame(config),
            record_bytes=record_bytes,
            pages=config.pages_max,
            config=config,
        )

    def _recent(self, name: str, settings: dict[str, str]) -> Resolved:
        budget = self._memory(settings)
        sinks = whole(settings, "sinks", self.config.sink_tokens)
        kept = max(self.size.kept_tokens(budget), sinks + 1)
        return Resolved(name, Recent(kept, sinks), memory_bytes=self.size.shape.kv_bytes(kept))

    def _snap(self, name: str, settings: dict[str, str]) -> Resolved:
        kept = self.size.kept_tokens(self._memory(settings))
        return Resolved(name, Snap(kept), memory_bytes=self.size.shape.kv_bytes(kept))

    def _memory(self, settings: dict[str, str]) -> int:
        return self.size.share(settings["memory"]) if "memory" in settings else self.budget

    def _swap(self, name: str, settings: dict[str, str]) -> Resolved:
        layers = self.size.shape.layers
        config = _sized(self.config, settings)
        config = dataclasses.replace(
            config,
            summary_dtype=settings.get("dtype", _dtype(config)),
            heads=settings.get("heads", config.heads),
        )
        file = "estimated" if self.config.projection_file is None else "file"
        projection = settings.get("projection", file)
        config = self._ranked(config, settings, layers)
        if projection in BLOCKS:
            config = dataclasses.replace(config, projection_kind=projection)
        if "memory" in settings:
            config = self.size.fitted(config, self.size.share(settings["memory"]))
        ranks = config.ranks(layers)
        true_query = _true_query(config, settings.get("query", "config"), layers)
        method = Swap(
            _frame(config),
            self._pairs(projection, ranks, true_query, config.heads),
            ranks,
            config.summary_dtype,
            true_query,
            settings.get("score", config.score),
            _layers(settings.get("exact", "")),
            config.projection_kind,
            config.heads,
            whole(settings, "first", 0),
            self.projections.rotary,
        )
        need = self.size.need(config)
        if settings.get("question", "decoded") not in ("decoded", "exact"):
            raise ValueError(f"question: must be decoded or exact, got {settings['question']!r}")
        return Resolved(
            name,
            method,
            _frame(config),
            need["total"],
            need["summary"],
            self.size.group_bytes(config),
            config.pages_max,
            settings.get("question") == "exact",
            config,
        )

    def _clusters(self, name: str, settings: dict[str, str]) -> Resolved:
        """Clusters of similar keys (DynaKV), with sinks, tail and buffers of the config."""
        config = _sized(self.config, {k: v for k, v in settings.items() if k in ("sinks", "tail")})
        frame = _frame(config)
        sinks = -(-frame.sink_tokens // frame.group_tokens) * frame.group_tokens
        tokens = whole(settings, "tokens", ClusterOptions.cluster_tokens)
        options = ClusterOptions(tokens, 2 * tokens, sink_tokens=sinks)
        heads = one_of(settings, "heads", ("all", "each"))
        pages = cluster_pages(self.size.shape, heads)
        attend = whole(settings, "attend", config.groups_max * config.group_tokens)
        # Of a cluster's pages one is half empty, on average.
        chosen = round(attend / pages.page_tokens + attend / (2 * tokens))
        if "groups" in settings:
            attend, chosen = self.size.context, whole(settings, "groups", chosen)
        kept = max(chosen, round(chosen * config.pages_max / config.groups_max))
        if "memory" in settings:
            budget = self.size.share(settings["memory"])
            kept = min(kept, pages_that_fit(self.size, config, options, pages, budget))
        most = min(kept, chosen) if "groups" in settings else kept
        score = one_of(settings, "score", cluster_choice.SCORES)
        update = one_of(settings, "update", UPDATES)
        order = one_of(settings, "order", ("made", "co_read"))
        need = cluster_need(self.size, config, options, pages, kept)
        return Resolved(
            name,
            ClusterMethod(
                frame,
                ClusterSettings(
                    options, heads, update, score, attend, most, pages.page_tokens, order
                ),
            ),
            memory_bytes=need["total"],
            summary_bytes=need["centroids"] + need["sizes"],
            record_bytes=pages.record_bytes * pages.rows,
            pages=kept,
            config=config,
        )

    def _pairs(
        self, kind: str, ranks: tuple[int, ...], true_query: frozenset[int], heads: str
    ) -> list[Pair] | None:
        if heads == "each" and kind not in (*ESTIMATED, "file"):
            raise ValueError(
                f"projection: must be estimated, in blocks or file with heads=each, got {kind!r}; "
                "the others are fitted to all heads together"
            )
        pairs = self.projections.pairs(kind, ranks)
        if kind != "corrected":
            return pairs
        # There is nothing to correct where nothing is predicted.
        exact = self.projections.pairs("query-aware", ranks)
        return [exact[layer] if layer in true_query else pair for layer, pair in enumerate(pairs)]

    def _ranked(self, config: SwapConfig, settings: dict[str, str], layers: int) -> SwapConfig:
        text, width = settings.get("rank", "x1"), self.size.shape.row_width(config)
        if text == "fit":
            return self.size.widest(config, self.budget)
        if not text.startswith("x"):
            return dataclasses.replace(config, rank=whole(settings, "rank", 1))
        factor = number("rank", text[1:])
        is_doubled = config.doubles_estimates and settings.get("projection") not in BLOCKS
        if factor == 1 and self.config.projection_file is None and is_doubled:
            factor = 2  # as the cache does where nobody calibrated
        ranks = tuple(max(1, min(width, round(factor * rank))) for rank in config.ranks(layers))
        return dataclasses.replace(config, rank=ranks)


def _sized(config: SwapConfig, settings: dict[str, str]) -> SwapConfig:
    """Groups, sinks and tail as asked for; pages grow with what is selected."""
    group = whole(settings, "group", config.group_tokens)
    selected = config.groups_max * config.group_tokens
    groups = whole(settings, "groups", max(1, selected // group))
    pages = max(groups, round(groups * config.pages_max / config.groups_max))
    return dataclasses.replace(
        config,
        group_tokens=group,
        groups_max=groups,
        pages_max=max(pages, config.select_queries_max),
        sink_tokens=whole(settings, "sinks", config.sink_tokens),
        tail_tokens=whole(settings, "tail", config.tail_tokens),
    )


def _frame(config: SwapConfig) -> Frame:
    return Frame(config.group_tokens, config.groups_max, config.sink_tokens, config.tail_tokens)


def _dtype(config: SwapConfig) -> str:
    return config.summary_dtype


def _true_query(config: SwapConfig, query: str, layers: int) -> frozenset[int]:
    if query == "true" or (query == "config" and not config.look_ahead):
        return frozenset(range(layers))
    if query == "config":
        return frozenset(config.true_query_layers)
    if query == "predicted":
        return frozenset()
    raise ValueError(f"query: must be config, true or predicted, got {query!r}")


def _layers(text: str) -> frozenset[int]:
    if not all(part.isdigit() for part in text.split("+") if part):
        raise ValueError(f"exact: must be layers such as 0+3, got {text!r}")
    return frozenset(int(part) for part in text.split("+") if part)
