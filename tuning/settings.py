"""What settings a calibration and a budget leave to choose from, and the memory they need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvswap_torch.config import Memory, Selection, Storage, Summary, SwapConfig
from kvswap_torch.config.engine import renamed
from kvswap_torch.errors import BudgetError
from kvswap_torch.int4_rows import int4_head_bytes
from kvswap_torch.sizing import ModelShape, Request, too_small
from kvswap_torch.tuning.calibration import Calibration
from kvswap_torch.tuning.choices import TOKENS_SHARES
from kvswap_torch.tuning.costs import SHARING
from kvswap_torch.tuning.recall import QUERIES, RANKS, Choice

Need = Callable[[SwapConfig], Mapping[str, int]]
"""Settings -> bytes by use, and their sum as "total"."""

ALIGNMENT_BYTES = 4096  # the coarsest of usual disks: elsewhere a record takes no more


@dataclass(frozen=True)
class Demand:
    """What must fit: sequences, tokens of each, and a limit in bytes."""

    context: int
    batch: int
    budget_bytes: int

    def __post_init__(self) -> None:
        if min(self.context, self.batch, self.budget_bytes) < 1:
            raise ValueError(
                "demand: context, batch and budget_bytes must be positive, got "
                f"{self.context}, {self.batch} and {self.budget_bytes}"
            )


def engine_need(model: Any, demand: Demand, alignment_bytes: int = ALIGNMENT_BYTES) -> Need:
    """`_C.memory_need` for one model and demand.

    Parameters
    ----------
    model
        A transformers model that `kvswap_torch.KVSwapCache` supports.
    alignment_bytes
        Of reads on the disk to be used.
    """
    from kvswap_torch.hf import session
    from kvswap_torch.hf.families import model_parts
    from kvswap_torch.hf.settings import Budget

    parts = model_parts(model)
    budget = Budget(demand.budget_bytes, demand.context, demand.batch)

    def need(config: SwapConfig) -> Mapping[str, int]:
        options = session.session_options(config, parts, ".", budget, calibrated=True)
        return session.memory_need(options, demand.batch, demand.context, alignment_bytes)

    return need


RECORD_WASTE_MAX = 1.5  # bytes read for each byte wanted
# What `TuneOptions.records` may be -> values of `SwapConfig.records` to try.
FORMATS = {
    "model": ("model",),
    "fp8": ("fp8",),
    "int4": ("int4",),
    "both": ("model", "fp8"),
    "all": ("model", "fp8", "int4"),
}


def record_payload(size: int, shape: ModelShape, records: str) -> int:
    """Bytes of `size` tokens' record on disk, without its padding."""
    if records == "int4":
        return shape.kv_heads * int4_head_bytes(size, shape.head_dim, shape.value_width)
    element_bytes = 1 if records == "fp8" else shape.element_bytes
    return shape.kv_heads * shape.head_width * element_bytes * size


