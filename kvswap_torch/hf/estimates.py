"""Projections that a session asks for in a pass, since nobody calibrated any."""

from __future__ import annotations

import logging
import time

import torch

from kvswap_torch.config import SwapConfig
from kvswap_torch.config.engine import engine_value
from kvswap_torch.errors import UnsupportedModelError
from kvswap_torch.hf.session import Session
from kvswap_torch.projection import Pair, from_chunk, of_keys_alone

logger = logging.getLogger("kvswap_torch")


class Estimates:
    """Makes them, and remembers of what kind they are and how long that took.

    Thread rules: as the session's, which asks within its calls.

    Parameters
    ----------
    rotary
        How many of a head's channels the model turns by position.
    """

    def __init__(self, rotary: int) -> None:
        self._rotary = rotary
        self.kinds: dict[int, str] = {}  # layer -> what its projection was made from
        self.seconds = 0.0
        self._before: dict[int, str] = {}  # the pass under way

    def serve(self, session: Session, config: SwapConfig) -> None:
        """From now on this session asks here."""
        self._config = config
        session.set_estimate(self._estimate)

    def begin_pass(self) -> None:
        self._before = dict(self.kinds)

    def take_back(self) -> None:
        """The pass has failed."""
        self.kinds = dict(self._before)

    @property
    def source(self) -> str:
        """Where the projections come from, for a reader."""
        if not self.kinds:
            return "none needed so far"
        kinds = ", ".join(sorted(set(self.kinds.values())))
        doubled = ": rank doubled" if self._config.doubles_estimates else ""
        return f"first prefill ({kinds}, not calibrated{doubled})"

    def _estimate(
        self,
        layer: int,
        keys: torch.Tensor,
        query: torch.Tensor | None,
        valid: torch.Tensor | None,
        rank: int,
    ) -> Pair:
        """What it is given is as `from_chunk` takes it."""
        began, config = time.perf_counter(), self._config
        kind = config.summary.projection
        joined = engine_value(config, "score"), engine_value(config, "heads")
        try:
            pair = from_chunk(kind, keys, query, rank, valid, *joined, rotary=self._rotary)
        except (ValueError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
            raise UnsupportedModelError(
                f"KVSwapCache: a projection of layer {layer} must be estimated from this prompt's "
                f"keys and queries, and cannot be: {error}. Look at the layer's weights and dtype, "
                "which have made them; a summary without a projection, such as summary.kind mean, "
                "needs none of it"
            ) from error
        self.kinds[layer] = kind if query is not None else of_keys_alone(kind)
        seconds = time.perf_counter() - began
        self.seconds += seconds
        logger.info(
            "layer %d: projection (%s, rank %d) estimated from %d tokens in %.3f s",
            *(layer, self.kinds[layer], rank, keys.shape[2], seconds),
        )
        return pair
