"""A tuner's result in a terminal."""

from __future__ import annotations

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvswap_torch.memory_size import format_bytes
from kvswap_torch.tuning.result import TuneResult
from kvswap_torch.tuning.solve import Solved


def print_result(result: TuneResult, console: Console) -> None:
    """One row for each batch and context, then what holds for all of them."""
    console.print(_table(result))
    console.print(
        "rank: columns a layer on average; kept: tokens in memory per layer and sequence; ms: of a "
        "step; read: MiB per token of a sequence; MiB: in memory, 1/ of the full cache"
    )
    measured, calibrated = result.measured, result.measured.calibrated
    ranks = ", ".join(map(str, result.config.ranks(calibrated.layers)))
    summary = "int8" if calibrated.summary_dtype == "int8" else "the model's dtype"
    console.print(f"ranks by layer {ranks}; summary in {summary}")
    if calibrated.true_query_layers:
        layers = ", ".join(map(str, calibrated.true_query_layers))
        console.print(f"layers that choose with their true query: {layers}")
    figures = measured.figures
    console.print(
        f"disk: {figures.device or 'as it is'}, {figures.reader}, "
        f"{'O_DIRECT' if figures.direct else 'buffered'}, writes "
        f"{format_bytes(int(figures.write_bytes_per_s))}/s; its model is off by "
        f"{measured.disk.residual:.0%} (median)"
    )
    worse = max(each.greedy_loss for each in result.solved)
    console.print(f"the paper's greedy solver is at most {worse:.1%} slower than the best found")
    if result.evaluation is not None:
        found = result.evaluation
        console.print(
            f"next token right: {found['accuracy']:.3f}, full cache {found['accuracy_full']:.3f} "
            f"({found['tokens']} tokens of held-out questions and answers)"
        )
    for warning in (*calibrated.warnings, *figures.warnings):
        console.print(f"[yellow]{escape(warning)}")


def _table(result: TuneResult) -> Table:
    table = Table(title=f"Settings within {format_bytes(result.budget_bytes)}", box=SIMPLE)
    columns = ("batch", "context", "G", "rank", "kept", "ms", "recall", "hits", "read", "MiB", "1/")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for each in sorted(result.solved, key=lambda solved: (solved.batch, solved.context)):
        table.add_row(*_row(each))
    return table


def _row(solved: Solved) -> list[str]:
    setting, costs = solved.chosen.setting, solved.costs
    config, cost = costs.config(setting), costs.cost(setting)
    full = solved.batch * costs.shape.kv_bytes(solved.context)
    return [
        str(solved.batch),
        f"{solved.context:,}",
        str(setting.group_tokens),
        f"{sum(config.ranks(costs.shape.layers)) / costs.shape.layers:.0f}",
        str(config.pages_max * setting.group_tokens),
        f"{1e3 * cost.seconds:.1f}",
        f"{solved.chosen.recall:.3f}",
        f"{cost.hit_rate:.0%}",
        f"{cost.bytes_read / 2**20:.2f}",
        f"{solved.chosen.memory_bytes / 2**20:.1f}",
        f"{full / solved.chosen.memory_bytes:.1f}",
    ]
