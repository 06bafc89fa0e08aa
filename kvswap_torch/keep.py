"""How many tokens are attended where the others are dropped: what ``keep=`` means."""

from __future__ import annotations

import math

from kvswap_torch.config import SwapConfig
from kvswap_torch.config.nested import settings_of
from kvswap_torch.errors import ConfigError

__all__ = ["drops", "drops_for_good", "with_keep"]

RECENT = "selection.recent_tokens"
SCALED_FROM = 64  # tokens: fewer belong to what a method is (SnapKV's window, TOVA's last token)


def drops(config: SwapConfig | None) -> bool:
    """Whether what is neither sink, kept nor newest is never attended again."""
    return config is not None and config.summary.kind == "none" and config.retention is not None


def drops_for_good(config: SwapConfig | None) -> bool:
    """Whether it also never reads what it has dropped: then no disk is needed."""
    if config is None or not drops(config) or config.selection.dense_layers:
        return False
    return getattr(config.retention, "refresh_scores", "attended") == "attended"


def with_keep(config: SwapConfig, keep: float, max_context: int | None) -> SwapConfig:
    """The settings with which a layer attends `keep` tokens: sinks, kept ones and newest.

    What a method shares between kept tokens and newest ones stays shared alike.

    Parameters
    ----------
    config
        Of a method that drops tokens: no summary, and a retention policy.
    keep
        An int: tokens. A float above 0 and at most 1: a share of `max_context`.

    Raises
    ------
    ConfigError
        Another kind of method, a number out of range or too small for what must stay, or a share
        of an unknown context.
    """
    if not drops(config):
        kind = config.summary.kind
        kept = "restores all" if kind == "none" else f"reads groups by summary.kind={kind}"
        raise ConfigError(
            "keep: must come with a preset that drops tokens (snapkv, cake, arkv, h2o, tova, "
            f"streaming, window), got one that {kept}; selection.top_k_groups "
            "says how many it attends"
        )
    tokens = _tokens(keep, max_context)
    settings = settings_of(config)
    shares = {
        name: settings[name]
        for name in ("retention.tokens", RECENT)
        if settings.get(name, 0) >= SCALED_FROM
    }
    sinks = config.selection.sink_tokens
    fixed = sinks + (0 if RECENT in shares else config.selection.recent_tokens)
    least = fixed + len(shares)
    if tokens < least:
        raise ConfigError(
            f"keep: must be at least {least} tokens ({sinks} sinks, "
            f"{fixed - sinks} newest and one of what is chosen), got {keep!r}"
            + (f", {tokens} of {max_context}" if isinstance(keep, float) else "")
        )
    scaled, left = {}, tokens - fixed
    for name, share in shares.items():
        of_left = left * share // sum(shares.values())
        scaled[name] = max(1, of_left)
    name = next(iter(scaled))
    scaled[name] += left - sum(scaled.values())
    try:
        return config.with_settings(scaled)
    except ConfigError as error:
        raise ConfigError(f"keep: {keep!r} makes {tokens} tokens, but {error}") from error


def _tokens(keep: float, max_context: int | None) -> int:
    is_number = isinstance(keep, int | float) and not isinstance(keep, bool)
    if is_number and isinstance(keep, int) and keep >= 1:
        return keep
    if not is_number or isinstance(keep, int) or not 0 < keep <= 1:
        raise ConfigError(
            "keep: must be a number of tokens (an int of at least 1) or a share above 0 and at "
            f"most 1 (a float), got {keep!r}"
        )
    if max_context is None:
        raise ConfigError(
            f"keep: a share must come with max_context, of which it is one, where the model "
            f"says no max_position_embeddings, got {keep!r}; or say how many tokens"
        )
    return math.ceil(keep * max_context)
