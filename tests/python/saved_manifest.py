"""Manifests that are changed and signed again: damage that no checksum finds."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
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


def state_of(saved: Path) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The saved state, and where the bytes of each of its tensors begin and end."""
    whole = (saved / "state.safetensors").read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + length])
    return whole, {
        name: tuple(8 + length + offset for offset in entry["data_offsets"])
        for name, entry in header.items()
    }


def copied(saved: Path, target: Path) -> Path:
    """`target`, which is a copy now."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(saved, target)
    return target


def put_state(saved: Path, state: bytes) -> None:
    """Another state, signed."""
    (saved / "state.safetensors").write_bytes(state)
    with resigned(saved) as manifest:
        manifest["state_bytes"] = len(state)
        manifest["state_checksum"] = f"{checksum_of(state):016x}"
