"""Methods by name: ``full``, ``product:memory=1/13,score=mass``, ``quest:memory=1/8``."""

from __future__ import annotations

from bench.quality.product import CHANGED, OWN
from kvswap_torch.preset import presets

FULL = "full"
# Every preset is a family of its own: ``quest:memory=1/8`` is ``product:preset=quest,memory=1/8``.
FAMILIES = {FULL: (), "product": (*OWN, *CHANGED)}
FAMILIES |= {preset.name: FAMILIES["product"] for preset in presets()}


def parse(name: str) -> tuple[str, dict[str, str]]:
    """Family and settings of a name.

    Raises
    ------
    ValueError
        For an unknown family or setting, naming those there are.
    """
    family, _, rest = name.partition(":")
    if family not in FAMILIES:
        raise ValueError(
            f"methods: must be of a family {', '.join(FAMILIES)}, got {name!r}; "
            "`kvswap presets` explains them"
        )
    settings = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if key not in FAMILIES[family] or not value:
            raise ValueError(
                f"methods: settings of {family} must be SETTING=VALUE with one of "
                f"{', '.join(FAMILIES[family]) or 'none'}, got {part!r} in {name!r}"
            )
        settings[key] = value
    return family, settings


def product_settings(name: str) -> dict[str, str]:
    """Settings of a method other than the full cache, its preset among them."""
    family, settings = parse(name)
    return settings if family == "product" else {"preset": family} | settings
