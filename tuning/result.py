"""What the tuner found, the files it is kept in, and what a terminal and a report show of it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvswap_torch.config import SwapConfig
from kvswap_torch.config.engine import engine_value
from kvswap_torch.memory_size import format_bytes
from kvswap_torch.projection_file import save_projections
from kvswap_torch.tuning.ahead import AheadChoice
from kvswap_torch.tuning.costs import Levels
from kvswap_torch.tuning.pipeline import Measured, TuneOptions
from kvswap_torch.tuning.points import Point, ReportData
from kvswap_torch.tuning.solver import SOLVERS, Solution, Solved, best_of_formats, solutions
from kvswap_torch.tuning.traffic import POLICIES
from kvswap_torch.version import __version__


@dataclass(frozen=True)
class TuneResult:
    """Settings for a model, a disk and a memory limit.

    Parameters
    ----------
    config
        Complete but for the projection file, which `save` writes beside it.
    solved
        What both solvers found for each batch and context, the largest first.
    ahead
        What is predicted, what is trusted, and why.
    evaluation
        Next-token accuracy with the full cache and with this config, where it was asked for.
    """

    measured: Measured
    options: TuneOptions
    budget_bytes: int
    config: SwapConfig
    solved: list[Solved]
    levels: Levels
    ahead: AheadChoice
    evaluation: dict[str, float] | None = None

    def save(self, path: str | Path) -> SwapConfig:
        """Writes the config, and the projections beside it under the config's name.

        Equal measurements and limits give equal bytes.

        Returns
        -------
        SwapConfig
            The config, knowing its file; `KVSwapCache` takes it, or the path.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        name = f"{path.stem}.projection.safetensors"
        calibrated = self.measured.calibrated
        save_projections(
            path.parent / name,
            calibrated.pairs_for(self.config),
            kind=calibrated.kind,
            model=calibrated.identity,
        )
        config = self.config.with_settings({"summary.projection_file": name})
        config = dataclasses.replace(config, provenance=self.provenance(), source=None)
        return config.save(path)

    def report(self, folder: str | Path) -> Path:
        """Draws pictures and a page that shows them; the page's path.

        Raises
        ------
        ImportError
            When matplotlib is missing; says how to install it.
        """
        from kvswap_torch.tuning.report import write_report

        return write_report(report_data(self), folder)

    def provenance(self) -> dict[str, Any]:
        """How the config was found."""
        measured, calibrated = self.measured, self.measured.calibrated
        figures = measured.figures
        told: dict[str, Any] = {
            "tool": f"kvswap_torch {__version__} tuner",
            "date": measured.date,
            "budget_bytes": self.budget_bytes,
            "solver": self.options.solver,
            "disk": {
                "device": figures.device or "the disk as it is",
                "reader": figures.reader,
                "direct": figures.direct,
                "alignment_bytes": figures.alignment_bytes,
                "write_bytes_per_s": figures.write_bytes_per_s,
                "model": measured.disk.to_json(),
            },
            "tokens_fitted": calibrated.tokens_fitted,
            "tokens_measured": calibrated.tokens_measured,
            "look_ahead": self.ahead.to_json(),
            "solutions": [_told(each) for each in self.solved],
            "warnings": [*calibrated.warnings, *figures.warnings],
        }
        if self.evaluation is not None:
            told["evaluation"] = self.evaluation
        return told


def _told(solved: Solved) -> dict[str, Any]:
    cost = solved.costs.cost(solved.chosen.setting)
    return {
        "batch": solved.batch,
        "context": solved.context,
        "ms_per_token": round(1e3 * cost.seconds, 3),
        "recall": round(solved.chosen.recall, 4),
        "hit_rate": round(cost.hit_rate, 4),
        "bytes_read_per_token": round(cost.bytes_read),
        "memory_bytes": solved.chosen.memory_bytes,
        "greedy_slower_by": round(solved.greedy_loss, 4),
    }


def _greedy_words(loss: float) -> str:
    """The paper's solver beside the exhaustive one: slower, faster, or as fast to a permille."""
    share = f"{abs(loss):.1%}"
    if share == "0.0%":
        return "as fast as the exhaustive one"
    return f"{share} {'slower' if loss > 0 else 'faster'} than the exhaustive one"


def print_result(result: TuneResult, console: Console) -> None:
    """One row for each batch and context, then what holds for all of them."""
    console.print(_table(result))
    console.print(
        "rank: columns a layer on average; kept: tokens in memory per layer and sequence; ms: of a "
        "step; read: MiB per token of a sequence; MiB: in memory, 1/ of the full cache"
    )
    for line in _formats(result):
        console.print(line)
    measured, calibrated = result.measured, result.measured.calibrated
    ranks = ", ".join(map(str, result.config.ranks(calibrated.layers)))
    summary = calibrated.summary_words
    console.print(f"ranks by layer {ranks}; summary in {summary}")
    for line in result.ahead.lines():
        console.print(line)
    figures = measured.figures
    console.print(
        f"disk: {figures.device or 'as it is'}, {figures.reader}, "
        f"{'O_DIRECT' if figures.direct else 'buffered'}, writes "
        f"{format_bytes(int(figures.write_bytes_per_s))}/s; its model is off by "
        f"{measured.disk.residual:.0%} (median)"
    )
    worst = max(each.greedy_loss for each in result.solved)
    console.print(f"the paper's greedy solver, at worst: {_greedy_words(worst)}")
    if result.evaluation is not None:
        found = result.evaluation
        console.print(
            f"next token right: {found['accuracy']:.3f}, full cache {found['accuracy_full']:.3f} "
            f"({found['tokens']} tokens of held-out questions and answers)"
        )
    for warning in (*calibrated.warnings, *figures.warnings):
        console.print(f"[yellow]{escape(warning)}")