def usable_sizes(
    sizes: Sequence[int], shape: ModelShape, alignment: int, records: str = "model"
) -> list[int]:
    """Group sizes whose records are not mostly padding."""

    def waste(size: int) -> float:
        payload = record_payload(size, shape, records)
        return -(-payload // alignment) * alignment / payload

    return [size for size in sizes if waste(size) <= RECORD_WASTE_MAX] or [max(sizes)]


def sizes_by_format(
    sizes: Sequence[int], shape: ModelShape, alignment: int, searched: str
) -> tuple[tuple[int, ...], frozenset[tuple[str, int]]]:
    """Group sizes that some format can use, rising, and (format, size) of those that it cannot."""
    usable = {each: usable_sizes(sizes, shape, alignment, each) for each in FORMATS[searched]}
    groups = tuple(sorted(set().union(*usable.values())))
    return groups, frozenset((r, g) for r in usable for g in groups if g not in usable[r])


def sharing_capacities(model: Any, layers: int, tokens: int, context: int) -> tuple[int, ...]:
    """What layers that share pages may attend, of `tokens` at most.

    Nothing on a device, where it is not measured.
    """
    if model.device.type != "cpu" or layers <= SHARING:
        return ()
    attended = {int(share * tokens) for share in TOKENS_SHARES}
    return tuple(sorted(each for each in attended if each < context))


def check_budget(
    model: Any,
    context_max: int,
    batch_max: int,
    budget_bytes: int,
    path: Path,
    choice: Choice,
    sizes: Sequence[int],
    searched: str = "model",
) -> None:
    """Refuses, before anything is measured, a budget that no settings of the tuner's fit in.

    Raises
    ------
    BudgetError
        Names the minimum, what it is made of and what to lower.
    """
    from kvswap_torch.hf.families import model_parts
    from kvswap_torch.hf.session import alignment_bytes

    parts = model_parts(model)
    shape = parts.shape
    alignment = alignment_bytes(path)
    request = Request(budget_bytes, context_max, batch_max)
    need = engine_need(model, Demand(context_max, batch_max, budget_bytes), alignment)
    tokens = int(choice.group_tokens * choice.groups_max * min(TOKENS_SHARES))
    smallest = [
        SwapConfig(
            summary=Summary(
                rank=min(RANKS[0], shape.width),
                dtype="int4" if parts.device.type == "cpu" else "int8",
            ),
            selection=Selection(
                group_tokens=size,
                top_k_groups=max(1, tokens // size),
                score=renamed("score", choice.score)[1],
                sink_tokens=choice.sink_tokens,
                recent_tokens=choice.tail_tokens,
            ),
            memory=Memory(
                pages_per_layer=max(tokens // size, Selection().max_step_tokens),
                resident_layers=resident,
            ),
            storage=Storage(kv_dtype=renamed("records", records)[1]),
        )
        for resident in (None, SHARING)
        for records in FORMATS[searched]
        for size in usable_sizes(sizes, shape, alignment, records)
    ]
    least = min(smallest, key=lambda config: need(config)["total"])
    if need(least)["total"] > budget_bytes:
        raise BudgetError(too_small(request, need(least), least))


PREDICTION_LOSS_MAX = 0.03  # share of a layer's recall; where more is lost it is never trusted
LOOKUPS_LOST_MAX = 0.005  # share of all layers' look-ups that predictions may lose together


def true_query_layers(calibration: Calibration) -> tuple[int, ...]:
    """Layers that must select with their true query: their predictions lose answers.

    Those that lose much of their own recall; and, of the others, those that lose most look-ups,
    until what all predicted layers lose together is little: on a real model (docs/tuning.md) three
    of 30 layers with their own queries, of those that retrieve, bring back what prediction costs.
    """
    predicted, true = (calibration.tables[calibration.kind, "model", q] for q in QUERIES)
    alone = {
        layer
        for layer, (guess, known) in enumerate(zip(predicted.worth(), true.worth(), strict=True))
        if max(guess.values()) < (1 - PREDICTION_LOSS_MAX) * max(known.values())
    }
    lost = {
        layer: max(0.0, known - guess)
        for layer, (guess, known) in enumerate(
            zip(predicted.found_by_few(), true.found_by_few(), strict=True)
        )
        if layer not in alone
    }
    spent = 0.0
    for layer in sorted(lost, key=lambda each: (lost[each], each)):
        spent += lost[layer]
        if spent > LOOKUPS_LOST_MAX:
            alone.add(layer)
    return tuple(sorted(alone))


def prediction_losses(calibration: Calibration) -> list[dict[int, float]]:
    """For each layer, rank -> worth that is lost where the predicted query selects; at least 0."""
    predicted, true = (calibration.tables[calibration.kind, "model", q].worth() for q in QUERIES)
    return [
        {rank: max(0.0, value - guess[rank]) for rank, value in known.items()}
        for guess, known in zip(predicted, true, strict=True)
    ]
