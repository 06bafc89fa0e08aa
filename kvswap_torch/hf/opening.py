"""What a `KVSwapCache` is made of, and how one is opened by several processes together."""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING

from kvswap_torch.config import SwapConfig
from kvswap_torch.config.nested import field_of, settings_of
from kvswap_torch.errors import ConfigError
from kvswap_torch.hf.driver import SessionDriver
from kvswap_torch.hf.elsewhere import LayerElsewhere
from kvswap_torch.hf.families import ModelParts
from kvswap_torch.hf.indexed import IndexedLayer, settings_of_index
from kvswap_torch.hf.layer import DiskLayer
from kvswap_torch.hf.placement import local_config
from kvswap_torch.hf.plug_ins import PlugIns
from kvswap_torch.hf.ranks import Guard, Ranks, settings_alike
from kvswap_torch.hf.rotary import check_pairs
from kvswap_torch.hf.session import alignment_bytes, projections_of
from kvswap_torch.hf.settings import Budget, budget_of
from kvswap_torch.keep import drops, with_keep
from kvswap_torch.preset import PRESETS, find
from kvswap_torch.projection import Pair
from kvswap_torch.saved_path import text_of

if TYPE_CHECKING:
    from kvswap_torch.hf.cache import KVSwapCache


# What keeps its default without a path: what asks again for what is dropped, or promises something
# of a disk. How one is read is of no matter then.
WITHOUT_A_PATH = (
    ("selection.dense_layers", "empty", "what is dropped is gone"),
    ("retention.refresh_scores", "attended", "what is dropped is gone"),
    ("storage.simulated_device", "left out", "there is no disk"),
    ("storage.max_disk_bytes", "left out", "there is no disk"),
)


@dataclass(frozen=True)
class Wish:
    """What a cache was asked to be; the fields are `KVSwapCache`'s parameters."""

    path: str | Path | None
    config: SwapConfig | str | Path | None
    preset: str | None
    kv_memory_bytes: int | str | None
    max_context: int | None
    max_batch: int | None
    timeline_spans: int
    keep: float | None
    plug_ins: PlugIns

    def __post_init__(self) -> None:
        check_spans(self.timeline_spans)
        if not isinstance(self.config, SwapConfig | str | os.PathLike | None):
            raise ConfigError(f"config: must be a SwapConfig or a file's path, got {self.config!r}")
        if not isinstance(self.preset, str | None):
            raise ConfigError(f"preset: must be a preset's name, got {self.preset!r}")

    def granted(
        self, parts: ModelParts
    ) -> tuple[SwapConfig | None, Budget, list[Pair] | None, dict[str, Any]]:
        """This process's config, budget and projections, checked; and what all ranks must share."""
        config = self.config
        if self.preset is not None:
            if config is not None:
                raise ConfigError(
                    f"preset: must be left out with config, got both; SwapConfig.preset("
                    f"{self.preset!r}, ...) is a config with other settings"
                )
            config = self._config_of_preset(parts)
        divides = self.preset is not None and find(self.preset).divides
        if config is not None and not isinstance(config, SwapConfig):
            config = SwapConfig.load(config)
        if self.keep is not None:
            longest = getattr(parts.config, "max_position_embeddings", None)
            config = with_keep(config or SwapConfig(), self.keep, self.max_context or longest)
        config = self.plug_ins.config(config, parts)
        if parts.index_topk:
            config = settings_of_index(config, parts, self.max_context)
        _check_path(self.path, config)
        if config is not None:
            config.check_model(parts.identity)
            check_pairs(config, parts)
        budget = budget_of(self.kv_memory_bytes, self.max_context, self.max_batch)
        budget = dataclasses.replace(budget, divides=divides)
        projections = projections_of(config, parts)
        alike = {"identity": parts.identity, **settings_alike(config), **vars(budget)}
        if config is not None:
            config = local_config(config, parts.disk_everywhere, parts.placement)
        return config, budget, projections, alike

    def _config_of_preset(self, parts: ModelParts) -> SwapConfig | None:
        """For this model and this disk; the default's is what a cache does without a config."""
        if find(self.preset) is PRESETS[0]:
            return None
        shape = parts.preset_shape(alignment_bytes(self.path))
        return SwapConfig.preset(self.preset, shape=shape)


def check_spans(spans: Any) -> None:
    """Of a timeline: a number, 0 for none."""
    if not isinstance(spans, int) or spans < 0:
        raise ConfigError(f"timeline_spans: must be an integer of at least 0, got {spans!r}")


def _check_path(path: str | Path | None, config: SwapConfig | None) -> None:
    """Without a path only what drops tokens can be had, and nothing that asks for them again."""
    if path == "":
        raise ConfigError("path: must name a folder on a disk, got ''")
    if path is not None:
        text_of(path)
        return
    if not drops(config):
        config = config or SwapConfig()
        policy = "none" if config.retention is None else config.retention.POLICY
        raise ConfigError(
            "path: must be given where every token is kept (summary.kind="
            f"{config.summary.kind}, retention.policy={policy}), got None; name a folder on a "
            "disk, or take a preset that drops tokens (snapkv, cake, arkv, h2o, tova, streaming, "
            "window)"
        )
    settings = settings_of(config)
    for name, needed, why in WITHOUT_A_PATH:
        usual = field_of(name).default
        if (value := settings.get(name, usual)) != usual:
            raise ConfigError(
                f"{name}: must be {needed} without a path, since {why}, got {value!r}; name a "
                "folder on a disk"
            )


def layers_of(parts: ModelParts, driver: SessionDriver) -> list[Any]:
    """One for every layer of the model: on disk, another process's, or transformers' own."""
    layers: list[Any] = []
    for index, kind in enumerate(parts.kinds):
        if not parts.placement.has_layer(index):
            layers.append(LayerElsewhere(driver))
        elif index in parts.disk_index:
            kind_of_layer = IndexedLayer if kind == "indexed_attention" else DiskLayer
            layers.append(kind_of_layer(driver, parts.disk_index[index]))
        else:
            layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](**parts.layer_kwargs[index]))
    return layers


def open_on_all_ranks(cache: KVSwapCache, wish: Wish) -> None:
    """Opens every process's part, or none, and guards the model's forward passes."""
    ranks = Ranks()
    try:
        ranks.open_together(lambda: cache._open(wish))
    except BaseException:
        if finalizer := vars(cache).get("_finalizer"):
            finalizer()  # another rank could not open
        raise
    guard = Guard(cache, ranks)
    close = cache._finalizer.detach()[1]
    cache._finalizer = weakref.finalize(cache, _in_turn, guard.remove, close)


def _in_turn(*calls: Callable[[], object]) -> None:
    for call in calls:
        call()
