"""Presets: published systems as settings of this one engine."""

from __future__ import annotations

from kvswap_torch.preset.definition import TOKENS, Preset, Shape
from kvswap_torch.preset.registry import MISSING, NO_PRESETS, PRESETS, find, presets

__all__ = ["MISSING", "NO_PRESETS", "PRESETS", "TOKENS", "Preset", "Shape", "find", "presets"]
