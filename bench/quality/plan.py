"""What is run by default, and the sets of methods that have a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.quality.methods import FULL, parse
from kvswap_torch.preset import presets

DEFAULTS = ("product:memory=1/8", "product:memory=1/13")
SHARES = ("1/4", "1/13", "1/34")


def preset_method(name: str, share: str, question: str = "inside") -> str:
    """A preset from its own settings, as the product, in a share of the full cache's memory."""
    asked = "" if question == "after" else f",question={question}"
    return f"product:preset={name},memory={share}{asked}"


# One that needs a file of the model is left out, since other models have none (`heads.py`); it is
# named: product:preset=compresskv,memory=1/13.
OF_PRESETS = tuple(
    preset_method(preset.name, share)
    for preset in presets()
    for share in SHARES
    if not preset.needs
)
SETS = {"defaults": DEFAULTS, "presets": OF_PRESETS}


@dataclass(frozen=True)
class Stretch:
    """Documents of one length, and the methods that are run on each."""

    length: int
    documents: int
    methods: tuple[str, ...]


def make_plan(
    lengths: Sequence[int], documents: Sequence[int], methods: Sequence[str]
) -> list[Stretch]:
    """What to run, shortest first.

    Parameters
    ----------
    documents
        One number for all lengths, or one for each.
    methods
        Names, and the sets ``defaults`` and ``presets``; the full cache is always run.

    Raises
    ------
    ValueError
        For numbers that are not positive, counts that do not match, or an unknown method.
    """
    counts = list(documents) * len(lengths) if len(documents) == 1 else list(documents)
    if not lengths or len(counts) != len(lengths) or min(*lengths, *counts) < 1:
        raise ValueError(
            "plan: lengths must be positive, with one positive count of documents for all or one "
            f"for each, got {list(lengths)} and {list(documents)}"
        )
    names = [FULL, *(name for method in methods for name in SETS.get(method, (method,)))]
    for name in names:
        parse(name)
    pairs = sorted(zip(lengths, counts, strict=True))
    return [Stretch(length, count, tuple(dict.fromkeys(names))) for length, count in pairs]
