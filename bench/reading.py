"""A model to watch, and documents with facts and questions for it to read."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from kvswap_torch.tuning.documents import default_samples
from kvswap_torch.tuning.observe import Calibrator
from kvswap_torch.tuning.samples import Sample

REFERENCE = Path(__file__).resolve().parents[1] / "examples" / "reference_model"


def open_reading(model: Path, length: int, documents: int) -> tuple[Calibrator, list[Sample]]:
    """The model in a folder, and so many documents of `length` tokens, held-out ones first."""
    calibrator = Calibrator(AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval())
    fitted, held_out = default_samples(AutoTokenizer.from_pretrained(model), (length,), documents)
    return calibrator, [*held_out, *fitted][:documents]
