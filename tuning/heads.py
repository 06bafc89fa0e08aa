"""CompressKV's heads file: which query heads find what is asked for, and what layers lose.

Both from text with facts and questions for them (`search_samples`). Rules: CompressKV (arXiv
2508.02401), 3.2 and 3.3, and its code. There the model writes its answers; here they are given, and
count where the model would have written them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from kvswap_torch.config import ModelIdentity, SwapConfig
from kvswap_torch.errors import ConfigError
from kvswap_torch.heads_file import HEADS, read_heads
from kvswap_torch.tuning.calibration import read_samples
from kvswap_torch.tuning.observe import Calibrator, Observed, attention_weights
from kvswap_torch.tuning.progress import Progress
from kvswap_torch.tuning.searches import Search, SearchSample

WINDOW = 8  # last queries before an answer, which say what stays; their tokens stay too
KEPT = 24  # tokens beside those: the budget of 32 that CompressKV's code finds errors with
POOL = 5  # neighbours whose average is a token's score
SMALL = 1e-5  # added to what an error is relative to


@dataclasses.dataclass(frozen=True)
class HeadsFound:
    """What `kvswap_torch.heads_file.read_heads` reads, and how it was found.

    Parameters
    ----------
    heads
        Of each layer on disk its query heads, the best first.
    layers
        What each loses where few tokens stay; their sum is 1.
    asked, answered
        Questions, and those that the model answered, which alone count.
    """

    heads: list[list[int]]
    layers: list[float]
    asked: int
    answered: int

    def save(self, path: Path, model: ModelIdentity) -> None:
        """Writes the file, for a model."""
        told = {"model": dataclasses.asdict(model), "query_heads": len(self.heads[0])}
        path.write_text(json.dumps(told | dataclasses.asdict(self)) + "\n", encoding="utf-8")


def find_heads(
    model: Any, samples: Sequence[SearchSample], progress: Progress | None = None
) -> HeadsFound:
    """Reads all samples twice.

    Parameters
    ----------
    model
        A causal language model of transformers, on the CPU, that `kvswap_torch.KVSwapCache`
        supports.
    samples
        At least one.

    Raises
    ------
    ConfigError
        No samples, fewer query heads than are to choose, or not one question that is answered.
    UnsupportedModelError
        When the model's cache cannot live on disk.
    """
    calibrator = Calibrator(model)
    unembed = model.get_output_embeddings()
    if unembed is None or not samples:
        raise ConfigError(
            f"heads: {type(model).__name__} must be a causal language model, and samples must be "
            f"at least one, got {len(samples)}"
        )
    worth = torch.zeros(calibrator.parts.shape.layers, calibrator.parts.identity.heads)
    if worth.shape[1] < HEADS:
        raise ConfigError(f"heads: the model must have {HEADS} query heads, has {worth.shape[1]}")
    answered: list[SearchSample] = []
    for number, sample in enumerate(samples):
        if progress is not None:
            progress("finding heads", number, len(samples))
        masses: dict[int, torch.Tensor] = {}

        def weigh(seen: Observed, sample=sample, masses=masses) -> None:
            masses[seen.layer] = fact_masses(seen, sample)

        hidden = calibrator.read(sample, weigh)
        said = unembed(hidden[0, _before(sample)]).argmax(-1)
        answered.append(answered_of(sample, said))
        counts = counts_of(sample, said, answered[-1].searches)
        for layer, mass in masses.items():
            worth[layer] += mass @ counts
    asked, count = (sum(len(each.searches) for each in some) for some in (samples, answered))
    if not worth.any():
        raise ConfigError(
            f"heads: the model must answer some of {asked} questions about facts in a text, and "
            "answers none in their words; a larger model does, or one that reads this text "
            "(--calibration)"
        )
    order = worth.argsort(dim=1, descending=True, stable=True)
    losses = torch.zeros(len(order), dtype=torch.float64)

    def lose(seen: Observed, sample: SearchSample) -> None:
        for search in sample.searches:
            losses[seen.layer] += lost(seen, search, order[seen.layer, :HEADS])

    counting = [sample for sample in answered if sample.searches]
    read_samples(calibrator, counting, lose, "finding what layers lose", progress)
    return HeadsFound(order.tolist(), (losses / losses.sum()).tolist(), asked, count)


def _before(sample: SearchSample) -> torch.Tensor:
    """``[steps]``: places whose tokens are followed by one of an answer."""
    ranges = [torch.arange(each.answer_begin, each.answer_end) for each in sample.searches]
    return torch.cat(ranges) - 1


def _search_of(sample: SearchSample) -> list[Search]:
    """Of each of `_before`."""
    return [each for each in sample.searches for _ in range(each.answer_end - each.answer_begin)]


def answered_of(sample: SearchSample, said: torch.Tensor) -> SearchSample:
    """With the searches alone of whose answers more than half of the tokens are `said`."""
    right = (said == sample.ids[_before(sample) + 1]).split(
        [each.answer_end - each.answer_begin for each in sample.searches]
    )
    searches = zip(sample.searches, right, strict=True)
    found = tuple(each for each, its in searches if its.float().mean() > 0.5)
    return dataclasses.replace(sample, searches=found)


def counts_of(sample: SearchSample, said: torch.Tensor, answered: Sequence[Search]) -> torch.Tensor:
    """``[steps]``: how often the fact has the token that is said, and right; 0 if unanswered."""
    following = sample.ids[_before(sample) + 1]
    counts = [
        float((sample.ids[each.fact_begin : each.fact_end] == token).sum())
        if token == right and each in answered
        else 0.0
        for each, token, right in zip(_search_of(sample), said, following, strict=True)
    ]
    return torch.tensor(counts)


def fact_masses(seen: Observed, sample: SearchSample) -> torch.Tensor:
    """``[heads, steps]``: what each step's query pays the fact that is asked for (3.2)."""
    rows = _before(sample)
    columns = torch.arange(len(sample.ids))
    begins, ends = (
        torch.tensor([getattr(each, name) for each in _search_of(sample)])[:, None]
        for name in ("fact_begin", "fact_end")
    )
    weights = _weights(seen, _scores(seen, rows), columns > rows[:, None])
    return (weights * ((columns >= begins) & (columns < ends))).sum(-1)


