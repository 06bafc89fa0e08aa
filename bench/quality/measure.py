"""What is measured of one method on one document."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.quality.document import Document, Sample
from bench.quality.emulate import Emulation, Past
from bench.quality.methods import Resolved
from bench.quality.others import Full
from bench.quality.reading import Reading
from bench.quality.told import Told, answer_rows, score_sample
from bench.quality.view import View

MASS_ROWS = 96  # of a document, whose attention mass is compared with the choice
BATCH_ROWS = 192  # tokens of samples that follow at once: bounds the memory of scores
PAD = 0


class _Asking:
    """Lets the question's rows attend everything, as a chunk that is not selected for does."""

    def __init__(self, method: Any, samples: Sequence[Sample]):
        self._method, self._samples = method, samples

    def choose(self, view: View) -> torch.Tensor | None:
        mask = self._method.choose(view)
        if mask is None:
            return None
        asking = torch.ones(len(self._samples), view.rows, dtype=torch.bool)
        for place, sample in enumerate(self._samples):
            for begin, end in sample.answers:
                # An answer's last token is read together with what is asked next.
                asking[place, begin : end - 1] = False
        return mask | asking[:, None, :, None]


@dataclass
class Layers:
    """Sums over the measured rows of a document, by task; each row has every head's recall.

    `recall` is the share of a head's attention mass that the method attends; `best` what the best
    choice of as many groups would hold, mean over heads; `overlap` the share of that choice that
    the method made too.
    """

    recall: dict[str, torch.Tensor]  # task -> [layers, heads]
    best: dict[str, torch.Tensor]  # task -> [layers]
    overlap: dict[str, torch.Tensor]  # task -> [layers]
    rows: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Means, rounded."""
        return {
            task: {
                "rows": count,
                "recall": _rounded(self.recall[task] / count),
                "best": _rounded(self.best[task] / count),
                "overlap": _rounded(self.overlap[task] / count),
            }
            for task, count in self.rows.items()
        }


def written(emulation: Emulation, past: Past, document: Document) -> Document:
    """The document with what the full cache writes where a sample leaves that open, greedily."""
    samples = []
    for sample in document.samples:
        ids = sample.ids
        for _ in range(sample.to_write):
            logits = emulation.follow(past, ids[None], Full(), _unobserved, 1)
            ids = torch.cat([ids, logits[0, -1:].argmax(-1)])
        samples.append(sample.written(ids[len(sample.ids) :]) if sample.to_write else sample)
    return replace(document, samples=tuple(samples))


def tell(emulation: Emulation, past: Past, document: Document) -> Told:
    """What the full cache tells of every sample."""
    rows: dict[int, torch.Tensor] = {}

    def keep(number: int, sample: Sample, logits: torch.Tensor) -> None:
        rows[number] = logits.log_softmax(-1)

    _follow(emulation, past, document, Resolved("full", Full()), None, keep)
    return Told(rows)


def run(
    emulation: Emulation, past: Past, document: Document, resolved: Resolved, told: Told
) -> dict[str, Any]:
    """Lets every sample of a document follow it under a method.

    Parameters
    ----------
    told
        By the full cache, of the same document.

    Returns
    -------
    dict
        ``samples`` (see `score_sample`), ``layers`` (see `Layers`), and what `Reading` counts; fit
        for JSON.
    """
    observer = _Observer(resolved, document, len(past.layers), emulation.parts.shape.heads)
    answered: dict[int, dict[str, Any]] = {}

    def score(number: int, sample: Sample, rows: torch.Tensor) -> None:
        answered[number] = score_sample(sample, rows, told.rows[number])

    _follow(emulation, past, document, resolved, observer, score)
    return {
        "samples": [answered[i] for i in sorted(answered)],
        "layers": observer.layers.as_dict(),
        **observer.reading.as_dict(),
    }


Take = Callable[[int, Sample, torch.Tensor], None]
"""Called with a sample's number, itself, and the logits of its answers' rows one after another."""


def _follow(
    emulation: Emulation,
    past: Past,
    document: Document,
    resolved: Resolved,
    observer: _Observer | None,
    take: Take,
) -> None:
    past.forget()
    order = sorted(range(len(document.samples)), key=lambda i: len(document.samples[i].ids))
    for batch in _batches(order, document):
        samples = [document.samples[i] for i in batch]
        ids = torch.nn.utils.rnn.pad_sequence(
            [sample.ids[:-1] for sample in samples], batch_first=True, padding_value=PAD
        )
        method = _Asking(resolved.method, samples) if resolved.exact_question else resolved.method
        first = min(sample.answers[0][0] for sample in samples) - 1
        if observer is not None:
            observer.begin(batch, samples, ids.shape[1])
        logits = emulation.follow(past, ids, method, observer or _unobserved, ids.shape[1] - first)
        for number, sample, of_sample in zip(batch, samples, logits, strict=True):
            take(number, sample, answer_rows(sample, of_sample, first))
    past.forget()


def _unobserved(view: View, mask: torch.Tensor | None) -> None:
    pass


def _batches(order: list[int], document: Document) -> list[list[int]]:
    """Samples of about one length together."""
    batches: list[list[int]] = [[]]
    for i in order:
        if batches[-1] and (len(batches[-1]) + 1) * len(document.samples[i].ids) > BATCH_ROWS:
            batches.append([])
        batches[-1].append(i)
    return batches


class _Observer:
    """Compares choices with true attention mass, layer by layer."""

    def __init__(self, resolved: Resolved, document: Document, layers: int, heads: int):
        self._frame = resolved.frame
        self._share = MASS_ROWS / max(1, sum(len(sample.ids) - 1 for sample in document.samples))
        self.reading = Reading(resolved, document, layers)
        self.layers = Layers(
            defaultdict(lambda: torch.zeros(layers, heads)),
            defaultdict(lambda: torch.zeros(layers)),
            defaultdict(lambda: torch.zeros(layers)),
            defaultdict(int),
        )

    def begin(self, batch: list[int], samples: list[Sample], rows: int) -> None:
        """The next calls are of these samples, padded to so many rows."""
        self.reading.begin(batch, samples)
        numbers, tasks = [], []
        for place, sample in enumerate(samples):
            count = len(sample.ids) - 1
            wanted = max(1, round(self._share * count))
            # The last rows are those of the answer.
            for row in torch.linspace(0, count - 1, wanted + 1).round().long()[1:].tolist():
                numbers.append(place * rows + row)
                tasks.append(sample.task)
        self._rows, self._tasks = torch.tensor(numbers), tasks
        for task in tasks:
            self.layers.rows[task] += 1

    def __call__(self, view: View, mask: torch.Tensor | None) -> None:
        attended = None if mask is None else self._measured(view, mask & view.causal())
        total = torch.zeros(len(self._rows), view.columns)
        for head, mass in view.masses(self._rows):
            total += mass
            if attended is None:
                held = mass.sum(1)
            else:
                own = attended[:, head // view.repeats if attended.shape[1] > 1 else 0]
                held = (mass * own).sum(1)
            for task, value in zip(self._tasks, held.tolist(), strict=True):
                self.layers.recall[task][view.layer, head] += value
        if self._frame is not None:
            self._compare(view, total / view.query.shape[1], mask)
        self.reading.note(view, mask)

    def _measured(self, view: View, mask: torch.Tensor) -> torch.Tensor:
        """[batch, k, n, columns] -> the measured rows, [count, k, columns]."""
        return mask[self._rows // view.rows, :, self._rows % view.rows]

    def _compare(self, view: View, mass: torch.Tensor, mask: torch.Tensor | None) -> None:
        """mass: [count, columns], mean over heads."""
        row = self._rows % view.rows
        choosable = self._frame.choosable(view)[row]
        grouped = self._frame.group(mass, "sum").masked_fill(~choosable, 0.0)
        always = 1.0 - grouped.sum(1)
        top = grouped.topk(min(self._frame.groups_max, grouped.shape[1]), dim=1)
        best = top.values.sum(1) + always
        if mask is None:
            shared = torch.ones(len(best))
        else:
            made = self._frame.group(self._measured(view, mask)).float().mean(1)
            wanted = choosable.gather(1, top.indices)
            hits = (made.gather(1, top.indices) * wanted).sum(1)
            shared = hits / wanted.sum(1).clamp_min(1)
        for i, task in enumerate(self._tasks):
            self.layers.best[task][view.layer] += best[i]
            self.layers.overlap[task][view.layer] += shared[i]


def _rounded(values: torch.Tensor) -> Any:
    return [
        [round(x, 4) for x in row] if isinstance(row, list) else round(row, 4)
        for row in values.tolist()
    ]
