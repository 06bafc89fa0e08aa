"""A layer of the model that another process has (pipeline parallel)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers.cache_utils import CacheLayerMixin

from kvswap_torch.errors import RankError

if TYPE_CHECKING:
    from kvswap_torch.hf.driver import SessionDriver


class LayerElsewhere(CacheLayerMixin):
    """Knows how long the sequences are, since all layers agree in that, and keeps nothing.

    transformers asks layer 0 for lengths and mask sizes, whichever process has it.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, driver: SessionDriver):
        # Not the base's constructor: it would set is_initialized, which is asked for here.
        self.keys = self.values = None
        self.driver = driver

    @property
    def is_initialized(self) -> bool:
        return self.get_seq_length() > 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do."""

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RankError("KVSwapCache: this layer is another rank's; its tokens came here")

    def get_seq_length(self) -> int:
        return self.driver.positions()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self.driver.max_context

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """What is done to the whole cache is done to this layer where it is."""

    crop = reset = reorder_cache = offload = prefetch = _nothing
    batch_repeat_interleave = batch_select_indices = _nothing
