"""Saved caches of version 1 are read by this version, and by every later one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvswap_torch import ConfigError, CorruptionError, KVSwapCache
from tests.python.saved_conversation import goes_on
from tests.python.saved_files import FAMILY, PADDING, VERSION_1
from tests.python.tiny_models import has_native, tiny_model

if has_native():
    from kvswap_torch import _C
pytestmark = pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")


def copied(name: str, folder: Path) -> Path:
    """As it was saved: git keeps no modes."""
    saved = folder / name
    shutil.copytree(VERSION_1 / name, saved)
    saved.chmod(0o700)
    for file in saved.iterdir():
        file.chmod(0o600)
    return saved


@pytest.mark.parametrize("name", FAMILY)
def test_it_is_whole_and_goes_on(name: str, tmp_path: Path) -> None:
    saved = copied(name, tmp_path)
    _C.SavedCache(str(saved)).verify()
    out = torch.tensor(json.loads((VERSION_1 / f"{name}.json").read_text()))
    model = tiny_model(FAMILY[name])
    with KVSwapCache.open(model, saved, path=tmp_path) as cache:
        assert cache.stats().probe.startswith("passed")
        assert torch.equal(cache.token_ids, out[:, :-1])
        tokens = goes_on(model, cache, out, PADDING[name])
        if name == "covering":
            mask = torch.ones_like(out)
            again = model.generate(
                input_ids=out, attention_mask=mask, do_sample=False, min_new_tokens=10,
                max_new_tokens=10,
            )  # fmt: skip
            assert tokens == again.tolist()


def test_its_tensors_are_there_for_who_has_not_imported_torch(tmp_path: Path) -> None:
    saved = copied("choosing", tmp_path)
    program = """
import sys
from kvswap_torch import _C
print(_C.SavedCache(sys.argv[1]).tensors()["token_ids"].tolist())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, saved], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    out = json.loads((VERSION_1 / "choosing.json").read_text())
    assert json.loads(done.stdout) == [row[:-1] for row in out]


@pytest.mark.parametrize("file", ["manifest.json", "state.safetensors", "records.bin"])
def test_a_flipped_bit_is_found_in_each_file(file: str, tmp_path: Path) -> None:
    saved = copied("choosing", tmp_path)
    target = saved / file
    content = bytearray(target.read_bytes())
    content[len(content) // 2] ^= 4
    target.write_bytes(content)
    with pytest.raises((CorruptionError, ConfigError), match=file.split(".")[0]):
        _C.SavedCache(str(saved)).verify()


def test_what_this_version_does_not_know_is_refused_by_name(tmp_path: Path) -> None:
    saved = copied("covering", tmp_path)
    manifest = json.loads((saved / "manifest.json").read_text())
    (saved / "manifest.json").write_text(json.dumps(manifest | {"kvswap_cache": 6}))
    with pytest.raises(ConfigError, match="must be of version 5 or lower"):
        _C.SavedCache(str(saved))
