"""What the full cache answers, and a method's answers beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from bench.quality.document import Document, Sample
from kvswap_torch.hf.full_cache import full_cache

CHUNK = 4096  # tokens of a document per forward pass


@dataclass(frozen=True)
class Told:
    """What the full cache tells at every row of a document's answers.

    Parameters
    ----------
    rows
        Sample's number -> ``[rows, vocabulary]`` log-probabilities of the next token, fp32.
    """

    rows: dict[int, torch.Tensor]

    def scored(self, document: Document) -> list[dict[str, Any]]:
        """The full cache's own samples, see `score_sample`."""
        return [
            score_sample(sample, self.rows[number], self.rows[number])
            for number, sample in enumerate(document.samples)
        ]


@torch.inference_mode()
def tell(model: Any, document: Document) -> Told:
    """Reads the document once with `DynamicCache`, then every sample after it, teacher-forced.

    Raises
    ------
    UnsupportedModelError
        For a model with sliding windows, whose cache cannot be cut back to the document.
    """
    cache = full_cache(model, "quality")
    for ids in document.ids.split(CHUNK):
        model(input_ids=ids[None], past_key_values=cache, logits_to_keep=1)
    rows = {}
    for number, sample in enumerate(document.samples):
        first = sample.answers[0][0] - 1
        asked = sample.ids[None, :-1]
        output = model(
            input_ids=asked, past_key_values=cache, logits_to_keep=asked.shape[1] - first
        )
        rows[number] = answer_rows(sample, output.logits[0].float(), first).log_softmax(-1)
        cache.crop(len(document.ids) - cache.get_seq_length())
    return Told(rows)


def answer_rows(sample: Sample, logits: torch.Tensor, first: int) -> torch.Tensor:
    """The rows that predict the answers' tokens, of logits ``[rows, vocabulary]`` from `first`."""
    return torch.cat([logits[begin - 1 - first : end - 1 - first] for begin, end in sample.answers])


def score_sample(sample: Sample, rows: torch.Tensor, told: torch.Tensor) -> dict[str, Any]:
    """One sample beside the full cache.

    Parameters
    ----------
    rows
        ``[rows, vocabulary]`` logits of the answers' tokens.
    told
        As `rows`, log-probabilities by the full cache.

    Returns
    -------
    dict
        ``task``, ``depth``, and for each of ``answers``: ``exact``, tokens ``right`` of ``tokens``,
        ``loss``; ``kl`` of the next token's distribution to the full cache's, mean over tokens, in
        nats; ``agree``: tokens at which the same one is most likely.
    """
    answers, row = [], 0
    logs = rows.log_softmax(-1)
    for begin, end in sample.answers:
        mine, full = logs[row : row + end - begin], told[row : row + end - begin]
        row += end - begin
        expected = sample.ids[begin:end]
        right = mine.argmax(-1) == expected
        kl = (full.exp() * (full - mine)).sum(-1).clamp_min(0.0)
        answers.append(
            {
                "exact": bool(right.all()),
                "right": int(right.sum()),
                "tokens": end - begin,
                "loss": round(F.nll_loss(mine, expected).item(), 5),
                "kl": round(kl.mean().item(), 6),
                "agree": int((mine.argmax(-1) == full.argmax(-1)).sum()),
            }
        )
    depth = None if sample.depth is None else round(sample.depth, 4)
    return {"task": sample.task, "depth": depth, "answers": answers}
