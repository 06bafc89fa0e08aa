"""The error of a text that outgrows its first pass's settings."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from kvswap_torch.errors import BudgetError

if TYPE_CHECKING:
    from kvswap_torch.hf.driver import SessionDriver


class ExplainedGrowth:
    """A `BudgetError` of the body also says what to promise when the cache is opened.

    Parameters
    ----------
    driver
        Whose settings were perhaps chosen for a shorter text.
    layer, tokens
        That is about to get so many more positions.
    """

    def __init__(self, driver: SessionDriver, layer: int, tokens: int):
        self._driver, self._layer, self._tokens = driver, layer, tokens

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        first, budget = self._driver.first_pass, self._driver.budget
        if not isinstance(error, BudgetError) or first is None or budget.max_context is not None:
            return
        context = self._driver.positions(self._layer) + self._tokens
        divided = self._driver.redivision.context or first.context
        reason = f"the first forward pass had {first.tokens:,}"
        if divided != first.context:
            reason = "the text had outgrown what was chosen before"
        raise BudgetError(
            f"{error}. Settings were chosen for {divided:,} tokens, since {reason} "
            f"and max_context was not given. Open the cache with "
            f"max_context={context} or more, for the whole prompt and its answer; then a prompt "
            f"may be read in pieces, as with prefill_chunk_size={first.tokens}"
        ) from error
