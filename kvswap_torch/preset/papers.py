"""Where the papers are that presets come from."""

from __future__ import annotations

from kvswap_torch.preset.definition import Preset

__all__ = ["PAPERS", "links"]

# Of PRKV, which was read as an anonymous submission, no address is known.
PAPERS = {
    "ARKV": "https://arxiv.org/abs/2603.08727",
    "ArkVale": "https://openreview.net/forum?id=4oAt5L41Ye",
    "CAKE": "https://arxiv.org/abs/2503.12491",
    "CompressKV": "https://arxiv.org/abs/2508.02401",
    "DynaKV": "https://arxiv.org/abs/2511.07427",
    "FlexGen": "https://proceedings.mlr.press/v202/sheng23a.html",
    "H2O": "https://arxiv.org/abs/2306.14048",
    "InfiniGen": "https://arxiv.org/abs/2406.19707",
    "KIVI": "https://arxiv.org/abs/2402.02750",
    "KVSwap": "https://arxiv.org/abs/2511.11907",
    "Loki": "https://arxiv.org/abs/2406.02542",
    "Quest": "https://arxiv.org/abs/2406.10774",
    "ShadowKV": "https://arxiv.org/abs/2410.21465",
    "SnapKV": "https://arxiv.org/abs/2404.14469",
    "StreamingLLM": "https://arxiv.org/abs/2309.17453",
    "TOVA": "https://arxiv.org/abs/2401.06104",
    "ThinK": "https://arxiv.org/abs/2407.21018",
}


def links(preset: Preset) -> dict[str, str]:
    """The papers that a preset names, and where they are; those without an address are left out."""
    names = preset.paper.split(", ")
    return {name: PAPERS[name] for name in names if name in PAPERS}