def lost(seen: Observed, search: Search, heads: torch.Tensor) -> float:
    """How far a layer's outputs are from themselves with few tokens kept, over an answer (3.3).

    Relative Frobenius norms, of all heads' outputs before they are projected.
    """
    begin = max(0, search.answer_begin - WINDOW)
    columns = torch.arange(seen.keys.shape[2])
    window = torch.arange(begin, search.answer_begin)
    paid = _weights(seen, _scores(seen, window), columns > window[:, None])
    paid = paid[heads, :, :begin].sum((0, 1))
    pooled = functional.avg_pool1d(paid[None], POOL, stride=1, padding=POOL // 2)[0]
    goes = columns < begin
    goes[pooled.topk(min(KEPT, begin)).indices] = False
    rows = torch.arange(search.answer_begin, search.answer_end)
    later = columns > rows[:, None]
    scores = _scores(seen, rows)
    whole, few = (_attended(seen, scores, hidden) for hidden in (later, later | goes))
    errors = (few - whole).norm(dim=(0, 2)) / (whole.norm(dim=(0, 2)) + SMALL)
    return float(errors.sum())


def _scores(seen: Observed, rows: torch.Tensor) -> torch.Tensor:
    """``[heads, rows, tokens]``: of the queries at `rows`."""
    keys = seen.keys[0].float()
    query = seen.query[0, :, rows].float().unflatten(0, (len(keys), -1))
    return (query @ keys[:, None].mT).flatten(0, 1) * seen.scale


def _weights(seen: Observed, scores: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return attention_weights(scores, hidden, seen.softcap, seen.sinks)


def _attended(seen: Observed, scores: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """``[heads, rows, head_dim]``."""
    values = seen.values[0].float()
    weights = _weights(seen, scores, hidden).unflatten(0, (len(values), -1))
    return (weights @ values[:, None]).flatten(0, 1)


def preset_of_heads(
    model: Any,
    name: str,
    out: str | Path,
    samples: Sequence[SearchSample],
    alignment_bytes: int = 4096,
    progress: Progress | None = None,
) -> SwapConfig:
    """Writes a preset's config for a model, and the heads file that it follows from beside it.

    Parameters
    ----------
    name
        A preset that takes heads: ``compresskv``.
    out
        The config to write; the heads file is `heads_path` of it.
    samples, alignment_bytes
        As `find_heads` takes them, and what the disk reads at once.

    Raises
    ------
    ConfigError
        As `find_heads`.
    """
    from kvswap_torch.hf.families import model_parts

    parts = model_parts(model)
    identity, shape = parts.identity, parts.preset_shape(alignment_bytes)
    found = find_heads(model, samples, progress)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    found.save(heads_path(out), identity)
    heads = read_heads(heads_path(out))
    config = SwapConfig.preset(name, heads, shape=shape, model=identity)
    return config.save(out)


def heads_path(config: Path) -> Path:
    """Where the heads file of a config is written to."""
    return config.with_name(f"{config.stem}.heads.json")
