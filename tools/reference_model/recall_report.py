"""A calibration in a terminal: recall by layer and rank, and what was chosen."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvswap_torch.memory_size import format_bytes
from kvswap_torch.tuning.calibration import Calibration
from kvswap_torch.tuning.recall import RecallTable
from kvswap_torch.tuning.settings import Chosen, Demand

NAMES = {"query_aware": "query-aware", "svd_keys": "SVD of the keys"}


def print_calibration(calibration: Calibration, console: Console) -> None:
    """One table for each way to choose: layers by ranks."""
    for (kind, dtype, query), table in calibration.tables.items():
        console.print(_table(f"{NAMES[kind]}, {dtype} summary, {query} query", table))
    for warning in calibration.warnings:
        console.print(f"[yellow]{escape(warning)}")


def print_chosen(chosen: Chosen, demand: Demand, full_bytes: int, console: Console) -> None:
    """The ranks with their recall, and what the memory is used for."""
    config, need = chosen.config, chosen.need
    summary = "int8" if config.summary_dtype == "int8" else "the model's dtype"
    console.print(
        f"ranks {config.rank} ({summary}), {config.groups_max} groups of {config.group_tokens} "
        f"attended, {config.pages_max} kept"
    )
    if config.true_query_layers:
        layers = ", ".join(map(str, config.true_query_layers))
        console.print(f"layers that choose with their true query: {layers}")
    console.print(f"recall by layer: {' '.join(f'{value:.3f}' for value in chosen.recall)}")
    if chosen.uniform is not None:
        rank, recall = chosen.uniform
        mean = sum(chosen.recall) / len(chosen.recall)
        console.print(f"mean recall {mean:.3f}; one rank for all layers ({rank}): {recall:.3f}")
    uses = ", ".join(f"{name} {format_bytes(need[name])}" for name in sorted(_uses(need)))
    console.print(
        f"memory for {demand.batch} x {demand.context} tokens: {format_bytes(need['total'])} of "
        f"{format_bytes(demand.budget_bytes)}, 1/{full_bytes / need['total']:.1f} of the full "
        f"cache ({uses})"
    )


def _uses(need: dict[str, int]) -> list[str]:
    return [name for name, size in need.items() if size and name not in ("total", "record_bytes")]


def _table(title: str, recall: RecallTable) -> Table:
    table = Table(title=f"Recall of attention mass: {title}")
    table.add_column("layer", justify="right")
    for rank in recall.ranks:
        table.add_column(str(rank), justify="right")
    table.add_column("best groups", justify="right")
    rows = zip(recall.recall(), recall.best(), strict=True)
    for layer, (values, best) in enumerate(rows):
        table.add_row(str(layer), *(f"{value:.3f}" for value in values.values()), f"{best:.3f}")
    return table
