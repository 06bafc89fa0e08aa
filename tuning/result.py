"""What the tuner found, and the files it is kept in."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvswap_torch.config import SwapConfig
from kvswap_torch.projection_file import save_projections
from kvswap_torch.tuning.costs import Levels
from kvswap_torch.tuning.pipeline import Measured, TuneOptions
from kvswap_torch.tuning.solve import Solved
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
    evaluation
        Next-token accuracy with the full cache and with this config, where it was asked for.
    """

    measured: Measured
    options: TuneOptions
    budget_bytes: int
    config: SwapConfig
    solved: list[Solved]
    levels: Levels
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
            calibrated.pairs,
            kind=calibrated.kind,
            model=calibrated.identity,
        )
        config = dataclasses.replace(
            self.config, projection_file=name, provenance=self.provenance(), source=None
        )
        return config.save(path)

    def report(self, folder: str | Path) -> Path:
        """Draws pictures and a page that shows them; the page's path.

        Raises
        ------
        ConfigError
            When matplotlib is missing; says how to install it.
        """
        from kvswap_torch.tuning.report import write_report
        from kvswap_torch.tuning.result_report import report_data

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
