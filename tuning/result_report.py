"""From a tuner's result to the numbers of its report."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

from kvswap_torch.memory_size import format_bytes
from kvswap_torch.tuning.replay import POLICIES
from kvswap_torch.tuning.report_data import Point, ReportData
from kvswap_torch.tuning.result import TuneResult
from kvswap_torch.tuning.solve import SOLVERS, Solved
from kvswap_torch.tuning.solver import Solution, solutions


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
        replacement=config.replacement,
        record_bytes=costs.need(config)["record_bytes"],
        facts=_facts(result, solved),
        warnings=[*calibrated.warnings, *result.measured.figures.warnings],
    )


def _points(result: TuneResult, solved: Solved) -> Iterator[Point]:
    """Every setting that fits, and what the solvers took."""
    taken = {name: getattr(solved, name).setting for name in SOLVERS}
    for found in solutions(solved.grid, solved.costs, result.budget_bytes):
        solvers = ", ".join(name for name, setting in taken.items() if setting == found.setting)
        yield _point(solved, found, solvers)


def _point(solved: Solved, found: Solution, solver: str) -> Point:
    cost = solved.costs.cost(found.setting)
    ranks = solved.costs.config(found.setting).ranks(solved.costs.shape.layers)
    return Point(
        setting=dataclasses.asdict(found.setting),
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
        "summary": "int8" if calibrated.summary_dtype == "int8" else "the model's dtype",
        "calibrated on": f"{calibrated.tokens_fitted:,} tokens, measured on "
        f"{calibrated.tokens_measured:,}",
        "processors": str(os.cpu_count()),
        "measured on": result.measured.date,
        "greedy solver": f"{solved.greedy_loss:.1%} slower",
    }
    if calibrated.true_query_layers:
        layers = ", ".join(map(str, calibrated.true_query_layers))
        facts["choose with their true query"] = f"layers {layers}"
    if result.evaluation is not None:
        facts["next token right"] = (
            f"{result.evaluation['accuracy']:.3f} (full cache "
            f"{result.evaluation['accuracy_full']:.3f})"
        )
    return facts
