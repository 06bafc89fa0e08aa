"""A budget that is divided anew, when a text outgrows what it was divided for."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvswap_torch.config import SwapConfig
from kvswap_torch.config.nested import settings_of
from kvswap_torch.errors import BudgetError
from kvswap_torch.hf.settings import FirstPass, settle
from kvswap_torch.sizing import effective_ranks

if TYPE_CHECKING:
    from kvswap_torch.hf.driver import SessionDriver

logger = logging.getLogger("kvswap_torch")

CONTEXT_MAX = 2**31 - 1  # positions are of 32 bits in the session
STEPS = 8  # between the context that is needed and the one to be ready for
TOKENS_WON = 64  # that a division makes room for at least: it reads all records again
DIVISIONS_MAX = 48  # each adds a file to those that a session stands on, of which 64 are the most
#: Counters that are sums; those of single layers begin with ``prefetch_``.
SUMS = (
    *("steps", "sequences", "groups_attended", "groups_loaded", "groups_read_again"),
    *("groups_prefetched", "records_sealed", "select_seconds", "plan_seconds", "attend_seconds"),
    *("append_seconds", "bytes_read", "bytes_read_payload", "bytes_read_gaps", "records_read"),
    *("records_reread", "reads", "read_retries", "read_calls", "wait_seconds", "hidden_seconds"),
    *("bytes_written", "write_blocked_seconds"),
)


class Redivision:
    """Divides a driver's budget anew, before a pass that what it was divided for does not cover.

    With a budget and no `max_context` the settings are those of a text half as long again as the
    first forward pass. A longer one has less memory for each token: fewer columns and pages, rows
    of fewer bits. The session then goes on with the settings that such a text would have begun
    with: its records stay, its summaries are made again from them.

    Not done where more than that depends on the settings (tokens that are retained, clusters, a
    plug-in, an index of the model's own), on a device, nor by a part of a model that several
    processes run: there a pass that does not fit is refused, see `ExplainedGrowth`.

    Parameters
    ----------
    driver
        Whose budget it is.

    Attributes
    ----------
    context
        Tokens that the budget is divided for now; None: for none that is known.
    count
        How often it was divided anew since the text began.
    """

    def __init__(self, driver: SessionDriver):
        self._driver = driver
        self.forget()

    def forget(self) -> None:
        """There is no text."""
        self.begin(None)

    def begin(self, context: int | None) -> None:
        """A session was opened with settings for so many tokens; None: that is not known."""
        self.context, self.count = context, 0
        self._enough: tuple[int, int] | None = None  # sequences, and tokens that settings serve
        self._sums: dict[str, float] = {}  # of sessions before
        self._peak = 0
        self._files = 0  # that divisions have added, of this cache and of what it is a fork of
        self._left_out = 0 if context is None else self._predictor_bytes  # of the session's budget

    def follow(self, other: Redivision) -> None:
        """The session is a fork of that one's."""
        self.begin(other.context)
        self._files, self._left_out = other._files, other._left_out

    # What sessions before have counted.

    def counters(self) -> dict[str, float]:
        """The session's own, and what was counted before."""
        counters = dict(self._driver.session.counters())
        for name, value in self._sums.items():
            counters[name] = counters.get(name, 0) + value
        return counters

    def ledger(self) -> dict[str, int]:
        """The session's, with the highest peak of all."""
        ledger = dict(self._driver.session.ledger())
        return ledger | {"peak": max(ledger["peak"], self._peak)}

    # A pass.

    def is_outgrown(self, batch: int, tokens: int) -> bool:
        """Whether a pass must come to `make_room` first: each sequence will have so many tokens."""
        return self.context is not None and self._is_possible and tokens > self._limit(batch)

    def make_room(self, batch: int, tokens: int) -> None:
        """Before a pass for which the settings are outgrown: divides the budget anew.

        Raises
        ------
        BudgetError
            No division covers it; names what would. The cache is as before.
        KVSwapError
            The disk failed: the division is the old one. Where it can be had no more either, each
            use of the session tries to have it, and raises what it meets.
        """
        driver = self._driver
        try:
            config, context = self._plan(batch, tokens)
            if config != driver.config or self._freed:
                self._divide(config, FirstPass(batch, tokens, context))
        except BudgetError as error:
            if self._freed:
                with contextlib.suppress(BudgetError):
                    self._divide(driver.config, FirstPass(batch, tokens, tokens))
            if not self._fits(batch, tokens):
                raise self._refusal(error) from error
            self._enough = batch, self._longest(batch)  # there is room for a few tokens yet
            return
        self.context, self._enough = context, None

    @property
    def _is_possible(self) -> bool:
        driver = self._driver
        config, parts = driver.config, driver.parts
        return (
            driver.path is not None
            and config.takes_projections
            and config.retention is None
            and config.clusters is None
            and config.storage.max_disk_bytes is None  # of one file, and a division begins another
            and driver.plug_ins.are_none
            and not parts.index_topk
            and not parts.placement.is_shared
            and parts.device.type == "cpu"
        )

    def _limit(self, batch: int) -> int:
        """Tokens that the settings serve.

        What is divided by its own worth is so for one context; what a user has asked for stays as
        long as it fits.
        """
        if self._enough is None or self._enough[0] != batch:
            driver = self._driver
            divides = driver.given is None or driver.budget.divides
            most = self.context or 0 if divides else CONTEXT_MAX
            fits = self._fits(batch, most)
            self._enough = batch, most if fits else self._longest(batch)
        return self._enough[1]

    def _fits(self, batch: int, tokens: int) -> bool:
        """Whether the session has memory for so many tokens, with the settings that it has."""
        driver = self._driver
        taken = driver.need(driver.config, batch, tokens)["total"] + self._freed
        return taken <= driver.budget.kv_memory_bytes

    @property
    def _predictor_bytes(self) -> int:
        driver = self._driver
        return driver.need.beside(driver.config, 1, 1)["predictor"]

    @property
    def _freed(self) -> int:
        """Bytes that a plan has taken from predictors, and the session does not have yet."""
        return self._left_out - self._predictor_bytes

    def _longest(self, batch: int) -> int:
        """Tokens that there is room for with the present settings; 0: for none."""
        low, high = 0, CONTEXT_MAX
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits(batch, middle):
                low = middle
            else:
                high = middle - 1
        return low

    def _plan(self, batch: int, tokens: int) -> tuple[SwapConfig, int]:
        """Settings, and the context that they are for: half as long again, or what there is.

        Raises
        ------
        BudgetError
            No division makes room for `TOKENS_WON`, or for the rest of what the model was made for.
        """
        longest = getattr(self._driver.parts.config, "max_position_embeddings", None)
        longest = longest if longest and longest >= tokens else None  # once passed it is no bound
        most = FirstPass(batch, tokens, longest).context
        least = min(most, tokens + TOKENS_WON)
        steps = (tokens + (most - tokens) * step // STEPS for step in range(STEPS, 0, -1))
        contexts = [context for context in dict.fromkeys(steps) if context >= least]

        def planned() -> tuple[SwapConfig, int]:
            for context in contexts:
                with contextlib.suppress(BudgetError):
                    return self._settled(FirstPass(batch, tokens, context)), context
            return self._near_the_end(FirstPass(batch, tokens, least), contexts[-1])

        return self._driver.need.search(planned)

    def _near_the_end(self, least: FirstPass, too_many: int) -> tuple[SwapConfig, int]:
        """Of what lies between the two, the most that fits: then nothing is divided again."""
        low, found = least.context, self._settled(least)
        while too_many - low > TOKENS_WON:
            middle = (low + too_many) // 2
            try:
                found = self._settled(FirstPass(least.batch, least.tokens, middle))
                low = middle
            except BudgetError:
                too_many = middle
        return found, low

    def _settled(self, text: FirstPass) -> SwapConfig:
        driver = self._driver
        shape, calibrated = driver.parts.shape, driver.is_calibrated

        def settled(rank_max: int | tuple[int, ...] | None = None) -> SwapConfig:
            known = (driver.given, shape, driver.budget, driver.need, text)
            return settle(*known, rank_max=rank_max, began=driver.first_pass)

        config = settled()
        ranks = effective_ranks(config, shape, calibrated)
        has_projections = calibrated or bool(driver.estimates.kinds)
        if has_projections and any(a > b for a, b in zip(ranks, driver.ranks, strict=True)):
            return settled(driver.config.summary.rank)
        return config

    def _divide(self, config: SwapConfig, text: FirstPass) -> None:
        driver, began = self._driver, time.perf_counter()
        if self._files >= DIVISIONS_MAX:
            raise BudgetError(
                f"kv_memory_bytes: must be divided anew at most {DIVISIONS_MAX} times for one text "
                f"and its forks, which {text.tokens:,} tokens would exceed"
            )
        sums = {name: n for name, n in self.counters().items() if _is_sum(name)}
        peak, before = self.ledger()["peak"], driver.config
        driver.divide(config, text)
        self._sums, self._peak = sums, peak
        self.count += 1
        self._files += 1
        self._left_out = self._predictor_bytes
        logger.warning(
            "KVSwapCache: kv_memory_bytes was divided anew, for %s tokens, in %.2f s, since the "
            "text has outgrown %s: %s; open the cache with max_context to have it divided once",
            *(f"{text.context:,}", time.perf_counter() - began, f"{self.context:,}"),
            _changes(before, config) or "predictors take less",
        )

    def _refusal(self, error: BudgetError) -> BudgetError:
        least = str(error).partition(". ")[0]
        return BudgetError(
            f"{least}; the {self._driver.positions():,} tokens that the cache holds stay as they "
            "are: answer from them, crop() or reset() it, or open one with more memory"
        )


def _is_sum(name: str) -> bool:
    return name in SUMS or name.startswith("prefetch_")


def _changes(before: SwapConfig, after: SwapConfig) -> str:
    old: Mapping[str, object] = settings_of(before)
    new = settings_of(after)
    return ", ".join(
        f"{name} {old.get(name)} to {value}"
        for name, value in new.items()
        if old.get(name) != value
    )
