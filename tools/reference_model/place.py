"""Where the trained model and its documents stand: beside the examples that read them."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "reference_model"
