"""What is predicted, and what is trusted: decided by recall first, then by time.

A config begins with verified predictions, which cost no answers: the true query selects. A layer
may be trusted only if its predictions find as much (`settings.true_query_layers`), and is only
where that takes less time than its true query; all of it is taken only where a whole step then
takes at least 5 % less (`TRUST_GAIN_MIN`). An engine trusts or verifies as a whole, so where
layers are trusted, the others select by their true query and predict nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvswap_torch.config import Prefetch
from kvswap_torch.errors import BudgetError
from kvswap_torch.tuning.layer_time import LayerTime
from kvswap_torch.tuning.settings import LOOKUPS_LOST_MAX, PREDICTION_LOSS_MAX
from kvswap_torch.tuning.solver import Grid, Solved
from kvswap_torch.tuning.work import Calibrated

TRUST_GAIN_MIN = 0.05  # of a step's time

SolveWith = Callable[[Prefetch, Callable[[int], Grid]], list[Solved]]
"""Solves every batch and context with such a prefetch."""


@dataclass(frozen=True)
class LayerAhead:
    """What is done of one layer's query, and what it came from.

    Parameters
    ----------
    way
        ``trust``, ``verify``, or ``true``: nothing is predicted.
    ms_true, ms
        Of a step, for its reads by the true query alone, and in this way.
    recall_true, recall_predicted
        Attention mass that a selection by either holds, at the layer's rank; None: not predicted.
    """

    layer: int
    way: str
    why: str
    ms_true: float
    ms: float
    recall_true: float | None
    recall_predicted: float | None


@dataclass(frozen=True)
class AheadChoice:
    """Of a config, at its largest batch and context.

    Parameters
    ----------
    step_ms
        By ``verify`` and, where it was solved, ``trust``.
    why
        A sentence on the whole.
    """

    prefetch: Prefetch
    step_ms: dict[str, float]
    why: str
    layers: tuple[LayerAhead, ...]

    @property
    def trusted(self) -> tuple[int, ...]:
        """Layers whose predicted query selects."""
        return tuple(each.layer for each in self.layers if each.way == "trust")

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dump`."""
        told = {"mode": self.prefetch.mode, "step_ms": self.step_ms, "why": self.why}
        return told | {"layers": [asdict(each) for each in self.layers]}

    def lines(self) -> list[str]:
        """To be shown: the whole, then a line for each way that layers go."""
        found: dict[tuple[str, str], list[LayerAhead]] = {}
        for each in self.layers:
            found.setdefault((each.way, each.why), []).append(each)
        return [f"look-ahead {self.prefetch.mode}: {self.why}."] + [
            f"{_WORDS[way]}: {_listed(layers)}; {why}." for (way, why), layers in found.items()
        ]


_WORDS = {"trust": "trusted", "verify": "prefetched by prediction", "true": "true query alone"}


def _listed(layers: Sequence[LayerAhead]) -> str:
    ms = sum(each.ms for each in layers), sum(each.ms_true for each in layers)
    text = f"layers {', '.join(str(each.layer) for each in layers)}"
    text += f" ({ms[0]:.2f} ms a step for reads" + (
        f", {ms[1]:.2f} without" if layers[0].way != "true" else ""
    )
    known = [each for each in layers if each.recall_predicted is not None]
    if known:
        predicted, true = (
            sum(getattr(each, name) for each in known) / len(known)
            for name in ("recall_predicted", "recall_true")
        )
        text += f"; mass held {predicted:.3f} by prediction, {true:.3f} by the true query"
    return text + ")"


def decide(
    calibrated: Calibrated, solve_with: SolveWith, grids: Callable[[int], Grid]
) -> tuple[AheadChoice, list[Solved]]:
    """Verified first, then trusted where answers stay whole and steps are clearly shorter.

    Raises
    ------
    BudgetError
        As the solvers.
    """
    verified = solve_with(Prefetch(mode="verify"), grids)
    step_ms = {"verify": 1e3 * verified[0].chosen.step_seconds}
    trusted, why = _trusted(calibrated, solve_with, verified)
    if trusted is not None:
        step_ms["trust"] = 1e3 * trusted[0].chosen.step_seconds
        if step_ms["trust"] <= (1 - TRUST_GAIN_MIN) * step_ms["verify"]:
            prefetch = trusted[0].costs.base.prefetch
            layers = _layers(calibrated, trusted[0], prefetch)
            why = (
                f"{step_ms['trust']:.2f} ms a step with trusted layers, {step_ms['verify']:.2f} "
                "with all of them verified"
            )
            return AheadChoice(prefetch, step_ms, why, layers), trusted
        why = (
            f"nothing is trusted, which would take {step_ms['trust']:.2f} ms a step and not "
            f"{step_ms['verify']:.2f}; at least {TRUST_GAIN_MIN:.0%} must be gained"
        )
    prefetch = _paying(verified, calibrated.layers)
    layers = _layers(calibrated, verified[0], prefetch)
    return AheadChoice(prefetch, step_ms, why, layers), verified