def _formats(result: TuneResult) -> Iterator[str]:
    """What each format of records would give, where several were tried."""
    solved = result.solved[0]
    if len(solved.grid.records) == 1:
        return
    found = best_of_formats(solved.grid, solved.costs, result.budget_bytes)
    for records, best in found.items():
        cost = solved.costs.cost(best.setting)
        yield (
            f"records {records}, batch {solved.batch}, context {solved.context:,}: "
            f"{1e3 * best.step_seconds:.1f} ms a step, {cost.bytes_read / 2**20:.2f} MiB read, "
            f"{best.memory_bytes / 2**20:.1f} MiB in memory, G {best.setting.group_tokens}"
        )


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
        str(config.memory.pages_per_layer * setting.group_tokens),
        f"{1e3 * cost.seconds:.1f}",
        f"{solved.chosen.recall:.3f}",
        f"{cost.hit_rate:.0%}",
        f"{cost.bytes_read / 2**20:.2f}",
        f"{solved.chosen.memory_bytes / 2**20:.1f}",
        f"{full / solved.chosen.memory_bytes:.1f}",
    ]


def report_data(result: TuneResult) -> ReportData:
    """The largest batch and context of a result, as a report shows it."""
    solved = result.solved[0]
    calibrated, costs = result.measured.calibrated, solved.costs
    config = costs.config(solved.chosen.setting)
    choices = calibrated.choices
    group = solved.chosen.setting.group_tokens
    return ReportData(
        disk=result.measured.figures,
        disk_model=result.measured.disk,
        energy=calibrated.energy,
        recall=dict(enumerate(choices.recall[group])),
        recall_best=dict(enumerate(choices.best[group])),
        reuse=_reuse(solved),
        points=list(_points(result, solved)),
        budget_bytes=result.budget_bytes,
        ranks=list(config.ranks(calibrated.layers)),
        replacement=engine_value(config, "replacement"),
        record_bytes=costs.need(config)["record_bytes"],
        facts=_facts(result, solved),
        warnings=[*calibrated.warnings, *result.measured.figures.warnings],
    )


def _points(result: TuneResult, solved: Solved) -> Iterator[Point]:
    """Every setting that fits, and what the solvers took."""
    by_name = {name: getattr(solved, name) for name in SOLVERS}
    taken = {name: found.setting for name, found in by_name.items() if found is not None}
    for found in solutions(solved.grid, solved.costs, result.budget_bytes):
        solvers = ", ".join(name for name, setting in taken.items() if setting == found.setting)
        yield _point(solved, found, solvers)


def _point(solved: Solved, found: Solution, solver: str) -> Point:
    cost = solved.costs.cost(found.setting)
    setting = dataclasses.asdict(found.setting)
    records, shares_pages = setting.pop("records"), setting.pop("shares_pages")
    ranks = solved.costs.config(found.setting).ranks(solved.costs.shape.layers)
    return Point(
        setting=setting,
        records=records,
        shares_pages=shares_pages,
        rank_total=sum(ranks),
        recall=found.recall,
        bytes_per_token=cost.bytes_read,
        seconds_per_token=cost.seconds,
        parts=cost.parts,
        memory_bytes=found.memory_bytes,
        chosen=found.setting == solved.chosen.setting,
        solver=solver,
    )


def _reuse(solved: Solved) -> dict[str, dict[int, float]]:
    """Policy -> tokens kept -> hit rate, for the chosen group size."""
    costs, group = solved.costs, solved.chosen.setting.group_tokens
    tokens = costs.traffic.choices.tokens
    table: dict[str, dict[int, float]] = {}
    for policy in POLICIES:
        table[policy] = {}
        for capacity in solved.grid.capacities:
            if tokens <= capacity < solved.context or capacity == tokens:
                traffic = costs.traffic.reuse(group, capacity // group, policy, solved.context)
                rates = [each.hit_rate for each in traffic]
                table[policy][capacity] = sum(rates) / len(rates)
    return table


def _facts(result: TuneResult, solved: Solved) -> dict[str, str]:
    calibrated, shape = result.measured.calibrated, result.measured.shape
    full = solved.batch * shape.kv_bytes(solved.context)
    facts = {
        "model": f"{calibrated.identity.model_type}, {shape.layers} layers on disk, "
        f"{shape.kv_heads} KV heads x {shape.head_dim}",
        "for": f"batch {solved.batch}, context {solved.context:,}",
        "full cache": format_bytes(full),
        "summary": calibrated.summary_words,
        "calibrated on": f"{calibrated.tokens_fitted:,} tokens, measured on "
        f"{calibrated.tokens_measured:,}",
        "processors": str(os.cpu_count()),
        "measured on": result.measured.date,
        "greedy solver": _greedy_words(solved.greedy_loss),
    }
    facts["look-ahead"] = " ".join(result.ahead.lines())
    if result.evaluation is not None:
        facts["next token right"] = (
            f"{result.evaluation['accuracy']:.3f} (full cache "
            f"{result.evaluation['accuracy_full']:.3f})"
        )
    return facts
