"""What follows from the settings of a `SwapConfig`."""

from __future__ import annotations

from kvswap_torch.errors import ConfigError

__all__ = ["ConfigFacts"]


class ConfigFacts:
    """Questions that a config answers; it has the fields."""

    rows: str
    keeper: str
    heads: str
    rank: int | tuple[int, ...]
    projection_kind: str
    exact_layers: tuple[int, ...]

    @property
    def takes_projections(self) -> bool:
        """Does a layer need a pair of projections before it can choose?"""
        return self.rows == "low_rank"

    def is_exact(self, layer: int) -> bool:
        """Does this layer on disk attend everything, whatever its queries are?"""
        return (self.rows == "none" and self.keeper == "none") or layer in self.exact_layers

    @property
    def doubles_estimates(self) -> bool:
        """Does a projection from the prompt get twice the columns? Blocks are published without."""
        return self.projection_kind in ("query_aware", "svd_keys")

    def row_heads(self, kv_heads: int) -> int:
        """How many of a model's KV heads choose together."""
        return 1 if self.heads == "each" else kv_heads

    def ranks(self, layers: int) -> tuple[int, ...]:
        """The rank of each of `layers` layers.

        Raises
        ------
        ConfigError
            When there is one rank a layer, for another number of layers.
        """
        if isinstance(self.rank, int):
            return (self.rank,) * layers
        if len(self.rank) != layers:
            raise ConfigError(
                f"rank: must be one number or {layers}, one for each layer on disk, got "
                f"{len(self.rank)}"
            )
        return self.rank
