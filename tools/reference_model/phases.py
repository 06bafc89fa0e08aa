"""The curriculum: what each phase trains on, for two CPU cores and for one GPU."""

from __future__ import annotations

from dataclasses import dataclass

# Shares of repeat, same, other, list, pair, hop, record, values.
FIRST = (0.42, 0.38, 0.10, 0.02, 0.02, 0.02, 0.02, 0.02)
MIXED = (0.08, 0.40, 0.26, 0.05, 0.05, 0.06, 0.05, 0.05)
LAST = (0.04, 0.32, 0.24, 0.08, 0.08, 0.06, 0.08, 0.10)
# What must hold at 32K: mostly single facts, thin and dense, two in five beside 28K other tokens.
HOLD = (0.04, 0.44, 0.36, 0.03, 0.04, 0.06, 0.02, 0.01)
# Answers of several parts, then all skills together.
PARTS = (0.03, 0.18, 0.15, 0.22, 0.16, 0.06, 0.20, 0.0)
VALUES = (0.02, 0.14, 0.12, 0.10, 0.08, 0.04, 0.08, 0.42)
ALL = (0.03, 0.28, 0.22, 0.09, 0.09, 0.06, 0.09, 0.14)
FIRM = (0.02, 0.42, 0.26, 0.05, 0.11, 0.07, 0.05, 0.02)


@dataclass(frozen=True)
class Phase:
    """A stretch of training with one length."""

    name: str
    length: int  # tokens of a sample
    batch: int  # samples of a step
    tokens: int  # of the phase
    lr: tuple[float, float]  # at its beginning and end, linear between
    span: int  # largest position reached by skipping
    copy_share: float = 0.0
    filled: tuple[float, float] = (0.3, 0.8)  # share of a sample that is facts and questions
    shares: tuple[float, ...] = MIXED
    text_pieces: int = 0  # of long text beside a sample, see dilution.py; needs batch 1
    text_share: float = 0.4  # of the steps that see it


def _beside_long_text(
    name: str, tokens: int, lr: tuple[float, float], shares: tuple[float, ...]
) -> Phase:
    """Samples of 4K beside 28K other tokens."""
    return Phase(
        name, 4096, 1, tokens, lr, 65536, filled=(0.05, 0.75), shares=shares, text_pieces=7
    )


# What the shipped weights are made with.
CPU = (
    Phase("256", 256, 16, 2_500_000, (2e-3, 2e-3), 2048, copy_share=0.5, shares=FIRST),
    Phase("256 again", 256, 16, 1_200_000, (2e-3, 2e-3), 2048, copy_share=0.5, shares=FIRST),
    Phase("1K", 1024, 6, 2_400_000, (2e-3, 1.8e-3), 32768),
    Phase("4K", 4096, 1, 1_200_000, (1.5e-3, 1.2e-3), 65536, filled=(0.1, 0.5), shares=LAST),
    Phase("8K", 8192, 1, 950_000, (1.2e-3, 5e-5), 65536, filled=(0.05, 0.4), shares=LAST),
    _beside_long_text("4K beside 28K", 1_500_000, (8e-4, 3e-5), HOLD),
    Phase("1K, parts", 1024, 6, 2_400_000, (1.2e-3, 1e-3), 32768, shares=PARTS),
    Phase("1K, values", 1024, 6, 1_500_000, (1.2e-3, 1e-3), 32768, shares=VALUES),
    Phase("4K, values", 4096, 1, 1_000_000, (1e-3, 8e-4), 65536, filled=(0.1, 0.6), shares=VALUES),
    _beside_long_text("4K beside 28K, all", 1_600_000, (8e-4, 3e-5), ALL),
    _beside_long_text("4K beside 28K, firm", 500_000, (4e-4, 2e-5), FIRM),
)
# A GPU shows whole documents of 32K instead: their square costs it little.
GPU = (
    Phase("256", 256, 32, 12_000_000, (2e-3, 2e-3), 2048, copy_share=0.5, shares=FIRST),
    Phase("1K", 1024, 12, 30_000_000, (2e-3, 1.8e-3), 32768),
    Phase("1K, values", 1024, 12, 10_000_000, (1.8e-3, 1.6e-3), 32768, shares=VALUES),
    Phase("4K", 4096, 4, 20_000_000, (1.5e-3, 1.2e-3), 65536, filled=(0.1, 0.5), shares=ALL),
    Phase("16K", 16384, 1, 15_000_000, (1.2e-3, 8e-4), 65536, filled=(0.05, 0.4), shares=ALL),
    Phase("32K", 32768, 1, 10_000_000, (8e-4, 3e-5), 65536, filled=(0.02, 0.3), shares=ALL),
)
PRESETS = {"cpu": CPU, "gpu": GPU}
