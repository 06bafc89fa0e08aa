"""Updates of a cache come from forward passes of its own model alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvswap_torch.cache_argument import cache_argument
from kvswap_torch.hf.layer import from_elsewhere

if TYPE_CHECKING:
    from kvswap_torch.hf.cache import KVSwapCache


class OwnPasses:
    """The part of `KVSwapCache` that attention modules call.

    Layers in memory would take another model's tensors, and nobody could take them back.
    """

    def as_argument(self: KVSwapCache) -> dict[str, Any]:
        """The cache by the name that the installed transformers gives it, for a call of the model.

        ``model.generate(**inputs, **cache.as_argument())`` passes it as ``past_key_values``, and
        as ``cache`` since transformers 5.24, which warns of the older name.
        """
        return cache_argument(self.parts.outermost, self)

    @property
    def is_in_pass(self: KVSwapCache) -> bool:
        """Whether a forward pass with it has begun and neither returned nor raised."""
        return self._pass is not None and self._pass.is_running()

    def update(self: KVSwapCache, *args: Any, **kwargs: Any) -> Any:
        """Raises ValueError outside of a forward pass of the cache's model."""
        _check(self)
        return super().update(*args, **kwargs)

    def update_conv_state(self: KVSwapCache, *args: Any, **kwargs: Any) -> Any:
        """As `update`."""
        _check(self)
        return super().update_conv_state(*args, **kwargs)

    def update_recurrent_state(self: KVSwapCache, *args: Any, **kwargs: Any) -> Any:
        """As `update`."""
        _check(self)
        return super().update_recurrent_state(*args, **kwargs)


def _check(cache: KVSwapCache) -> None:
    cache.driver.check_open()
    if not cache.is_in_pass:
        raise ValueError(from_elsewhere(cache.parts))
