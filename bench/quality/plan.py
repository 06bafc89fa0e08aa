"""What is run by default, and the sets of methods that have a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.quality.methods import parse
from kvswap_torch.preset import presets

CORE = (
    "full",
    "kvswap",
    "kvswap:memory=1/13",
    "kvswap:query=true",
    "kvswap:question=exact",
    "paper",
    "oracle-groups",
    "recent",
    "snapkv",
    "random",
)
# One thing varied at a time around the config.
GRID = (
    "oracle-tokens",
    *(f"kvswap:group={group}" for group in (1, 2, 8, 16)),
    *(f"kvswap:rank={rank}" for rank in (8, 16, 32, 64, 128)),
    *(f"kvswap:groups={groups}" for groups in (25, 50, 200, 400)),
    *(f"kvswap:memory=1/{part}" for part in (26, 8, 4)),
    *(f"recent:memory=1/{part}" for part in (26, 8, 4)),
    *(f"snapkv:memory=1/{part}" for part in (26, 8, 4)),
    *(f"oracle-groups:groups={groups}" for groups in (25, 50, 200)),
    *(f"kvswap:projection={kind}" for kind in ("svd", "query-aware", "corrected", "estimated")),
    *(f"kvswap:score={score}" for score in ("softmax", "max")),
    "kvswap:query=predicted",
    "kvswap:sinks=0",
    "kvswap:tail=4",
    "kvswap:dtype=model",
)

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


def layer_set(layers: int) -> tuple[str, ...]:
    """KVSwap with one layer at a time on the full cache: where a gap comes from."""
    return tuple(f"kvswap:exact={layer}" for layer in range(layers))


@dataclass(frozen=True)
class Stretch:
    """Documents of one length, and the methods that are run on each."""

    length: int
    documents: int
    methods: tuple[str, ...]


def make_plan(
    lengths: Sequence[int],
    documents: Sequence[int],
    methods: Sequence[str],
    grid_to: int,
    layers: int,
) -> list[Stretch]:
    """What to run, shortest first.

    Parameters
    ----------
    documents
        One number for all lengths, or one for each.
    methods
        Names, and the sets ``core``, ``grid``, ``layers`` and ``presets``; the full cache is always
        run.
    grid_to
        Longest documents that the sets ``grid`` and ``layers`` are run on.
    layers
        Of the model.

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
    large = {"grid": GRID, "layers": layer_set(layers)}
    stretches = []
    for length, count in sorted(zip(lengths, counts, strict=True)):
        names = ["full"]
        for method in methods:
            if method in large:
                names += large[method] if length <= grid_to else ()
            else:
                names += {"core": CORE, "presets": OF_PRESETS}.get(method, (method,))
        for name in names:
            parse(name)
        stretches.append(Stretch(length, count, tuple(dict.fromkeys(names))))
    return stretches
