"""What a shell completes: presets and saved caches (``kvswap --install-completion``)."""

from __future__ import annotations

import os
from pathlib import Path


def preset_names(incomplete: str) -> list[str]:
    """Names of presets that begin so."""
    from kvswap_torch.preset import presets

    return sorted(each.name for each in presets() if each.name.startswith(incomplete))


def saved_caches(incomplete: str) -> list[str]:
    """Folders of saved caches that begin so, and the folders on the way to one."""
    folder, _, start = incomplete.rpartition("/")
    place = Path(folder or ("/" if incomplete.startswith("/") else "."))
    before = incomplete[: len(incomplete) - len(start)]
    try:
        inside = sorted(os.scandir(place), key=lambda entry: entry.name)
    except OSError:
        return []
    return [
        before + entry.name + ("" if os.path.lexists(f"{entry.path}/manifest.json") else "/")
        for entry in inside
        if entry.is_dir() and entry.name.startswith(start)
        and (start or not entry.name.startswith("."))
    ]  # fmt: skip