def _trusted(
    calibrated: Calibrated, solve_with: SolveWith, verified: Sequence[Solved]
) -> tuple[list[Solved] | None, str]:
    """Solved with those layers trusted that lose nothing and gain time; None with the reason."""
    unfit = set(calibrated.true_query_layers)
    if unfit >= set(range(1, calibrated.layers)):
        return None, "every layer's prediction loses answers"
    limits = {each.context: each.grid for each in verified}
    try:
        found = solve_with(_trusting(unfit), limits.__getitem__)
    except BudgetError:  # of settings that trust: there are others
        return None, "no setting that trusts predictions holds as much in this memory"
    times = _times(found[0])
    plain = _plain_times(found[0])
    idle = {i for i in range(1, calibrated.layers) if times[i].seconds >= plain[i].seconds}
    if not idle - unfit:
        return found, ""
    if unfit | idle >= set(range(1, calibrated.layers)):
        return None, "trusting a prediction makes no layer faster"
    try:
        return solve_with(_trusting(unfit | idle), limits.__getitem__), ""
    except BudgetError:
        return None, "no setting that trusts predictions holds as much in this memory"


def _trusting(without: set[int]) -> Prefetch:
    return Prefetch(mode="trust", skip_layers=tuple(sorted(without)))


def _paying(verified: Sequence[Solved], layers: int) -> Prefetch:
    """Verified where it takes less time at some batch and context; off where it does nowhere."""
    paying = {
        layer for each in verified for layer, time in enumerate(_times(each)) if time.predicts
    }
    if not paying:
        return Prefetch(mode="off")
    return Prefetch(
        mode="verify", skip_layers=tuple(i for i in range(1, layers) if i not in paying)
    )


def _times(solved: Solved) -> tuple[LayerTime, ...]:
    return solved.costs.cost(solved.chosen.setting).layers


def _plain_times(solved: Solved) -> tuple[LayerTime, ...]:
    """The same setting with true queries alone."""
    plain = solved.costs.with_prefetch(Prefetch(mode="off"))
    return plain.cost(solved.chosen.setting).layers


def _layers(calibrated: Calibrated, solved: Solved, prefetch: Prefetch) -> tuple[LayerAhead, ...]:
    times, plain = _times(solved), _plain_times(solved)
    ranks = solved.costs.levels.ranks[solved.chosen.setting.rank]
    predicted = calibrated.recall[calibrated.kind, "predicted"]
    true = calibrated.recall[calibrated.kind, "true"]
    found = []
    for layer, (time, without) in enumerate(zip(times, plain, strict=True)):
        is_ahead = prefetch.mode != "off" and layer not in (0, *prefetch.skip_layers)
        way = prefetch.mode if is_ahead else "true"
        if layer == 0:
            why = "no layer before it predicts its query"
        elif way == "trust":
            why = "its prediction finds as much and is faster"
        elif way == "verify":
            why = "what its prediction reads early costs less than waiting"
        elif prefetch.mode == "trust" and layer in calibrated.true_query_layers:
            why = (
                f"its prediction loses more than {PREDICTION_LOSS_MAX:.0%} of its recall, or with "
                f"others {LOOKUPS_LOST_MAX:.1%} of all look-ups"
            )
        else:
            why = "a prediction would cost as much time as it saves"
        is_predicted = layer > 0 and bool(ranks)
        found.append(
            LayerAhead(
                layer,
                way,
                why,
                ms_true=round(1e3 * without.seconds, 4),
                ms=round(1e3 * time.seconds, 4),
                recall_true=round(true[layer][ranks[layer]], 4) if is_predicted else None,
                recall_predicted=(
                    round(predicted[layer][ranks[layer]], 4) if is_predicted else None
                ),
            )
        )
    return tuple(found)
