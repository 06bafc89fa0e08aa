"""Manifests that are changed and signed again: damage that no checksum finds."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.python.faulty_kernel import checksum_of


def signed(manifest: dict[str, Any]) -> bytes:
    bare = {name: value for name, value in manifest.items() if name != "checksum"}
    text = json.dumps(bare, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    bare["checksum"] = f"{checksum_of(text.encode('utf-8', 'surrogatepass')):016x}"
    return json.dumps(bare, indent=2, ensure_ascii=False).encode("utf-8", "surrogatepass")


@contextlib.contextmanager
def resigned(saved: Path) -> Iterator[dict[str, Any]]:
    """The manifest, written anew at the end."""
    manifest = json.loads((saved / "manifest.json").read_text())
    yield manifest
    (saved / "manifest.json").write_bytes(signed(manifest))
